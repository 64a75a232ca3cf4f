"""Natural compression: each element as a power of two, rounded at random."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.quantised import blank, split
from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.stochastic import Stochastic
from hvdcomp.kernels import peak
from hvdcomp.kernels.codes import add_lookup_, round_powers

_ZERO = 127
"""The code of zero; 0 to 126 are powers of two, counted down from the tensor's largest, and bit 7 is the sign."""


class Natural(Stochastic):
    """Sends sign(v) * 2^e, e being log2 |v| rounded down or up so that the mean is v: 8 bits an element.

    The paper takes 9 bits; here the exponent counts down from the tensor's largest, and what is smaller by more than a
    factor of 2^125 is sent as zero or as the least power, without bias too. Only above 2^127 (2^1023 for float64) there
    is no power to round up to. The relative variance is at most 1/8: every tensor is compressed, as in the paper.

    Args:
        seed: a whole number >= 0, the same on all workers, which draw different numbers from it.
    """

    name: ClassVar[str] = "natural"
    source: ClassVar[str] = "Horvath et al. 2019, natural compression"

    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        return itemsize + numel

    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        payload, header, codes = blank(1, values.numel(), values)
        top = _top(peak(values) if unit.moments is None else unit.moments.largest, values.dtype)
        round_powers(values, top, self.key(unit), codes)
        header.fill_(top)
        return payload

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        top, codes = split(payload, 1, out.dtype)
        powers = torch.exp2(top - torch.arange(_ZERO, dtype=torch.float64, device=top.device))
        positive = torch.cat([powers, powers.new_zeros(1)])
        add_lookup_(out, codes, 8, weight * torch.cat([positive, -positive]))


def _top(magnitude: float, dtype: torch.dtype) -> int:
    """The exponent of the largest power of two that a tensor of this largest magnitude may be rounded to."""
    largest = math.frexp(torch.finfo(dtype).max)[1] - 1
    return min(math.frexp(magnitude)[1], largest) if math.isfinite(magnitude) else 0
