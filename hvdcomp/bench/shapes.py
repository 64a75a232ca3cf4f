"""The tensors of well-known networks: names and shapes in the order of the forward pass, without building them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

Shapes = dict[str, torch.Size]


def resnet(blocks: tuple[int, int, int, int], classes: int = 1000) -> Shapes:
    """A ResNet of bottleneck blocks for ImageNet. Source: He et al. 2016, table 1."""

    def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from _convolution("conv1", 3, 64, 7)
        width_in = 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            for block in range(count):
                name = f"layer{stage + 1}.{block}"
                yield from _convolution(f"{name}.conv1", width_in, width, 1)
                yield from _convolution(f"{name}.conv2", width, width, 3)
                yield from _convolution(f"{name}.conv3", width, 4 * width, 1)
                if block == 0:
                    yield from _convolution(f"{name}.downsample", width_in, 4 * width, 1)
                width_in = 4 * width
        yield from _linear("fc", width_in, classes)

    return _as_shapes(tensors())


def vgg16(classes: int = 1000) -> Shapes:
    """VGG-16 for ImageNet, without batch normalisation. Source: Simonyan and Zisserman 2015, table 1, column D."""
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]

    def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer, (given, made) in enumerate(pairwise(widths)):
            yield f"features.{layer}.weight", (made, given, 3, 3)
            yield f"features.{layer}.bias", (made,)
        for layer, (given, made) in enumerate([(512 * 7 * 7, 4096), (4096, 4096), (4096, classes)]):
            yield from _linear(f"classifier.{layer}", given, made)

    return _as_shapes(tensors())


def lstm(vocabulary: int, units: int, layers: int) -> Shapes:
    """A word-level language model with untied embeddings. Source: Zaremba et al. 2014."""

    def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embedding.weight", (vocabulary, units)
        for layer in range(layers):
            for kind in ("ih", "hh"):
                yield f"lstm.weight_{kind}_l{layer}", (4 * units, units)
            for kind in ("ih", "hh"):
                yield f"lstm.bias_{kind}_l{layer}", (4 * units,)
        yield from _linear("decoder", units, vocabulary)

    return _as_shapes(tensors())


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
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "vgg16": vgg16,
    "lstm-ptb": lambda: lstm(10_000, 1500, 2),
    "bert-base": bert,
}


def _convolution(name: str, given: int, made: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (made, given, size, size)
    yield from _norm(f"{name}.norm", made)


def _linear(name: str, given: int, made: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (made, given)
    yield f"{name}.bias", (made,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _as_shapes(tensors: Iterator[tuple[str, tuple[int, ...]]]) -> Shapes:
    return {name: torch.Size(shape) for name, shape in tensors}
