"""QSGD: each element as one of a few levels of its bucket's norm, rounded at random."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_count
from hvdcomp.compressors.quantised import blank, split
from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.stochastic import Stochastic
from hvdcomp.kernels.codes import add_levels_, round_levels

_LARGEST_LEVEL = 127


class QSGD(Stochastic):
    """Sends sign(v) * level, 8 bits, and a norm a bucket: ||v||_2 * level / levels is v on average.

    As in the paper small tensors stay dense: by default those with one dimension.

    Args:
        levels: quantisation levels above zero, 1 to 127; the variance falls with them, the bytes do not.
        bucket: elements that share a norm, >= 1; larger ones have a larger variance and fewer norms.
        seed: a whole number >= 0, the same on all workers, which draw different numbers from it.
    """

    name: ClassVar[str] = "qsgd"
    source: ClassVar[str] = "Alistarh et al. 2017, QSGD with buckets"
    default_exclude: ClassVar[tuple[str, ...]] = ("1d",)

    def __init__(self, levels: int = _LARGEST_LEVEL, bucket: int = 512, seed: int = 0) -> None:
        super().__init__(seed)
        self.levels = check_count("levels", levels, hint="above zero; they travel as int8, so at most 127")
        if levels > _LARGEST_LEVEL:
            raise ValueError(f"levels must be <= {_LARGEST_LEVEL}, got {levels} (they travel as int8)")
        self.bucket = check_count("bucket", bucket, hint="elements that share a norm; 512 in the paper")

    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        return itemsize * self._buckets(numel) + numel

    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        payload, norms, levels = blank(self._buckets(values.numel()), values.numel(), values)
        round_levels(values, self.levels, self.bucket, self.key(unit), norms, levels)
        return payload

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        norms, levels = split(payload, self._buckets(out.numel()), out.dtype)
        add_levels_(out, levels.view(torch.int8), (norms * (weight / self.levels)).to(out), self.bucket)

    def _buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)
