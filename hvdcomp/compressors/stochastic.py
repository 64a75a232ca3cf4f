"""What methods that round at random have in common: a seed, and a private generator a worker, step and tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hvdcomp.checks import check_count
from hvdcomp.compressors.quantised import Quantised
from hvdcomp.compressors.randomk import shared_seed
from hvdcomp.compressors.requests import Unit


class Stochastic(Quantised):
    """A quantised method without bias: the expectation of what is sent is the tensor, so that no residual is kept."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = check_count("seed", seed, 0, hint="the same on all workers, which draw different numbers from it")

    def uniform(self, values: Tensor, unit: Unit) -> Tensor:
        """Numbers in [0, 1) of the shape, type and device of ``values``, drawn from (seed, step, name, worker)."""
        number = shared_seed(self.seed, unit.step, unit.name, unit.worker)
        if values.device.type == "cpu":
            kind = np.float32 if values.dtype == torch.float32 else np.float64
            return torch.from_numpy(np.random.default_rng(number).random(tuple(values.shape), dtype=kind))
        generator = torch.Generator(values.device).manual_seed(number >> 1)
        return torch.rand(values.shape, generator=generator, dtype=values.dtype, device=values.device)

    def round_(self, values: Tensor, unit: Unit) -> Tensor:
        """Non-negative ``values`` rounded to whole numbers, in place: up with the probability of their fraction."""
        fractions = values.frac()
        return values.floor_().add_(self.uniform(values, unit) < fractions)
