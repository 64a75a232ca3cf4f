"""No compression: what plain Horovod does."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.dense import dense_rounds
from hvdcomp.compressors.requests import Rounds, Unit, Volume


class NoCompression(Compressor):
    """Gradients travel as they are, by allreduce; bfloat16, which Horovod refuses, by alltoall and allgather."""

    name: ClassVar[str] = "none"
    collective: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Horovod's Compression.none"
    default_exclude: ClassVar[tuple[str, ...]] = ()
    checks_finite: ClassVar[bool] = False

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        return (yield from dense_rounds(acc, unit, in_place=True))

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        return [Volume(0, "allreduce", 4 * torch.Size(shape).numel())]

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        return payload
