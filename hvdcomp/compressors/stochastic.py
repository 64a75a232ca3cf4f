"""What methods that round at random have in common: a seed, from which each worker, step and tensor has its own."""

from __future__ import annotations

from hvdcomp.checks import check_count
from hvdcomp.compressors.quantised import Quantised
from hvdcomp.compressors.randomk import shared_seed
from hvdcomp.compressors.requests import Unit


class Stochastic(Quantised):
    """A quantised method without bias: the expectation of what is sent is the tensor, so that no residual is kept."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = check_count("seed", seed, 0, hint="the same on all workers, which draw different numbers from it")

    def key(self, unit: Unit) -> int:
        """64 bits of (seed, step, name, worker), from which a step's random numbers follow."""
        return shared_seed(self.seed, unit.step, unit.name, unit.worker)
