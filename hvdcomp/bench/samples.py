"""Gradients to measure on: drawn from a distribution, or recorded in a training run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvdcomp.config import ConfigError
from hvdcomp.training.gradients import load_gradients

_WINDOWS = 16
"""Gradients in a pool of drawn ones."""
_ALIGNED = 64
"""Elements: drawn gradients begin at multiples of it."""
_SPARE_STEPS = 2
"""Recorded steps beyond those that one gradient takes, so that others begin at them."""

DRAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "laplace": lambda generator, count: generator.laplace(size=count),
    "normal": lambda generator, count: generator.standard_normal(count, dtype=np.float32),
    "student-t": lambda generator, count: generator.standard_t(3, size=count),
}
"""Distributions of scale 1; Student's t with 3 degrees of freedom has the heaviest tails."""
REAL = "real"
"""Gradients that a run recorded."""


@dataclass(frozen=True)
class Pool:
    """Several gradients of ``numel`` elements, which overlap in one tensor.

    An element of one is another element of the next, so that residuals grow as they do in training.

    Attributes:
        dist: a key of :data:`DRAWS`, or :data:`REAL`.
        flat: holds them all.
        starts: where each begins.
    """

    dist: str
    numel: int
    flat: Tensor
    starts: list[int]

    def gradient(self, step: int) -> Tensor:
        """(numel,) float32; another one at every step, until all were taken."""
        start = self.starts[step % len(self.starts)]
        return self.flat[start : start + self.numel]


def make_pool(dist: str, numel: int, run_dir: Path | None) -> Pool:
    """Drawn or recorded gradients.

    Args:
        run_dir: for :data:`REAL`, and only for that.

    Raises:
        ConfigError: they do not fit each other, or nothing was recorded.
    """
    if dist != REAL:
        if run_dir is not None:
            raise ConfigError(f"--gradients {run_dir} is read with --dist real, not with --dist {dist}; leave one out")
        return drawn(dist, numel)
    if run_dir is None:
        raise ConfigError("--dist real needs --gradients RUN_DIR, the folder of a run with record_gradients=N")
    return recorded(run_dir, numel)


def drawn(dist: str, numel: int, seed: int = 0) -> Pool:
    """A pool of independent elements."""
    slack = max(numel // 2, _ALIGNED * _WINDOWS)
    values = DRAWS[dist](np.random.default_rng(seed), numel + slack).astype(np.float32, copy=False)
    starts = [slack * i // _WINDOWS // _ALIGNED * _ALIGNED for i in range(_WINDOWS)]
    return Pool(dist, numel, torch.from_numpy(values), starts)


def recorded(run_dir: Path, numel: int) -> Pool:
    """A pool of recorded steps, one after the other, cut to ``numel`` elements, or to what there is.

    Gradients begin at different steps, so that a place stays a place of the same parameter.

    Raises:
        ConfigError: nothing was recorded, or something that is not finite.
    """
    found = load_gradients(run_dir)
    one = sum(gradient.numel() for gradient in next(iter(found.values())).values())
    enough = min(len(found), -(-numel // one) + _SPARE_STEPS)
    steps = [list(found)[i * len(found) // enough] for i in range(enough)]
    flats = [torch.cat([gradient.flatten() for gradient in found[step].values()]) for step in steps]
    for step, flat in zip(steps, flats, strict=True):
        if not torch.isfinite(flat).all():
            raise ConfigError(f"the gradient of step {step} in {run_dir} holds NaN or Inf: remove that step's file")
    starts = [0, *itertools.accumulate(flat.numel() for flat in flats)]
    numel = min(numel, starts.pop())
    joined = torch.cat(flats)
    return Pool(REAL, numel, torch.cat([joined, joined[:numel]]), starts)
