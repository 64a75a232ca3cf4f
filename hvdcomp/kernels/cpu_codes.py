"""The loops over codes of a few bits for float32 on the CPU, compiled by numba; see :mod:`hvdcomp.kernels.codes`.

Arrays are flat and contiguous. What is left after the last whole block of 64 is copied into one that ends with zeros.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from hvdcomp.kernels.cpu import ones, padded
from hvdcomp.kernels.vector import (
    BLOCK,
    WIDE,
    add_levels_block,
    add_signs_block,
    add_ternary_block,
    blend_block,
    extremes_block,
    level_block,
    load_word,
    natural_block,
    sign_block,
    square_block,
    step_block,
    store_word,
    ternary_block,
)

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
def add_bytes(out, data, table):  # type: ignore[no-untyped-def]
    """out[i] += table[data[i]]."""
    for i in range(out.shape[0]):
        out[i] += table[data[i]]


@_jit
def add_signs(out, data, table):  # type: ignore[no-untyped-def]
    """:func:`add_lookup` of one bit."""
    whole = out.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        add_signs_block(out, start, load_word(data, start >> 3), table[0], table[1])
    add_lookup(out[whole:], data[whole >> 3 :], 1, table)


@_jit
def add_ternary(out, data, table):  # type: ignore[no-untyped-def]
    """:func:`add_lookup` of two bits."""
    whole = out.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        add_ternary_block(out, start, data, start >> 2, table[0], table[1], table[2], table[3])
    add_lookup(out[whole:], data[whole >> 2 :], 2, table)


@_jit
def add_levels(out, levels, scales, bucket):  # type: ignore[no-untyped-def]
    """out[i] += levels[i] * scales[i // bucket]."""
    for number in range(scales.shape[0]):
        scale = scales[number]
        begin = number * bucket
        end = min(begin + bucket, out.shape[0])
        whole = begin + (end - begin) // BLOCK * BLOCK
        for start in range(begin, whole, BLOCK):
            add_levels_block(out, start, levels, start, scale)
        for i in range(whole, end):
            out[i] += np.float32(levels[i]) * scale


@_jit
def pack_signs(source, out):  # type: ignore[no-untyped-def]
    """The bits ``source >= 0`` into the uint8 ``out``.

    Returns (how many are set, the sum of their elements, the sum of the others).
    """
    upper = 0
    high = 0.0
    low = 0.0
    size = source.shape[0]
    whole = size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        mask, above, below = sign_block(source, start)
        store_word(out, start >> 3, mask)
        upper += ones(mask)
        high += above
        low += below
    if whole < size:
        mask, above, below = sign_block(padded(source, whole), 0)
        mask &= (np.uint64(1) << np.uint64(size - whole)) - np.uint64(1)
        upper += ones(mask)
        high += above
        low += below
        for i in range(whole >> 3, out.shape[0]):
            out[i] = np.uint8(mask & np.uint64(255))
            mask >>= np.uint64(8)
    return upper, high, low


@_jit
def blend(old, gradient, momentum, rest, out):  # type: ignore[no-untyped-def]
    """out = momentum * old + rest * gradient."""
    size = out.shape[0]
    whole = size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        blend_block(old, gradient, start, momentum, rest, out)
    for i in range(whole, size):
        out[i] = gradient[i] * rest + old[i] * momentum


@_jit
def extremes(source):  # type: ignore[no-untyped-def]
    """(least, greatest) of one element at least; a NaN may be passed over."""
    low = source[0]
    high = source[0]
    size = source.shape[0]
    whole = size // WIDE * WIDE
    for start in range(0, whole, WIDE):
        least, greatest = extremes_block(source, start)
        low = min(low, least)
        high = max(high, greatest)
    for i in range(whole, size):
        low = min(low, source[i])
        high = max(high, source[i])
    return low, high


@_jit
def round_steps(source, half, low, span, steps, out):  # type: ignore[no-untyped-def]
    """out = (source * half - low) / span * steps, rounded to the nearest byte, within 0 to ``steps``."""
    size = source.shape[0]
    whole = size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        step_block(source, start, half, low, span, steps, out, start)
    if whole < size:
        last = np.empty(BLOCK, dtype=np.uint8)
        step_block(padded(source, whole), 0, half, low, span, steps, last, 0)
        out[whole:] = last[: size - whole]


@_jit
def round_powers(source, first, key, lift, bound, least, top, out):  # type: ignore[no-untyped-def]
    """Bytes of :func:`natural_block`; ``first`` is the place of ``source`` in the tensor."""
    size = source.shape[0]
    whole = size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        natural_block(source, start, first + start, key, lift, bound, least, top, out, start)
    if whole < size:
        last = np.empty(BLOCK, dtype=np.uint8)
        rest = padded(source, whole)
        natural_block(rest, 0, first + whole, key, lift, bound, least, top, last, 0)
        out[whole:] = last[: size - whole]


@_jit
def round_ternary(source, first, key, limit, scale, out):  # type: ignore[no-untyped-def]
    """Codes of :func:`ternary_block`; ``first`` is the place of ``source`` in the tensor."""
    size = source.shape[0]
    whole = size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        ternary_block(source, start, first + start, key, limit, scale, out, start >> 2)
    if whole < size:
        last = np.empty(BLOCK // 4, dtype=np.uint8)
        ternary_block(padded(source, whole), 0, first + whole, key, limit, scale, last, 0)
        out[whole >> 2 :] = last[: out.shape[0] - (whole >> 2)]


@_jit
def round_levels(source, first, key, bucket, levels, largest, norms, out):  # type: ignore[no-untyped-def]
    """norms = the 2-norm, ``largest`` at most, of each bucket, out = levels of :func:`level_block`."""
    last = np.empty(BLOCK, dtype=np.int8)
    rest = np.zeros(BLOCK, dtype=np.float32)
    size = source.shape[0]
    for number in range(norms.shape[0]):
        begin = number * bucket
        end = min(begin + bucket, size)
        whole = begin + (end - begin) // BLOCK * BLOCK
        total = 0.0
        for start in range(begin, whole, BLOCK):
            total += square_block(source, start)
        if whole < end:
            rest[: end - whole] = source[whole:end]
            rest[end - whole :] = np.float32(0)
            total += square_block(rest, 0)
        norm = np.float32(min(np.sqrt(total), largest))
        norms[number] = norm
        divisor = norm if norm > 0 else np.float32(1)
        for start in range(begin, whole, BLOCK):
            level_block(source, start, first + start, key, divisor, levels, out, start)
        if whole < end:
            level_block(rest, 0, first + whole, key, divisor, levels, last, 0)
            out[whole:end] = last[: end - whole]
