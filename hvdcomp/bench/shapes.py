"""The tensors of well-known networks: names and shapes, roughly in the order of the forward pass, without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hvdcomp.training import models

Shapes = dict[str, torch.Size]


def of_model(name: str) -> Shapes:
    """A network of `hvdcomp list models`, made without memory."""
    with torch.device("meta"):
        model = models.MODELS.find(name).factory()
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def bert(layers: int = 12, width: int = 768, vocabulary: int = 30522, positions: int = 512) -> Shapes:
    """BERT's encoder with its pooler. Source: Devlin et al. 2019, BERT base by default."""

    def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, rows in (("word", vocabulary), ("position", positions), ("token_type", 2)):
            yield f"embeddings.{name}.weight", (rows, width)
        yield from _norm("embeddings.norm", width)
        for layer in range(layers):
            name = f"encoder.{layer}"
            for part in ("query", "key", "value", "output"):
                yield from _linear(f"{name}.attention.{part}", width, width)
            yield from _norm(f"{name}.attention.norm", width)
            yield from _linear(f"{name}.intermediate", width, 4 * width)
            yield from _linear(f"{name}.output", 4 * width, width)
            yield from _norm(f"{name}.norm", width)
        yield from _linear("pooler", width, width)

    return _as_shapes(tensors())


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": lambda: of_model("resnet50-imagenet"),
    "resnet101": lambda: of_model("resnet101-imagenet"),
    "vgg16": lambda: of_model("vgg16-imagenet"),
    "lstm-ptb": lambda: of_model("lstm-ptb"),
    "bert-base": bert,
}


def _linear(name: str, given: int, made: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (made, given)
    yield f"{name}.bias", (made,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _as_shapes(tensors: Iterator[tuple[str, tuple[int, ...]]]) -> Shapes:
    return {name: torch.Size(shape) for name, shape in tensors}
