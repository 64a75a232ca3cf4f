"""Codes of one, two or eight bits an element: making them, packing them, and adding what they stand for.

As in :mod:`hvdcomp.kernels`, float32 on the CPU is compiled, every other type and device takes torch operations. Those
that round at random draw from ``key``, 64 bits, and from an element's place, whatever the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hvdcomp.kernels.running import empty, in_threads, is_compiled, ranges, segments

_CHUNK = 2**20
"""Elements that the torch operations decode at a time, so that no dense copy of a payload is made; a multiple of 8."""
_MARGIN = 1e-6
"""Keeps level * (norm / levels) of the largest norm within its type."""
STEPS = 255
"""Of eight bits, between the least number and the greatest."""
_ZERO = 127
"""The code of zero in powers of two."""
_BIAS, _MANTISSA = 127, 23
"""Of float32's exponent, and bits of its mantissa."""


@dataclass(frozen=True)
class Sides:
    """The elements >= 0 and the others: how many, and their sums."""

    upper: int
    lower: int
    upper_sum: float
    lower_sum: float


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


def pack_signs(values: Tensor, out: Tensor) -> None:
    """The bits ``values >= 0`` as :func:`pack_codes` has them, into the uint8 ``out``."""
    if is_compiled(values):
        pack_sides(values, out)
    else:
        out.copy_(pack_codes(values >= 0, 1))


