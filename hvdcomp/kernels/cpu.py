"""The hot loops for float32 on the CPU, compiled by numba; everything else takes :mod:`hvdcomp.kernels.torch_ops`.

Arrays are flat and contiguous. Loops run over blocks, whose largest magnitude is found first, as an integer: most
blocks hold nothing that a sparsifier wants, and are passed over at the speed of memory.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

BLOCK = 64
_SUB = 16
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)

# Sums may be re-associated (that is what makes them vectorise); NaN and Inf keep their meaning.
_jit: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"}, boundscheck=False)


@_jit
def bits(value):  # type: ignore[no-untyped-def]
    """A float32's magnitude as an integer: larger numbers have larger ones, Inf and NaN the largest."""
    return np.float32(value).view(np.int32) & _MAGNITUDE


@_jit
def _add_block(r, g, factor):  # type: ignore[no-untyped-def]
    """r += factor * g unless a sum is not finite. Returns (largest bits, sum of squares of g, of the sum)."""
    top = np.int32(0)
    g_sq = np.float32(0)
    sq = np.float32(0)
    for i in range(r.shape[0]):
        value = r[i] + g[i] * factor
        top = max(top, bits(value))
        sq += value * value
        g_sq += g[i] * g[i]
    if top < _INFINITY:
        for i in range(r.shape[0]):
            r[i] = r[i] + g[i] * factor
    return top, g_sq, sq


@_jit
def _collect_block(v, start, bound, positions, values, count):  # type: ignore[no-untyped-def]
    """Append what reaches ``bound`` in a block that is known to hold some; room for a block more is assumed."""
    size = v.shape[0]
    for sub in range(0, size, _SUB):
        end = min(sub + _SUB, size)
        top = np.int32(0)
        for i in range(sub, end):
            top = max(top, bits(v[i]))
        if top >= bound:
            for i in range(sub, end):
                positions[count] = start + i
                values[count] = v[i]
                count += bits(v[i]) >= bound
    return count


@_jit
def accumulate(residual, gradient, factor, threshold, positions, values):  # type: ignore[no-untyped-def]
    """residual += factor * gradient, up to the first block of 64 in which a sum is not finite.

    Sums with a magnitude of at least ``threshold`` are collected, in ascending order, into ``positions`` (int32) and
    ``values`` on the way, as long as there is room.

    Returns (elements written, sum of squares of the gradient, of the sum, number collected or -1 for want of room).
    """
    bound = bits(threshold)
    room = positions.shape[0] - BLOCK
    gradient_sq = 0.0
    total_sq = 0.0
    count = 0
    full = room < 0
    size = residual.shape[0]
    for start in range(0, size, BLOCK):
        if start + BLOCK <= size:  # a length that is known at compile time makes faster code
            r = residual[start : start + BLOCK]
            top, g_sq, sq = _add_block(r, gradient[start : start + BLOCK], factor)
        else:
            r = residual[start:]
            top, g_sq, sq = _add_block(r, gradient[start:], factor)
        if top >= _INFINITY:
            return start, gradient_sq, total_sq, count
        gradient_sq += g_sq
        total_sq += sq
        if top >= bound and not full:
            full = count > room
            if not full:
                count = _collect_block(r, start, bound, positions, values, count)
    return size, gradient_sq, total_sq, -1 if full else count


@_jit
def collect(source, threshold, positions, values):  # type: ignore[no-untyped-def]
    """Ascending positions and values of what reaches ``threshold`` in magnitude; their number, -1 if too many."""
    bound = bits(threshold)
    room = positions.shape[0] - BLOCK
    count = 0
    size = source.shape[0]
    for start in range(0, size, BLOCK):
        v = source[start : min(start + BLOCK, size)]
        top = np.int32(0)
        for i in range(v.shape[0]):
            top = max(top, bits(v[i]))
        if top >= bound:
            if count > room:
                return -1
            count = _collect_block(v, start, bound, positions, values, count)
    return count


@_jit
def _moments_block(v):  # type: ignore[no-untyped-def]
    """(sum, sum of magnitudes, sum of squares, largest bits) of a block, in float32."""
    total = np.float32(0)
    total_abs = np.float32(0)
    total_sq = np.float32(0)
    top = np.int32(0)
    for i in range(v.shape[0]):
        total += v[i]
        total_abs += abs(v[i])
        total_sq += v[i] * v[i]
        top = max(top, bits(v[i]))
    return total, total_abs, total_sq, top


@_jit
def moments(source):  # type: ignore[no-untyped-def]
    """(sum, sum of magnitudes, sum of squares, largest magnitude); what a block of 64 adds up is summed in float64."""
    total = 0.0
    total_abs = 0.0
    total_sq = 0.0
    top = np.int32(0)
    size = source.shape[0]
    for start in range(0, size, BLOCK):
        whole = start + BLOCK <= size  # a length that is known at compile time makes faster code
        part = _moments_block(source[start : start + BLOCK]) if whole else _moments_block(source[start:])
        total += part[0]
        total_abs += part[1]
        total_sq += part[2]
        top = max(top, part[3])
    return total, total_abs, total_sq, np.int32(top).view(np.float32)


@_jit
def count(source, threshold):  # type: ignore[no-untyped-def]
    """How many have a magnitude of at least ``threshold``."""
    bound = bits(threshold)
    found = 0
    for i in range(source.shape[0]):
        found += bits(source[i]) >= bound
    return found


@_jit
def pack_bits(source, width, out):  # type: ignore[no-untyped-def]
    """The low ``width`` bits of each int64, one after the other, least significant first, into the uint8 ``out``."""
    pending = np.uint64(0)
    have = 0
    end = 0
    for i in range(source.shape[0]):
        pending |= np.uint64(source[i]) << np.uint64(have)
        have += width
        while have >= 8:
            out[end] = np.uint8(pending & np.uint64(255))
            pending >>= np.uint64(8)
            have -= 8
            end += 1
    if have > 0:
        out[end] = np.uint8(pending & np.uint64(255))


@_jit
def unpack_bits(data, width, out):  # type: ignore[no-untyped-def]
    """The reverse of :func:`pack_bits`."""
    pending = np.uint64(0)
    have = 0
    begin = 0
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(out.shape[0]):
        while have < width:
            pending |= np.uint64(data[begin]) << np.uint64(have)
            begin += 1
            have += 8
        out[i] = np.int64(pending & mask)
        pending >>= np.uint64(width)
        have -= width


@_jit
def clear(values, positions):  # type: ignore[no-untyped-def]
    """values[positions] = 0."""
    for i in range(positions.shape[0]):
        values[positions[i]] = np.float32(0)


@_jit
def add_at(out, positions, values, divisor):  # type: ignore[no-untyped-def]
    """out[positions] += values / divisor; the positions are known to be within ``out``."""
    for i in range(positions.shape[0]):
        out[positions[i]] += values[i] / divisor
