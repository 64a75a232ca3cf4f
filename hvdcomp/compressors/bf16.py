"""bfloat16 on the wire, which Horovod cannot reduce: the sum is taken by the receivers, in float32."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.dense import bfloat16_rounds
from hvdcomp.compressors.requests import Rounds, Unit, Volume


class BF16(Compressor):
    """Gradients are cast to bfloat16 (8 bits of precision, float32's range) and summed in float32."""

    name: ClassVar[str] = "bf16"
    collective: ClassVar[str] = "alltoall"
    source: ClassVar[str] = "bfloat16 cast; summed in float32 by reduce-scatter and allgather"
    default_exclude: ClassVar[tuple[str, ...]] = ()

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        return (yield from bfloat16_rounds(acc, unit))

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        part = -(-torch.Size(shape).numel() // workers)
        return [Volume(0, "alltoall", 2 * part * workers), Volume(1, "allgather", 2 * part)]

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.to(torch.bfloat16), tensor.dtype

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        return payload.to(ctx)
