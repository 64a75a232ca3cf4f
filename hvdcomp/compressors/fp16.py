"""float16 on the wire."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.requests import Allreduce, Dense, Rounds, Unit, Volume

LARGEST = torch.finfo(torch.float16).max


class FP16(Compressor):
    """Gradients are cast to float16 and averaged by allreduce; each is divided by the number of workers before the sum.

    A finite value beyond 65504 is sent as 65504, and a mean is at most that; a step with a NaN or an Inf is skipped.
    """

    name: ClassVar[str] = "fp16"
    collective: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Horovod's Compression.fp16, saturating"
    default_exclude: ClassVar[tuple[str, ...]] = ()

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        half, ctx = self.compress(acc)
        mean = yield Allreduce(half)
        mean = mean.clamp(-LARGEST, LARGEST)  # 3 x 65504 / 3 is Inf: the quotient was rounded up before the sum
        return Dense(self.decompress(mean, ctx))

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        return [Volume(0, "allreduce", 2 * torch.Size(shape).numel())]

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if tensor.dtype == torch.float16:
            return tensor, tensor.dtype
        saturated = torch.where(torch.isfinite(tensor), tensor.clamp(-LARGEST, LARGEST), tensor)
        return saturated.to(torch.float16), tensor.dtype

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        return payload.to(ctx)
