"""What the checks share: models, data, gradients that are known exactly, and comparisons between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvdcomp
from hvdcomp.simulation import World

SHAPES = {"conv.weight": (6, 3, 2, 2), "layer.2.weight": (12, 9), "layer.10.weight": (8, 12), "layer.2.bias": (12,)}

LOSSY: dict[str, Callable[[], Any]] = {
    "none": hvdcomp.NoCompression,
    "fp16": hvdcomp.FP16,
    "bf16": hvdcomp.BF16,
    "topk": lambda: hvdcomp.TopK(cf=5),
    "oktopk": lambda: hvdcomp.compressors.OkTopK(cf=5),
    "randomk": lambda: hvdcomp.RandomK(cf=5, seed=3),
    "powersgd": lambda: hvdcomp.PowerSGD(rank=1),
}
LOSS_FREE: dict[str, Callable[[], Any]] = {
    "none": hvdcomp.NoCompression,
    "topk": lambda: hvdcomp.TopK(cf=1),
    "randomk": lambda: hvdcomp.RandomK(cf=1),
    "powersgd": lambda: hvdcomp.PowerSGD(rank=1000, small_matrix_rule=False),
}


def me() -> int:
    return int(hvd.rank())


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A small network, alike on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)]
        return nn.Sequential(*layers).to(dtype)


def batch(step: int, worker: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, step: int, worker: int | None = None) -> Tensor:
    dtype = next(model.parameters()).dtype
    output: Tensor = model(batch(step, me() if worker is None else worker, dtype))
    return (output - 1).square().mean()


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def gradients(step: int, worker: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """A worker's gradients at a step, known to all."""
    generator = torch.Generator().manual_seed(7919 * step + worker + 1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def give(parameters: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """A backward pass that gives each named parameter exactly this gradient, and the others none."""
    products = [(parameters[name] * grad.to(parameters[name].dtype)).sum().double() for name, grad in grads.items()]
    if products:
        torch.stack(products).sum().backward()


def wrap(parameters: Mapping[str, Tensor], compression: Any = "none", *, lr: float = 0.1, **arguments: Any) -> Any:
    """Our optimizer over plain SGD."""
    base = torch.optim.SGD(list(parameters.values()), lr=lr)
    return hvdcomp.DistributedOptimizer(base, list(parameters.items()), compression, **arguments)


def residuals(optimizer: Any) -> dict[str, Tensor]:
    return dict(optimizer.compressor_state_dict()["residuals"])


def world(size: int, compression: Any, **arguments: Any) -> World:
    """A simulation with the exclusions that the optimizer has by default."""
    return World(size, compression, exclude=compression.default_exclude, **arguments)


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def everyones(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    return list(hvd.allgather_object(value, name="tests.everyones"))


def assert_alike(tensors: Iterable[Tensor]) -> None:
    """Bitwise the same on all ranks."""
    digests = everyones(digest(tensors))
    assert len(set(digests)) == 1, digests


def assert_close(left: Iterable[Tensor], right: Iterable[Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_dtype=True)


def assert_equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> None:
    assert_close(left, right, rtol=0, atol=0)


def raised(kind: type[BaseException], action: Callable[[], Any]) -> str:
    """The message of the exception that an action must raise."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
