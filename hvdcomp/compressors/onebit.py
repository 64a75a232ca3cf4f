"""One bit an element with error feedback: EF-signSGD (one scale) and 1-bit SGD (a mean for each side)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.quantised import Deterministic, as_sent, blank, split
from hvdcomp.compressors.requests import Unit
from hvdcomp.kernels.codes import add_lookup_, codes_nbytes, pack_sides


class EFSignSGD(Deterministic):
    """Sends mean(|p|) * sign(p) of p = gradient + residual; the rest stays in the residual.

    The original folds the learning rate into p, this does not. A zero is sent as +. Every tensor is compressed, as in
    the paper; one with a single element then takes 5 bytes instead of 4, but no collective of its own.
    """

    name: ClassVar[str] = "efsignsgd"
    source: ClassVar[str] = "Karimireddy et al. 2019, Algorithm 1 (without the learning rate)"
    error_feedback: bool = True

    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        return itemsize + codes_nbytes(numel, 1)

    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        payload, header, signs = blank(1, codes_nbytes(values.numel(), 1), values)
        sides = pack_sides(values, signs)
        header.fill_(_mean(sides.upper_sum - sides.lower_sum, values.numel(), values.dtype))
        return payload

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        scale, signs = split(payload, 1, out.dtype)
        add_lookup_(out, signs, 1, weight * torch.cat([-scale, scale]))

    def largest(self, payload: Tensor, dtype: torch.dtype) -> float:
        return float(split(payload, 1, dtype)[0])


class OneBit(Deterministic):
    """Sends each element's side, those >= 0 or those below, and the mean of each side; the rest stays in the residual.

    The means are the whole tensor's (the original takes a matrix's columns). Every tensor is compressed, as in the
    paper.
    """

    name: ClassVar[str] = "onebit"
    source: ClassVar[str] = "Seide et al. 2014, 1-bit SGD"
    error_feedback: bool = True

    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        return 2 * itemsize + codes_nbytes(numel, 1)

    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        payload, means, signs = blank(2, codes_nbytes(values.numel(), 1), values)
        sides = pack_sides(values, signs)
        means[0] = _mean(sides.lower_sum, sides.lower, values.dtype)
        means[1] = _mean(sides.upper_sum, sides.upper, values.dtype)
        return payload

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        means, sides = split(payload, 2, out.dtype)
        add_lookup_(out, sides, 1, weight * means)

    def largest(self, payload: Tensor, dtype: torch.dtype) -> float:
        return float(split(payload, 2, dtype)[0].abs().max())


def _mean(total: float, count: int, dtype: torch.dtype) -> float:
    """The sum over ``count``, 0 of none, as the header holds it."""
    return as_sent(total / max(count, 1), dtype)
