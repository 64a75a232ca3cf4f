"""float16 on the wire."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.requests import Allreduce, Dense, Rounds, Unit, Volume, keep_spare, spare
from hvdcomp.kernels import Moments, empty, moments_in_passing

LARGEST = torch.finfo(torch.float16).max


class FP16(Compressor):
    """Gradients are cast to float16 and averaged by allreduce; each is divided by the number of workers before the sum.

    A finite value beyond 65504 is sent as 65504, and a mean is at most that; a step with a NaN or an Inf is skipped.
    On a CPU the memory of what is sent, half of the gradient's, is kept for the next step.
    """

    name: ClassVar[str] = "fp16"
    collective: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Horovod's Compression.fp16, saturating"
    default_exclude: ClassVar[tuple[str, ...]] = ()

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        halves = _saturated(acc, unit.moments, spare(unit, "halves"))
        keep_spare(unit, acc, {"halves": halves})
        mean = yield Allreduce(halves, in_place=True)
        return Dense(mean.clamp_(-LARGEST, LARGEST))  # 3 x 65504 / 3 is Inf: the quotient was rounded up before the sum

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        return [Volume(0, "allreduce", 2 * torch.Size(shape).numel(), halves=True)]

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if tensor.dtype == torch.float16:
            return tensor, tensor.dtype
        return _saturated(tensor.reshape(-1)).view(tensor.shape), tensor.dtype

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        return payload.to(ctx)


def _saturated(values: Tensor, known: Moments | None = None, out: Tensor | None = None) -> Tensor:
    """A flat tensor as float16, in the memory ``out`` if given; ``known`` are its moments, if somebody took them."""
    known = known or moments_in_passing(values)
    if known is None or not known.largest <= LARGEST:
        values = torch.where(torch.isfinite(values), values.clamp(-LARGEST, LARGEST), values)
    out = empty(values.numel(), torch.float16, values.device) if out is None else out
    return out.copy_(values)
