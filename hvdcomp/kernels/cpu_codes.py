"""The loops over codes of a few bits for float32 on the CPU, compiled by numba; see :mod:`hvdcomp.kernels.codes`."""

from __future__ import annotations

from typing import Any

import numba

_jit: Any = numba.njit(cache=True, nogil=True, error_model="numpy", boundscheck=False)


@_jit
def add_lookup(out, data, width, table):  # type: ignore[no-untyped-def]
    """out[i] += table[i-th code of ``width`` bits], least significant bits first; width divides 8."""
    per_byte = 8 // width
    mask = (1 << width) - 1
    whole = out.shape[0] // per_byte
    for byte in range(whole):
        codes = data[byte]
        for place in range(per_byte):
            out[byte * per_byte + place] += table[(codes >> (place * width)) & mask]
    for i in range(whole * per_byte, out.shape[0]):
        out[i] += table[(data[whole] >> ((i - whole * per_byte) * width)) & mask]


@_jit
def add_levels(out, levels, scales, bucket):  # type: ignore[no-untyped-def]
    """out[i] += levels[i] * scales[i // bucket]."""
    for number in range(scales.shape[0]):
        scale = scales[number]
        for i in range(number * bucket, min((number + 1) * bucket, out.shape[0])):
            out[i] += levels[i] * scale
