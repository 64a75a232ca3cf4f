"""The hot loops for float32 on the CPU, compiled by numba; everything else takes :mod:`hvdcomp.kernels.torch_ops`.

Arrays are flat and contiguous. Loops run over blocks of 64, of which a bit mask tells what is wanted: most blocks hold
nothing that a sparsifier wants, and are passed over at the speed of memory.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe import numbers

from hvdcomp.kernels.vector import (
    BLOCK,
    WIDE,
    add_block,
    load_word,
    moments_block,
    momentum_block,
    reach_block,
    sum_block,
)

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_LARGEST_FLOAT = np.finfo(np.float32).max

_trailing_zeros: Any = numbers.trailing_zeros

# Sums may be re-associated (that is what makes them vectorise); NaN and Inf keep their meaning.
_jit: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"}, boundscheck=False)


@_jit
def bits(value):  # type: ignore[no-untyped-def]
    """A float32's magnitude as an integer: larger numbers have larger ones, Inf and NaN the largest."""
    return np.float32(value).view(np.int32) & _MAGNITUDE


@_jit
def _append(mask, start, source, positions, values, count):  # type: ignore[no-untyped-def]
    """Append the masked elements of the block at ``start``; returns the new number."""
    while mask != 0:
        i = start + np.int64(_trailing_zeros(mask))
        positions[count] = i
        values[count] = source[i]
        count += 1
        mask &= mask - np.uint64(1)
    return count