def pack_sides(values: Tensor, out: Tensor) -> Sides:
    """:func:`pack_signs`, and the sums of both sides, in float64, which float32 cannot overflow."""
    if is_compiled(values):
        source, packed = values.numpy(), out.numpy()
        parts = in_threads(
            lambda a, b: _cpu().pack_signs(source[a:b], packed[a // 8 : codes_nbytes(b, 1)]), segments(values.numel())
        )
        upper, upper_sum, lower_sum = (sum(column) for column in zip(*parts, strict=True))
    else:
        above = values >= 0
        out.copy_(pack_codes(above, 1))
        upper = int(above.sum())
        upper_sum, lower_sum = (float(values.clamp(**end).sum(dtype=torch.float64)) for end in ({"min": 0}, {"max": 0}))
    return Sides(int(upper), values.numel() - int(upper), upper_sum, lower_sum)


def blended(old: Tensor | None, gradient: Tensor, momentum: float, out: Tensor | None) -> Tensor:
    """momentum * old + (1 - momentum) * gradient, in ``out`` if there is one; nothing counts as zero."""
    if old is None or not is_compiled(old) or not is_compiled(gradient):
        total = torch.mul(gradient, 1 - momentum, out=out)
        return total if old is None else total.add_(old.to(gradient), alpha=momentum)
    total = empty(gradient.numel(), gradient.dtype, gradient.device) if out is None else out
    past, new = np.float32(momentum), np.float32(1 - momentum)
    a, g, t = old.numpy(), gradient.numpy(), total.numpy()
    in_threads(lambda i, j: _cpu().blend(a[i:j], g[i:j], past, new, t[i:j]), ranges(gradient.numel()))
    return total


def round_steps(values: Tensor, out: Tensor) -> tuple[float, float]:
    """The nearest of 256 numbers at even distances from the least to the greatest, which are returned, as uint8."""
    if not values.numel():
        return 0.0, 0.0
    compiled, bounds = is_compiled(values), ranges(values.numel())
    if compiled:
        source, codes = values.numpy(), out.numpy()
        ends = in_threads(lambda a, b: _cpu().extremes(source[a:b]), bounds)
        low, high = float(min(end[0] for end in ends)), float(max(end[1] for end in ends))
    else:
        low, high = (float(x) for x in values.aminmax())
    half = 0.5 if high / 2 - low / 2 > torch.finfo(values.dtype).max / 4 else 1.0  # max - min may overflow
    span = high * half - low * half
    span = span if span > 0 else 1.0
    if compiled:
        numbers = [np.float32(x) for x in (half, low * half, span, STEPS)]
        in_threads(lambda a, b: _cpu().round_steps(source[a:b], *numbers, codes[a:b]), bounds)
    else:
        steps = (values * half - low * half).div_(span).mul_(STEPS)
        out.copy_(steps.round_().clamp_(0, STEPS))
    return low, high


def round_powers(values: Tensor, top: int, key: int, out: Tensor) -> None:
    """Each element as a power of two, rounded up or down at random without bias.

    Args:
        top: exponent of the largest power; no magnitude exceeds 2^top, unless that is the type's largest.
        out: (n,) uint8: exponents counted down from ``top``, 0 to 126, 127 for zero, and 128 more for a negative.
    """
    if not is_compiled(values):
        lowest = top - _ZERO + 1
        mantissas, exponents = torch.frexp(values.abs())  # magnitude = mantissa * 2^exponent, mantissa in [1/2, 1)
        below = (exponents - 1 < lowest) | (mantissas == 0)  # frexp(0) is (0, 0)
        up = torch.where(below, torch.ldexp(mantissas, (exponents - lowest).clamp(max=0)), 2 * mantissas - 1)
        powers = torch.where(below, lowest - 1, exponents - 1).add_(_uniform(values, key) < up).clamp_(max=top)
        out.copy_((top - powers).clamp_(0, _ZERO) + 128 * (values < 0))
        return
    shift = min(max(1 - top, 0), 127)  # what is tiny is multiplied by a power of two, so that all is normal
    biased = top + shift + _BIAS
    lowest = biased - _ZERO + 1
    lift, least = np.float32(2.0**shift), np.float32(2.0 ** min(_BIAS - lowest, 127))
    bound = np.int32(max(lowest << _MANTISSA, 1))
    source, codes, seed = values.numpy(), out.numpy(), np.uint64(key)
    in_threads(
        lambda a, b: _cpu().round_powers(source[a:b], a, seed, lift, bound, least, np.int32(biased), codes[a:b]),
        ranges(values.numel()),
    )


def round_levels(values: Tensor, levels: int, bucket: int, key: int, norms: Tensor, out: Tensor) -> None:
    """Each element as sign * level, |v| / norm * levels rounded up or down at random without bias.

    Args:
        levels: 1 to 127.
        bucket: elements that share a norm.
        norms: (ceil(n / bucket),) to be filled.
        out: (n,) uint8, to be filled with int8.
    """
    largest = torch.finfo(values.dtype).max * (1 - _MARGIN)
    if is_compiled(values):
        source, found, codes, seed = values.numpy(), norms.numpy(), out.view(torch.int8).numpy(), np.uint64(key)
        in_threads(
            lambda a, b: _cpu().round_levels(
                source[a:b], a, seed, bucket, np.float32(levels), largest, found[a // bucket : -(-b // bucket)],
                codes[a:b],
            ),
            ranges(values.numel(), bucket),
        )  # fmt: skip
        return
    padding = norms.numel() * bucket - values.numel()
    magnitudes = torch.nn.functional.pad(values.abs(), (0, padding)).view(-1, bucket)
    norms.copy_(_norms(magnitudes, largest))
    relative = magnitudes.div_(torch.where(norms > 0, norms, 1).unsqueeze(1)).view(-1)[: values.numel()]
    scaled = relative.clamp_(max=1).mul_(levels)
    rounded = scaled.floor().add_(_uniform(values, key) < scaled.frac())
    out.view(torch.int8).copy_(rounded.copysign_(values))


def _norms(magnitudes: Tensor, largest: float) -> Tensor:
    """The 2-norm of each row, by way of its largest element, so that no square leaves the type's range."""
    peaks = magnitudes.amax(dim=1)
    relative = (magnitudes / torch.where(peaks > 0, peaks, 1).unsqueeze(1)).norm(dim=1)
    return torch.where(peaks < largest / relative, peaks * relative, largest)  # a zero row: 0 < inf


def round_ternary(values: Tensor, limit: float, scale: float, key: int, out: Tensor) -> None:
    """Codes of two bits: 1, or 2 of a negative, with probability min(|v|, limit) / scale, else 0.

    Args:
        limit: at most ``scale``.
        out: (ceil(n / 4),) uint8.
    """
    divisor = scale if scale != 0 else 1.0
    if is_compiled(values):
        source, codes, seed = values.numpy(), out.numpy(), np.uint64(key)
        most, whole = np.float32(limit), np.float32(divisor)
        in_threads(
            lambda a, b: _cpu().round_ternary(source[a:b], a, seed, most, whole, codes[a // 4 : codes_nbytes(b, 2)]),
            ranges(values.numel()),
        )
        return
    kept = _uniform(values, key) < values.abs().clamp_(max=limit).div_(divisor)
    out.copy_(pack_codes(torch.where(values < 0, 2, 1).to(torch.uint8) * kept, 2))


def _uniform(values: Tensor, key: int) -> Tensor:
    """Numbers in [0, 1) of the shape, type and device of ``values``."""
    generator = torch.Generator(values.device).manual_seed(key >> 1)
    return torch.rand(values.shape, generator=generator, dtype=values.dtype, device=values.device)


def add_lookup_(out: Tensor, data: Tensor, width: int, table: Tensor) -> None:
    """out[i] += table[code i] for packed codes.

    Args:
        out: (n,) float32 or float64.
        data: (ceil(n * width / 8),) uint8 of :func:`pack_codes`.
        width: 1, 2 or 8.
        table: (2^width,) what each code stands for.
    """
    table = table.to(out)
    if is_compiled(out):
        total, codes, numbers = out.numpy(), data.numpy(), table.numpy()
        add = {1: _cpu().add_signs, 2: _cpu().add_ternary, 8: _cpu().add_bytes}[width]
        in_threads(
            lambda a, b: add(total[a:b], codes[a * width // 8 : codes_nbytes(b, width)], numbers), ranges(out.numel())
        )
        return
    for start in range(0, out.numel(), _CHUNK):
        part = out[start : start + _CHUNK]
        found = unpack_codes(data[start * width // 8 :][: codes_nbytes(part.numel(), width)], part.numel(), width)
        part.add_(table[found.long()])


def add_levels_(out: Tensor, levels: Tensor, scales: Tensor, bucket: int) -> None:
    """out[i] += levels[i] * scales[i // bucket].

    Args:
        out: (n,) float32 or float64.
        levels: (n,) int8.
        scales: (ceil(n / bucket),) of out's type.
        bucket: elements that share a scale.
    """
    if is_compiled(out):
        total, codes, shares = out.numpy(), levels.numpy(), scales.numpy()
        in_threads(
            lambda a, b: _cpu().add_levels(total[a:b], codes[a:b], shares[a // bucket : -(-b // bucket)], bucket),
            ranges(out.numel(), bucket),
        )
        return
    step = max(1, _CHUNK // bucket) * bucket
    for start in range(0, out.numel(), step):
        part = out[start : start + step]
        factors = scales[start // bucket :][: -(-part.numel() // bucket)].repeat_interleave(bucket)[: part.numel()]
        part.add_(levels[start : start + step] * factors)


def warm_up() -> None:
    """Compile or load every loop now rather than within the first step."""
    ones, data, scale = torch.ones(9), torch.zeros(9, dtype=torch.uint8), torch.zeros(1)
    pack_sides(ones, data[:2])
    blended(ones, ones, 0.5, None)
    round_steps(ones, data)
    round_powers(ones, 1, 0, data)
    round_levels(ones, 1, 9, 0, scale, data)
    round_ternary(ones, 1.0, 1.0, 0, data[:3])
    for width in (1, 2, 8):
        add_lookup_(ones, data[: codes_nbytes(9, width)], width, torch.zeros(2**width))
    add_levels_(ones, data.view(torch.int8), scale, 9)


@cache
def _cpu() -> ModuleType:
    """numba is imported, and its cached code loaded, when it is first needed."""
    from hvdcomp.kernels import cpu_codes

    return cpu_codes
