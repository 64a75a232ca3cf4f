"""At its loss-free setting every method trains as plain Horovod does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import hvdcomp
from ranks.tools import LOSS_FREE, assert_alike, assert_close, net, raised, train

STEPS = 50


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def _both(method: str, base: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, tolerance: float) -> None:
    ours, plain = net(dtype=dtype), net(dtype=dtype)
    train(
        ours,
        hvdcomp.DistributedOptimizer(base(ours.parameters()), ours.named_parameters(), LOSS_FREE[method]()),
        STEPS,
    )
    train(plain, hvd.DistributedOptimizer(base(plain.parameters()), plain.named_parameters()), STEPS)
    assert_close(ours.parameters(), plain.parameters(), rtol=tolerance, atol=tolerance)
    assert_alike(ours.parameters())
    start = net(dtype=dtype)
    moved = [(a - b).abs().max().item() for a, b in zip(ours.parameters(), start.parameters(), strict=True)]
    assert min(moved) > 1e-3, moved
    assert raised(AssertionError, lambda: assert_close(ours.parameters(), start.parameters(), tolerance, tolerance))


def check_none_sgd() -> None:
    _both("none", _sgd, torch.float32, 1e-6)


def check_none_adam() -> None:
    _both("none", _adam, torch.float64, 1e-12)


def check_topk_sgd() -> None:
    _both("topk", _sgd, torch.float32, 1e-6)


def check_topk_adam() -> None:
    _both("topk", _adam, torch.float64, 1e-12)


def check_randomk_sgd() -> None:
    _both("randomk", _sgd, torch.float32, 1e-6)


def check_randomk_adam() -> None:
    _both("randomk", _adam, torch.float64, 1e-12)


def check_powersgd_sgd() -> None:
    _both("powersgd", _sgd, torch.float32, 1e-3)


def check_powersgd_sgd_in_float64() -> None:
    _both("powersgd", _sgd, torch.float64, 1e-11)


def check_powersgd_adam() -> None:
    _both("powersgd", _adam, torch.float64, 1e-7)
