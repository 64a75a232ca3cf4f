"""Random-k: elements chosen by a seed that all workers share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hvdcomp.checks import check_count
from hvdcomp.compressors.requests import Allreduce, Rounds, SharedSparse, Unit, Volume
from hvdcomp.compressors.sparsifier import Sparsifier
from hvdcomp.kernels import Collected, squared_norm


def shared_seed(*parts: object) -> int:
    """64 bits that depend on every part and on their order, alike in every process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


class RandomK(Sparsifier):
    """k = max(1, floor(numel / cf)) elements, alike on all workers, so that only values travel, by allreduce.

    The positions are drawn without replacement by a generator of their own from (seed, step, tensor name).

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all.
        seed: a whole number >= 0, the same on all workers.
        error_feedback: keep what was not sent for the next step, and send values as they are; without it they are
            multiplied by numel / k, which makes the mean unbiased.
    """

    name: ClassVar[str] = "randomk"
    collective: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Wangni et al. 2018; Stich et al. 2018 (with memory)"

    def __init__(self, cf: float = 100.0, seed: int = 0, error_feedback: bool = True) -> None:
        super().__init__(cf, error_feedback)
        self.seed = check_count("seed", seed, 0, hint="the same on all workers")

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        generator = np.random.default_rng(shared_seed(self.seed, unit.step, level, unit.name))
        drawn = generator.choice(values.numel(), size=k, replace=False, shuffle=False)
        positions = torch.from_numpy(np.sort(drawn)).to(values.device)
        return Collected(positions, values[positions])

    def estimated_squares(self, acc: Tensor, counts: Sequence[int]) -> list[float]:
        total = float(squared_norm(acc))
        return [total * k / max(acc.numel(), 1) for k in counts]

    def send(self, kept: Collected, acc: Tensor, unit: Unit) -> Rounds:
        mean = yield Allreduce(kept.values)
        return SharedSparse(kept.positions, mean, 1.0 if self.error_feedback else unit.numel / mean.numel())

    def sparse_requests(self, kept: int, workers: int) -> list[Volume]:
        return [Volume(0, "allreduce", 4 * kept)]