@_jit
def ones(mask):  # type: ignore[no-untyped-def]
    """How many bits of a mask are set."""
    mask -= (mask >> np.uint64(1)) & np.uint64(0x5555555555555555)
    mask = (mask & np.uint64(0x3333333333333333)) + ((mask >> np.uint64(2)) & np.uint64(0x3333333333333333))
    mask = (mask + (mask >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((mask * np.uint64(0x0101010101010101)) >> np.uint64(56))


@_jit
def padded(source, start, size=BLOCK):  # type: ignore[no-untyped-def]
    """A block that begins with what is left of ``source``, and ends with zeros."""
    block = np.zeros(size, dtype=np.float32)
    block[: source.shape[0] - start] = source[start:]
    return block


@_jit
def sample(residual, gradient, factor, stride, out):  # type: ignore[no-untyped-def]
    """out = magnitudes of residual + factor * gradient at every ``stride``-th element."""
    for i in range(out.shape[0]):
        out[i] = abs(residual[i * stride] + gradient[i * stride] * factor)


@_jit
def accumulate(residual, gradient, factor, threshold, positions, values):  # type: ignore[no-untyped-def]
    """residual += factor * gradient, up to the first block of 64 in which a sum is not finite.

    Sums with a magnitude of at least ``threshold`` are collected, in ascending order, into ``positions`` (int32) and
    ``values`` on the way, as long as there is room.

    Returns (elements written, number collected or -1 for want of room, sum of the sums, of their magnitudes, of their
    squares, the largest magnitude, sum of squares of the gradient).
    """
    bound = bits(threshold)
    room = positions.shape[0] - BLOCK
    count = 0
    full = room < 0
    total = 0.0
    total_abs = 0.0
    total_sq = 0.0
    gradient_sq = 0.0
    top = np.int32(0)
    size = residual.shape[0]
    for start in range(0, size, BLOCK):
        whole = start + BLOCK <= size
        if whole:
            mask, high, s, s_abs, s_sq, g_sq = add_block(residual, gradient, start, factor, bound)
        else:
            last = padded(residual, start)
            mask, high, s, s_abs, s_sq, g_sq = add_block(last, padded(gradient, start), 0, factor, bound)
            mask &= (np.uint64(1) << np.uint64(size - start)) - np.uint64(1)
        if high >= _INFINITY:
            return start, count, total, total_abs, total_sq, np.int32(top).view(np.float32), gradient_sq
        if not whole:
            residual[start:] = last[: size - start]
        total += s
        total_abs += s_abs
        total_sq += s_sq
        gradient_sq += g_sq
        top = max(top, high)
        if mask != 0 and not full:
            full = count > room
            if not full:
                count = _append(mask, start, residual, positions, values, count)
    return size, -1 if full else count, total, total_abs, total_sq, np.int32(top).view(np.float32), gradient_sq


@_jit
def collect(source, threshold, positions, values):  # type: ignore[no-untyped-def]
    """Ascending positions and values of what reaches ``threshold`` in magnitude; their number, -1 if too many."""
    bound = bits(threshold)
    room = positions.shape[0] - BLOCK
    count = 0
    whole = source.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        mask = reach_block(source, start, bound)
        if mask != 0:
            if count > room:
                return -1
            count = _append(mask, start, source, positions, values, count)
    if count > room:
        return -1
    for i in range(whole, source.shape[0]):
        if bits(source[i]) >= bound:
            positions[count] = i
            values[count] = source[i]
            count += 1
    return count


@_jit
def smaller(source, threshold, magnitudes):  # type: ignore[no-untyped-def]
    """Magnitudes below ``threshold``, in order; their number, -1 if there is not room for them and a block more."""
    bound = bits(threshold)
    room = magnitudes.shape[0] - BLOCK
    count = 0
    whole = source.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        mask = ~reach_block(source, start, bound)
        if mask != 0:
            if count > room:
                return -1
            while mask != 0:
                magnitudes[count] = abs(source[start + np.int64(_trailing_zeros(mask))])
                count += 1
                mask &= mask - np.uint64(1)
    if count > room:
        return -1
    for i in range(whole, source.shape[0]):
        magnitudes[count] = abs(source[i])
        count += bits(source[i]) < bound
    return count


@_jit
def take_largest(candidates, magnitudes, threshold, k, positions, values):  # type: ignore[no-untyped-def]
    """Of (positions, values) those with a magnitude above ``threshold``, the k-th largest, and even ones of the ties.

    Args:
        magnitudes: the values that go with the positions ``candidates``; with none, positions are counted from 0.
        positions, values: of k + 1 elements; the last is scratch.

    Returns k, or -1 where NaN make nonsense of the threshold.
    """
    bound = bits(threshold)
    larger = 0
    ties = 0
    for i in range(magnitudes.shape[0]):
        magnitude = bits(magnitudes[i])
        larger += magnitude > bound
        ties += magnitude == bound
    if larger > k or larger + ties < k:  # NaN have no order
        return -1
    missing = k - larger
    known = candidates.shape[0] > 0
    count = 0
    met = 0
    taken = 0
    for i in range(magnitudes.shape[0]):
        magnitude = bits(magnitudes[i])
        keep = magnitude > bound
        if magnitude == bound:
            if taken < missing and met == taken * ties // missing:
                keep = True
                taken += 1
            met += 1
        positions[count] = candidates[i] if known else i
        values[count] = magnitudes[i]
        count += keep
    return k


@_jit
def moments(source):  # type: ignore[no-untyped-def]
    """(sum, sum of magnitudes, sum of squares, largest magnitude); what a block of 256 adds up is summed in float64."""
    total = 0.0
    total_abs = 0.0
    total_sq = 0.0
    top = np.int32(0)
    size = source.shape[0]
    for start in range(0, size, WIDE):
        whole = start + WIDE <= size
        s, s_abs, s_sq, high = moments_block(source, start) if whole else moments_block(padded(source, start, WIDE), 0)
        total += s
        total_abs += s_abs
        total_sq += s_sq
        top = max(top, high)
    return total, total_abs, total_sq, np.int32(top).view(np.float32)


@_jit
def _saturated(value):  # type: ignore[no-untyped-def]
    """Within the finite numbers; NaN stays."""
    return _LARGEST_FLOAT if value > _LARGEST_FLOAT else -_LARGEST_FLOAT if value < -_LARGEST_FLOAT else value


@_jit
def advance(u, v, gradient, momentum, rest, ahead, threshold, next_u, next_v, positions, values):  # type: ignore[no-untyped-def]
    """next_u = momentum * u + rest * gradient, next_v = v + next_u + ahead * gradient, saturated at finite numbers.

    Elements of next_v with a magnitude of at least ``threshold`` are collected as in :func:`accumulate`. Returns their
    number, -1 for want of room.
    """
    bound = bits(threshold)
    room = positions.shape[0] - BLOCK
    count = 0
    full = room < 0
    size = u.shape[0]
    whole = size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        mask = momentum_block(u, v, gradient, start, momentum, rest, ahead, next_u, next_v, bound)
        if mask != 0 and not full:
            full = count > room
            if not full:
                count = _append(mask, start, next_v, positions, values, count)
    full |= count > room
    for i in range(whole, size):
        next_u[i] = _saturated(u[i] * momentum + gradient[i] * rest)
        next_v[i] = _saturated(v[i] + next_u[i] + gradient[i] * ahead)
        if bits(next_v[i]) >= bound and not full:
            positions[count] = i
            values[count] = next_v[i]
            count += 1
    return -1 if full else count


@_jit
def checksum(words, skipped):  # type: ignore[no-untyped-def]
    """The sum modulo 2^64 of all words but one, each times the odd number 2 * index + 1."""
    total = np.uint64(0)
    weight = np.uint64(1)
    for i in range(words.shape[0]):
        total += words[i] * weight
        weight += np.uint64(2)
    return total - words[skipped] * np.uint64(2 * skipped + 1)


@_jit
def sums_above(source, threshold):  # type: ignore[no-untyped-def]
    """(number, sum of magnitudes, sum of squares) of what reaches ``threshold`` in magnitude."""
    bound = bits(threshold)
    count = 0
    total_abs = 0.0
    total_sq = 0.0
    whole = source.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        mask, s_abs, s_sq = sum_block(source, start, bound)
        count += ones(mask)
        total_abs += s_abs
        total_sq += s_sq
    for i in range(whole, source.shape[0]):
        if bits(source[i]) >= bound:
            count += 1
            total_abs += abs(source[i])
            total_sq += source[i] * source[i]
    return count, total_abs, total_sq


@_jit
def count(source, threshold):  # type: ignore[no-untyped-def]
    """How many have a magnitude of at least ``threshold``."""
    bound = bits(threshold)
    found = 0
    whole = source.shape[0] // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        found += ones(reach_block(source, start, bound))
    for i in range(whole, source.shape[0]):
        found += bits(source[i]) >= bound
    return found


@_jit
def count_blocks(positions, block_log2, counts):  # type: ignore[no-untyped-def]
    """counts[b] = how many positions lie in block b of 2^block_log2."""
    counts[:] = 0
    for i in range(positions.shape[0]):
        counts[positions[i] >> block_log2] += 1


@_jit
def pack_bits(source, width, out):  # type: ignore[no-untyped-def]
    """The low ``width`` bits of each number, one after the other, least significant first, into the uint8 ``out``."""
    words = out[: out.shape[0] // 8 * 8].view(np.uint64)
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    pending = np.uint64(0)
    have = 0
    word = 0
    for i in range(source.shape[0]):
        value = np.uint64(source[i]) & mask
        pending |= value << np.uint64(have)
        have += width
        if have >= 64:
            words[word] = pending
            word += 1
            have -= 64
            pending = value >> np.uint64(width - have) if have > 0 else np.uint64(0)
    for i in range(word * 8, out.shape[0]):
        out[i] = np.uint8(pending & np.uint64(255))
        pending >>= np.uint64(8)


@_jit
def unpack_bits(data, width, out):  # type: ignore[no-untyped-def]
    """The reverse of :func:`pack_bits`; ``data`` is followed by 8 bytes more than it needs."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(out.shape[0]):
        first = i * width
        out[i] = (load_word(data, first >> 3) >> np.uint64(first & 7)) & mask


@_jit
def unpack_positions(data, width, counts, out):  # type: ignore[no-untyped-def]
    """Offsets as :func:`unpack_bits` has them, each plus the start of its block of 2^width.

    Args:
        counts: of each block.
        out: 4 elements more than the counts' sum; those are scratch.
    """
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    end = 0
    for block in range(counts.shape[0]):
        start = np.int32(block << width)
        for i in range(4):  # most blocks hold fewer, and a loop of each one's own length is mispredicted
            out[end + i] = start
        for i in range(4, counts[block]):
            out[end + i] = start
        end += counts[block]
    for i in range(end):
        first = i * width
        out[i] |= np.int32((load_word(data, first >> 3) >> np.uint64(first & 7)) & mask)


@_jit
def ascends(positions, numel):  # type: ignore[no-untyped-def]
    """Whether the positions (one at least) rise strictly within [0, numel)."""
    unordered = 0
    for i in range(1, positions.shape[0]):
        unordered += positions[i] <= positions[i - 1]
    return unordered == 0 and positions[0] >= 0 and positions[-1] < numel


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
