"""QSGD: each element as one of a few levels of its bucket's norm, rounded at random."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_count
from hvdcomp.compressors.quantised import join, split
from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.stochastic import Stochastic
from hvdcomp.kernels.codes import add_levels_

_LARGEST_LEVEL = 127
_MARGIN = 1e-6
"""Keeps level * (norm / levels) of the largest norm within its type."""


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
        padding = self._buckets(values.numel()) * self.bucket - values.numel()
        magnitudes = torch.nn.functional.pad(values.abs(), (0, padding)).view(-1, self.bucket)
        norms = _norms(magnitudes)
        relative = magnitudes.div_(torch.where(norms > 0, norms, 1).unsqueeze(1)).view(-1)[: values.numel()]
        levels = self.round_(relative.clamp_(max=1).mul_(self.levels), unit)
        return join(norms, levels.copysign_(values).to(torch.int8), values.dtype)

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        norms, levels = split(payload, self._buckets(out.numel()), out.dtype)
        add_levels_(out, levels.view(torch.int8), (norms * (weight / self.levels)).to(out), self.bucket)

    def _buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)


def _norms(magnitudes: Tensor) -> Tensor:
    """The 2-norm of each row, by way of its largest element, so that no square leaves the type's range."""
    peaks = magnitudes.amax(dim=1)
    relative = (magnitudes / torch.where(peaks > 0, peaks, 1).unsqueeze(1)).norm(dim=1)
    largest = torch.finfo(magnitudes.dtype).max * (1 - _MARGIN)
    return torch.where(peaks < largest / relative, peaks * relative, largest)  # a zero row: 0 < inf
