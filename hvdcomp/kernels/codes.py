"""Codes of one, two or eight bits an element: packing them, and adding what they stand for.

As in :mod:`hvdcomp.kernels`, float32 on the CPU is compiled, every other type and device takes torch operations.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2**20
"""Elements that the torch operations decode at a time, so that no dense copy of a payload is made; a multiple of 8."""


def codes_nbytes(count: int, width: int) -> int:
    """Bytes of ``count`` codes of ``width`` bits."""
    return -(-count * width // 8)


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """(n,) bool or uint8 codes below 2^width as ceil(n * width / 8) uint8, least significant bits first.

    Args:
        width: bits a code, 1, 2, 4 or 8.
    """
    if width == 1 and codes.device.type == "cpu":
        return torch.from_numpy(np.packbits(codes.numpy(), bitorder="little"))
    per_byte = 8 // width
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, -codes.numel() % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << place * width
    return packed


def unpack_codes(data: Tensor, count: int, width: int) -> Tensor:
    """The (count,) uint8 codes of :func:`pack_codes`."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(1) >> shifts) & (2**width - 1)).flatten()[:count]


def add_lookup_(out: Tensor, data: Tensor, width: int, table: Tensor) -> None:
    """out[i] += table[code i] for packed codes.

    Args:
        out: (n,) float32 or float64.
        data: (ceil(n * width / 8),) uint8 of :func:`pack_codes`.
        table: (2^width,) what each code stands for.
    """
    table = table.to(out)
    if _is_compiled(out):
        _cpu().add_lookup(out.numpy(), data.numpy(), width, table.numpy())
        return
    for start in range(0, out.numel(), _CHUNK):
        part = out[start : start + _CHUNK]
        codes = unpack_codes(data[start * width // 8 :][: codes_nbytes(part.numel(), width)], part.numel(), width)
        part.add_(table[codes.long()])


def add_levels_(out: Tensor, levels: Tensor, scales: Tensor, bucket: int) -> None:
    """out[i] += levels[i] * scales[i // bucket].

    Args:
        out: (n,) float32 or float64.
        levels: (n,) int8.
        scales: (ceil(n / bucket),) of out's type.
        bucket: elements that share a scale.
    """
    if _is_compiled(out):
        _cpu().add_levels(out.numpy(), levels.numpy(), scales.numpy(), bucket)
        return
    step = max(1, _CHUNK // bucket) * bucket
    for start in range(0, out.numel(), step):
        part = out[start : start + step]
        factors = scales[start // bucket :][: -(-part.numel() // bucket)].repeat_interleave(bucket)[: part.numel()]
        part.add_(levels[start : start + step] * factors)


def warm_up() -> None:
    """Compile or load every loop now rather than within the first step."""
    out = torch.zeros(9)
    add_lookup_(out, torch.zeros(2, dtype=torch.uint8), 1, torch.zeros(2))
    add_levels_(out, torch.zeros(9, dtype=torch.int8), torch.zeros(1), 9)


@cache
def _cpu() -> ModuleType:
    """numba is imported, and its cached code loaded, when it is first needed."""
    from hvdcomp.kernels import cpu_codes

    return cpu_codes


def _is_compiled(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()
