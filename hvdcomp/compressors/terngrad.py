"""TernGrad: each element as -s, 0 or +s, two bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_number
from hvdcomp.compressors.quantised import Gathered, as_sent, blank, check_lengths, split
from hvdcomp.compressors.requests import Allgather, Rounds, Unit, Volume
from hvdcomp.compressors.stochastic import Stochastic
from hvdcomp.errors import WireError
from hvdcomp.kernels import Moments, moments_in_passing, peak, squared_norm
from hvdcomp.kernels.codes import add_lookup_, codes_nbytes, round_ternary

_TERNARY = torch.tensor([0.0, 1.0, -1.0, 0.0])
"""What the codes 0, 1 and 2 stand for; 3 is refused."""


class TernGrad(Stochastic):
    """Sends s * sign(g) with probability |g| / s, else 0, where s is the largest magnitude after clipping.

    The mean is that of the clipped gradients: with clipping there is a bias, which the paper takes for less variance.
    sigma is taken about zero; about the mean it would clip a constant tensor to nothing. By default tensors with one
    dimension stay dense (our choice): they are small, and nothing makes up for their noise.

    Args:
        clip: magnitudes are clipped to this many standard deviations, >= 1; None does not clip.
        shared_scale: all workers use the largest s, which one tiny allgather tells first, so that the sum has few
            levels; otherwise each worker sends its own.
        seed: a whole number >= 0, the same on all workers, which draw different numbers from it.
    """

    name: ClassVar[str] = "terngrad"
    source: ClassVar[str] = "Wen et al. 2017, TernGrad; its authors' code"
    default_exclude: ClassVar[tuple[str, ...]] = ("1d",)

    def __init__(self, clip: float | None = 2.5, shared_scale: bool = False, seed: int = 0) -> None:
        super().__init__(seed)
        hint = "standard deviations; the paper uses 2.5, None does not clip"
        self.clip = None if clip is None else check_number("clip", clip, 1, hint=hint)
        if not isinstance(shared_scale, bool):
            raise ValueError(f"shared_scale must be True or False, got {shared_scale!r} (one scale for all workers)")
        self.shared_scale = shared_scale

    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        return itemsize + codes_nbytes(numel, 2)

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        if not self.shared_scale:
            return super().requests(shape, workers)
        return [Volume(0, "allgather", 4), Volume(1, "allgather", codes_nbytes(torch.Size(shape).numel(), 2))]

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        if not self.shared_scale:
            return (yield from super().rounds(acc, unit))
        own = self.scale_of(acc, unit.moments)
        scales = yield Allgather(acc.new_tensor([own]).view(torch.uint8))
        check_lengths(scales, acc.dtype.itemsize, f"{self.name}, a scale")
        scale = float(torch.cat([split(payload, 1, acc.dtype)[0] for payload in scales]).max())
        nbytes = codes_nbytes(unit.numel, 2)
        payload, _, codes = blank(0, nbytes, acc)
        round_ternary(acc.contiguous(), own, scale, self.key(unit), codes)
        payloads = yield Allgather(payload)
        received = check_lengths(payloads, nbytes, f"{self.name}, {unit.numel} elements, shared scale")
        _check_codes(received)
        return SharedTernary(self, received, unit.worker, acc.dtype, scale=scale)

    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        scale = self.scale_of(values, unit.moments)
        payload, header, codes = blank(1, codes_nbytes(values.numel(), 2), values)
        round_ternary(values, scale, scale, self.key(unit), codes)
        header.fill_(scale)
        return payload

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        scale, codes = split(payload, 1, out.dtype)
        add_lookup_(out, codes, 2, weight * scale * _TERNARY.to(scale))

    def checked(self, payloads: Sequence[Tensor], numel: int, dtype: torch.dtype) -> list[Tensor]:
        received = super().checked(payloads, numel, dtype)
        _check_codes([split(payload, 1, dtype)[1] for payload in received])
        return received

    def scale_of(self, values: Tensor, known: Moments | None = None) -> float:
        """The largest magnitude after clipping, 0 of an empty or a zero tensor; ``known`` are the tensor's moments."""
        known = known or moments_in_passing(values)
        top = peak(values) if known is None else known.largest
        if self.clip is None or top == 0 or not math.isfinite(top):
            return top
        if known is None:
            sigma = top * math.sqrt(float(squared_norm(values / top)) / values.numel())  # no square leaves the range
        else:
            sigma = math.sqrt(known.total_sq / values.numel())
        return as_sent(min(top, self.clip * sigma), values.dtype)


@dataclass
class SharedTernary(Gathered):
    """Codes of all workers under one scale."""

    scale: float = 0.0

    def write_mean_(self, out: Tensor) -> None:
        out.zero_()
        for codes in self.payloads:
            add_lookup_(out, codes, 2, self.scale / len(self.payloads) * _TERNARY.double())

    def settle_(self, acc: Tensor) -> None:
        add_lookup_(acc, self.payloads[self.own], 2, -self.scale * _TERNARY.double())


def _check_codes(packed: list[Tensor]) -> None:
    for worker, codes in enumerate(packed):
        if (codes & (codes >> 1) & 0b01010101).any():
            raise WireError(f"worker {worker} sent a ternary code of 3, expected 0 to 2")
