"""The loops over whole gradients, as plain functions on flat tensors; kernels know nothing of compressors.

Each has one meaning and two implementations: numba for float32 on the CPU (:mod:`hvdcomp.kernels.cpu`), torch
operations for every other type and device (:mod:`hvdcomp.kernels.torch_ops`). Which one runs is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdcomp.kernels import codes, torch_ops
from hvdcomp.kernels.running import empty
from hvdcomp.kernels.running import in_threads as _in_threads
from hvdcomp.kernels.running import is_compiled as _is_compiled
from hvdcomp.kernels.running import on_cpu as _on_cpu
from hvdcomp.kernels.running import ranges as _ranges
from hvdcomp.kernels.running import segments as _segments
from hvdcomp.kernels.torch_ops import orthogonalise, squared_norm

__all__ = [
    "Above",
    "Accumulation",
    "Collected",
    "Moments",
    "Tail",
    "above",
    "accumulate",
    "add_mean_",
    "advance",
    "among",
    "ascending_below",
    "checksum",
    "clear_",
    "collect",
    "collect_above",
    "count_at_least",
    "count_blocks",
    "empty",
    "largest",
    "mean_log",
    "moments",
    "moments_in_passing",
    "orthogonalise",
    "pack_bits",
    "packed_nbytes",
    "peak",
    "squared_norm",
    "squares_of_largest",
    "tail",
    "unpack_bits",
    "unpack_positions",
]

_SAMPLE = 32768
_GAIN_SAMPLE = 2048
"""Of one tensor: the gain is summed over tensors and workers, and averaged over steps."""
_CANCELLED = 1e-6
"""Share of the squares below which a difference of float32 sums says nothing."""
_SQUARES_LOW = 1e-25
"""A sum of float32 squares below this has lost some to underflow."""
_SMALL = 4096
"""Elements up to which a selection sorts all of them."""


@dataclass(frozen=True)
class Collected:
    """Some elements of a tensor: ascending int32 positions, and their values."""

    positions: Tensor
    values: Tensor


@dataclass(frozen=True)
class Accumulation:
    """What :func:`accumulate` did.

    Attributes:
        written: ranges of the residual that hold the sum; all of it unless a sum was not finite.
        gradient_sq: sum of squares of the gradient, without the factor.
        total_sq: of the sum.
        moments: of the sum, where the pass took them and all of it is finite.
        tail: the sum's largest elements, the wanted ones at least, where the pass found them.
    """

    written: list[tuple[int, int]]
    gradient_sq: float
    total_sq: float
    finite: bool
    moments: Moments | None = None
    tail: Tail | None = None


@dataclass(frozen=True)
class Moments:
    """Sums over a tensor, from one pass.

    Attributes:
        count: elements.
        total: sum of the values.
        total_abs: of their magnitudes.
        total_sq: of their squares.
        largest: the largest magnitude, 0 of none.
    """

    count: int
    total: float
    total_abs: float
    total_sq: float
    largest: float

    @property
    def mean_abs(self) -> float:
        """The mean magnitude; at most the largest one, whatever rounding does."""
        return min(self.total_abs / max(self.count, 1), self.largest)

    @property
    def variance_abs(self) -> float:
        """The unbiased variance of the magnitudes, exactly 0 where it is within float32's rounding of 0."""
        return _variance(self.count, self.total_abs, self.total_sq)

    @property
    def variance(self) -> float:
        """The unbiased variance of the values, exactly 0 where it is within float32's rounding of 0."""
        return _variance(self.count, self.total, self.total_sq)


@dataclass(frozen=True)
class Tail:
    """A tensor's elements with a magnitude of at least ``bound``."""

    found: Collected
    bound: float

    def count(self, threshold: float) -> int:
        """How many elements reach a threshold; below ``bound``, where more do, how many reach that."""
        return count_at_least(self.found.values, threshold)

    def at_least(self, threshold: float) -> Collected:
        """The elements that reach a threshold that is not below ``bound``."""
        return among(self.found, collect(self.found.values, threshold, self.found.values.numel()))


@dataclass(frozen=True)
class Above:
    """Sums over the elements of a tensor that are larger than a threshold in magnitude.

    Attributes:
        excess: sum of what their magnitudes have beyond the threshold.
        variance: unbiased, of their magnitudes; exactly 0 where it is within float32's rounding of 0.
    """

    count: int
    excess: float
    variance: float


def accumulate(residual: Tensor, gradient: Tensor, factor: float, wanted: int = 0) -> Accumulation:
    """residual += factor * gradient, in one pass that also takes the norms and looks for the largest sums.

    From the first block of 64 elements in which a sum is not finite, the residual is left as it was.

    Args:
        residual: (n,) float32 or float64.
        gradient: (n,) any float type.
        wanted: how many of the largest sums will be asked for.
    """
    if not (_is_compiled(residual) and _is_compiled(gradient)):
        return _accumulate_anywhere(residual, gradient, factor)
    threshold, expected = _sampled_threshold(residual, gradient, factor, wanted)

    def run(start: int, end: int) -> tuple[int, Collected | None, tuple[float, ...], float]:
        positions, values = _room(_share(expected, end - start, residual.numel()))
        written, count, *sums, gradient_sq = _cpu().accumulate(
            residual.numpy()[start:end], gradient.numpy()[start:end], np.float32(factor), _float32(threshold),
            positions, values,
        )  # fmt: skip
        return start + written, _collected(positions, values, count, start), tuple(sums), gradient_sq

    ranges = _ranges(residual.numel())
    results = _in_threads(run, ranges)
    finite = all(result[0] == end for result, (_, end) in zip(results, ranges, strict=True))
    found = _summed([result[2] for result in results], residual) if finite else None
    candidates = _joined([result[1] for result in results], wanted) if finite and math.isfinite(threshold) else None
    return Accumulation(
        written=[(start, result[0]) for result, (start, _) in zip(results, ranges, strict=True)],
        gradient_sq=_finite_sum([result[3] for result in results], gradient),
        total_sq=found.total_sq if found is not None else _finite_sum([result[2][2] for result in results], residual),
        finite=finite,
        moments=found,
        tail=None if candidates is None else Tail(candidates, threshold),
    )


def _accumulate_anywhere(residual: Tensor, gradient: Tensor, factor: float) -> Accumulation:
    total = torch.add(residual, gradient, alpha=factor)
    total_sq = float(squared_norm(total))
    finite = math.isfinite(total_sq) or bool(torch.isfinite(total).all())
    if finite:
        residual.copy_(total)
    written = [(0, residual.numel())] if finite else []
    return Accumulation(written, float(squared_norm(gradient)), total_sq, finite)


def advance(
    u: Tensor, v: Tensor, gradient: Tensor, momentum: float, nesterov: bool, out: tuple[Tensor, Tensor], wanted: int
) -> Tail | None:
    """u' = m u + g and v' = v + u', or with Nesterov u' = m (u + g) and v' = v + u' + g, into ``out``.

    Sums that would leave the type's range become its largest number.

    Args:
        u, v, gradient: (n,), as are both of ``out``, which must share no memory with them.
        wanted: how many of the largest elements of v' will be asked for.

    Returns:
        The largest elements of v', the wanted ones at least, where the pass found them.
    """
    if not all(map(_is_compiled, (u, v, gradient, *out))):
        limit = torch.finfo(v.dtype).max
        if nesterov:
            torch.add(u, gradient, out=out[0]).mul_(momentum)
            torch.add(v, out[0].clamp_(-limit, limit), out=out[1]).add_(gradient)
        else:
            torch.add(gradient, u, alpha=momentum, out=out[0])
            torch.add(v, out[0].clamp_(-limit, limit), out=out[1])
        out[1].clamp_(-limit, limit)
        return None
    weights = [np.float32(x) for x in (momentum, momentum if nesterov else 1, 1 if nesterov else 0)]
    threshold, expected = math.inf, 0
    if u.numel() > _SMALL and 0 < wanted * 4 <= u.numel():
        a, b, c = (x.numpy()[:: _stride(u.numel())] for x in (u, v, gradient))
        magnitudes = np.abs(b + a * weights[0] + c * (weights[1] + weights[2]))
        threshold, expected = _threshold_of(magnitudes, wanted, u.numel())

    def run(start: int, end: int) -> Collected | None:
        positions, values = _room(_share(expected, end - start, u.numel()))
        given, made = ([x.numpy()[start:end] for x in tensors] for tensors in ((u, v, gradient), out))
        count = _cpu().advance(*given, *weights, _float32(threshold), *made, positions, values)
        return _collected(positions, values, count, start)

    found = _joined(_in_threads(run, _ranges(u.numel())), wanted)
    return None if found is None or math.isinf(threshold) else Tail(found, threshold)


def largest(values: Tensor, k: int, candidates: Collected | None = None) -> Collected:
    """The ``k`` elements of largest magnitude of a 1-D tensor; all of them where it has no more.

    Elements that tie at the k-th magnitude are taken at even distances among their like: the choice depends on the
    values alone, so that equal inputs select equally on every rank, and no end of the tensor is preferred.

    Args:
        candidates: elements that hold the k largest and all that tie with the smallest of them, if known.
    """
    if candidates is None and _is_compiled(values) and values.numel() > _SMALL and k * 4 <= values.numel():
        candidates = tail(values, k).found
    source = values if candidates is None else candidates.values
    if k >= source.numel():
        return Collected(_every_position(values), values) if candidates is None else candidates
    if _is_compiled(source):
        positions, chosen = np.empty(k + 1, dtype=np.int32), np.empty(k + 1, dtype=np.float32)
        known = np.empty(0, dtype=np.int32) if candidates is None else candidates.positions.numpy()
        threshold = _kth_largest(source.numpy(), k)
        if _cpu().take_largest(known, source.numpy(), threshold, k, positions, chosen) == k:
            return Collected(torch.from_numpy(positions[:k]), torch.from_numpy(chosen[:k]))
    kept = torch_ops.largest(source, k)
    found = Collected(kept.to(torch.int32), source[kept])
    return found if candidates is None else among(candidates, found)


def among(candidates: Collected, chosen: Collected) -> Collected:
    """What was chosen from ``candidates.values``, with its positions in the tensor that the candidates are of."""
    return Collected(candidates.positions[chosen.positions], chosen.values)


def add_mean_(out: Tensor, contributions: Sequence[Collected]) -> Tensor:
    """Add to the 1-D ``out`` the mean of sparse vectors, one a worker, in worker order.

    Each worker's positions are unique and known to be in range, so that the sum does not depend on any thread's pace.
    """
    workers = len(contributions)
    for worker in contributions:
        if _is_compiled(out) and worker.positions.dtype == torch.int32 and worker.values.dtype == torch.float32:
            _cpu().add_at(out.numpy(), worker.positions.numpy(), worker.values.numpy(), np.float32(workers))
        else:
            out.index_add_(0, worker.positions, worker.values.to(out.dtype) / workers)
    return out


def clear_(values: Tensor, positions: Tensor) -> None:
    """Set the elements at ``positions`` (int32 or int64) to zero."""
    if _is_compiled(values) and positions.dtype == torch.int32:
        _cpu().clear(values.numpy(), positions.numpy())
    else:
        values.index_fill_(0, positions.to(torch.int64), 0)


def collect(values: Tensor, threshold: float, expected: int, known: Tail | None = None) -> Collected:
    """The elements with a magnitude of at least ``threshold``.

    Args:
        expected: about how many there will be; a wrong guess costs time, nothing else.
        known: a tail of these values, which spares looking at all of them if it reaches down to the threshold.
    """
    if known is not None and threshold >= known.bound:
        return known.at_least(threshold)
    found = _collect_compiled(values, threshold, expected) if _is_compiled(values) else None
    if found is not None:
        return found
    positions = (values.abs() >= threshold).nonzero().flatten()
    return Collected(positions.to(torch.int32), values[positions])


def collect_above(values: Tensor, threshold: float, expected: int, known: Tail | None = None) -> Collected:
    """The elements with a magnitude larger than ``threshold``; see :func:`collect`."""
    return collect(values, _next_above(threshold, values.dtype), expected, known)


def count_at_least(values: Tensor, threshold: float) -> int:
    """How many elements of a 1-D tensor have a magnitude of at least ``threshold``."""
    if not _is_compiled(values):
        return int((values.abs() >= threshold).sum())
    source, bound = values.numpy(), _float32(threshold)
    return sum(_in_threads(lambda a, b: int(_cpu().count(source[a:b], bound)), _ranges(values.numel())))


def moments(values: Tensor) -> Moments:
    """The sums of a 1-D tensor that methods which fit a distribution need, in one pass."""
    if not _is_compiled(values):
        return Moments(values.numel(), *torch_ops.moments(values))
    source = values.numpy()
    return _summed(_in_threads(lambda a, b: _cpu().moments(source[a:b]), _segments(values.numel())), values)


def moments_in_passing(values: Tensor) -> Moments | None:
    """The moments of a 1-D tensor where they cost no more than its norm."""
    return moments(values) if _is_compiled(values) else None


def peak(values: Tensor) -> float:
    """The largest magnitude of a 1-D tensor, 0 of none."""
    if _is_compiled(values):
        return moments(values).largest
    return float(values.abs().max()) if values.numel() else 0.0


def _summed(parts: Sequence[tuple[float, ...]], values: Tensor) -> Moments:
    """The sums of all parts; taken again in float64 where squares left float32's range."""
    total, total_abs, total_sq, top = zip(*parts, strict=True)
    found = Moments(values.numel(), sum(total), sum(total_abs), sum(total_sq), float(max(top)))
    if _SQUARES_LOW < found.total_sq < math.inf or found.largest in (0.0, math.inf):
        return found
    return Moments(values.numel(), *torch_ops.moments(values))


def above(values: Tensor, threshold: float) -> Above:
    """The sums over what is larger than a threshold in a 1-D tensor, in one pass."""
    bound = _next_above(threshold, values.dtype)
    if _is_compiled(values):
        source = values.numpy()
        parts = _in_threads(lambda a, b: _cpu().sums_above(source[a:b], _float32(bound)), _ranges(values.numel()))
        count, total, squares = (sum(column) for column in zip(*parts, strict=True))
    if not _is_compiled(values) or not (squares == 0 or _SQUARES_LOW < squares < math.inf):
        magnitude = values.abs()
        magnitude = magnitude[magnitude >= bound].double()
        count, total, squares = magnitude.numel(), float(magnitude.sum()), float(magnitude.square().sum())
    return Above(int(count), max(total - count * threshold, 0.0), _variance(count, total, squares))


def mean_log(values: Tensor) -> float:
    """The mean logarithm of the magnitudes that are not zero, from a strided sample; nan where it meets zeros only."""
    sample = _strided(values, _SAMPLE)
    return float(sample[sample > 0].double().log().mean())


def tail(values: Tensor, at_least: int) -> Tail:
    """The largest elements of a 1-D tensor: all beyond a bound that at least ``at_least`` reach, if there are so many.

    The bound is estimated from a sample, so that there are as a rule few more than asked for.
    """
    if values.numel() > _SMALL and 0 < at_least * 4 <= values.numel():
        bound, expected = _threshold_of(_sampled(values), at_least, values.numel())
        found = collect(values, bound, expected) if expected else None
        if found is not None and found.positions.numel() >= at_least:
            return Tail(found, bound)
    return Tail(Collected(_every_position(values), values), 0.0)


def squares_of_largest(values: Tensor, counts: Sequence[int]) -> list[float]:
    """About the sum of squares of the k largest elements of a 1-D tensor, for each k, from a strided sample."""
    sample = _strided(values, _GAIN_SAMPLE).cpu().double().numpy()
    squares = np.cumsum(np.square(np.sort(sample))[::-1]) * values.numel() / max(sample.size, 1)
    wanted = [round(sample.size * k / max(values.numel(), 1)) for k in counts]
    return [float(squares[max(1, k) - 1]) if sample.size else 0.0 for k in wanted]


def packed_nbytes(count: int, width: int) -> int:
    """Bytes of ``count`` numbers of ``width`` bits."""
    return -(-count * width // 8)


def pack_bits(values: Tensor, width: int) -> Tensor:
    """The low ``width`` bits (0 to 31) of non-negative integers as uint8, in a row, least significant first."""
    if not _on_cpu(values):
        return torch_ops.pack_bits(values, width)
    out = np.empty(packed_nbytes(values.numel(), width), dtype=np.uint8)
    _cpu().pack_bits(values.numpy(), width, out)
    return torch.from_numpy(out)


def unpack_bits(data: Tensor, count: int, width: int) -> Tensor:
    """The (count,) int32 numbers of :func:`pack_bits`; ``data`` must hold ``packed_nbytes(count, width)`` bytes."""
    if not _on_cpu(data):
        return torch_ops.unpack_bits(data, count, width)
    out = np.empty(count, dtype=np.int32)
    _cpu().unpack_bits(_with_room(data, count, width), width, out)
    return torch.from_numpy(out)


def unpack_positions(data: Tensor, width: int, counts: Tensor) -> Tensor:
    """Ascending int32 positions, of which block b of 2^width positions holds ``counts[b]``, from their low bits.

    Args:
        data: what :func:`pack_bits` made of the positions.
        counts: (blocks,) int32 of :func:`unpack_bits`; block numbers times 2^width are below 2^31.
    """
    count = int(counts.sum())
    if not _on_cpu(data):
        starts = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts) << width
        return (starts | torch_ops.unpack_bits(data, count, width)).to(torch.int32)
    out = np.empty(count + 4, dtype=np.int32)
    _cpu().unpack_positions(_with_room(data, count, width), width, counts.numpy(), out)
    return torch.from_numpy(out[:count])


def count_blocks(positions: Tensor, block_log2: int, blocks: int) -> Tensor:
    """(blocks,) int32: how many of the positions lie in each block of 2^block_log2."""
    if not _on_cpu(positions):
        return torch.bincount(positions >> block_log2, minlength=blocks).to(torch.int32)
    counts = np.empty(blocks, dtype=np.int32)
    _cpu().count_blocks(positions.numpy(), block_log2, counts)
    return torch.from_numpy(counts)


def ascending_below(positions: Tensor, numel: int) -> bool:
    """Whether integers rise strictly within [0, numel)."""
    if not positions.numel():
        return True
    if _on_cpu(positions):
        return bool(_cpu().ascends(positions.numpy(), numel))
    ordered = bool((positions[1:] > positions[:-1]).all())
    return ordered and int(positions[0]) >= 0 and int(positions[-1]) < numel


def checksum(words: Tensor, skipped: int) -> int:
    """The sum of all words (n,) int64 but the one at ``skipped``, each times 2 * index + 1, modulo 2^64, signed."""
    if _on_cpu(words):
        total = int(_cpu().checksum(words.numpy().view(np.uint64), skipped))
        return total - 2**64 if total >= 2**63 else total
    weights = 2 * torch.arange(words.numel(), device=words.device) + 1
    weights[skipped] = 0
    return int((words * weights).sum())


# -- how the compiled loops are used


@cache
def _cpu() -> ModuleType:
    """numba is imported, and its cached code loaded, when it is first needed."""
    from hvdcomp.kernels import cpu

    return cpu


def _sampled_threshold(residual: Tensor, gradient: Tensor, factor: float, wanted: int) -> tuple[float, int]:
    """A magnitude that a little more than ``wanted`` sums reach, and how many; (inf, 0) where none is needed."""
    numel = residual.numel()
    if not 0 < wanted * 4 <= numel or numel <= _SMALL:
        return math.inf, 0
    stride = _stride(numel)
    magnitudes = np.empty(-(-numel // stride), dtype=np.float32)
    _cpu().sample(residual.numpy(), gradient.numpy(), np.float32(factor), stride, magnitudes)
    return _threshold_of(magnitudes, wanted, numel)


def _stride(numel: int) -> int:
    """Of a sample from which a threshold is estimated: 1/128 of the elements, 2048 to 32768."""
    return -(-numel // min(max(numel // 128, 2048), _SAMPLE))


def _threshold_of(magnitudes: np.ndarray, wanted: int, numel: int) -> tuple[float, int]:
    """A quantile of magnitudes that ``wanted`` of ``numel`` are all but sure to reach, and how many are likely to.

    It lies four standard deviations lower than the sample's own; (inf, 0) where it would be 0.
    """
    rank = min(magnitudes.size, _safe_rank(magnitudes.size * wanted / numel))
    threshold = float(_kth_largest(magnitudes, rank))
    return (threshold, _share(rank, numel, magnitudes.size)) if 0 < threshold < math.inf else (math.inf, 0)


def _collect_compiled(values: Tensor, threshold: float, expected: int) -> Collected | None:
    """None where there are far more elements than expected."""

    def run(start: int, end: int) -> Collected | None:
        positions, found = _room(_share(expected, end - start, values.numel()))
        count = _cpu().collect(values.numpy()[start:end], _float32(threshold), positions, found)
        return _collected(positions, found, count, start)

    return _joined(_in_threads(run, _ranges(values.numel())), 0)


def _safe_rank(expected: float) -> int:
    """A place in a sample beyond which an expected one lies: four standard deviations further."""
    return math.ceil(expected + 4 * math.sqrt(expected) + 4)


def _with_room(data: Tensor, count: int, width: int) -> np.ndarray:
    """Packed numbers, and the 8 bytes more that the loops may read."""
    padded = np.zeros(packed_nbytes(count, width) + 8, dtype=np.uint8)
    padded[:-8] = data.numpy()
    return padded


def _strided(values: Tensor, size: int) -> Tensor:
    """At most ``size`` magnitudes, at even distances."""
    return values[:: -(-values.numel() // size) or 1].abs()


def _sampled(values: Tensor) -> np.ndarray:
    """Those from which a threshold is estimated."""
    return np.asarray(values[:: _stride(values.numel())].abs().cpu().numpy())


def _kth_largest(values: np.ndarray, k: int) -> Any:
    """The k-th largest magnitude; where few are smaller, it is looked for among the smallest alone."""
    below = values.size - k
    if values.dtype == np.float32 and values.size > 16 * _SMALL and below * 4 <= values.size:
        sample = np.abs(values[:: _stride(values.size)])
        rank = _safe_rank(sample.size * below / values.size)
        magnitudes = np.empty(2 * _share(rank, values.size, sample.size) + _SMALL, dtype=np.float32)
        count = _cpu().smaller(values, np.partition(sample, rank)[rank], magnitudes) if rank < sample.size else 0
        if count > below:
            return np.partition(magnitudes[:count], below)[below]
    return np.partition(np.abs(values), below)[below]


def _every_position(values: Tensor) -> Tensor:
    return torch.arange(values.numel(), dtype=torch.int32, device=values.device)


def _variance(count: int, total: float, squares: float) -> float:
    """The unbiased variance of ``count`` numbers with these sums."""
    centred = squares - total * total / max(count, 1)
    return centred / (count - 1) if count > 1 and centred > _CANCELLED * squares else 0.0


def _finite_sum(squares: list[float], values: Tensor) -> float:
    """The sum of squares; taken again in float64 where it left float32's range."""
    total = sum(squares)
    return total if math.isfinite(total) else float(squared_norm(values))


def _next_above(threshold: float, dtype: torch.dtype) -> float:
    """The smallest number of the type that is larger than ``threshold``."""
    if dtype == torch.float64:
        return math.nextafter(threshold, math.inf)
    near = _float32(threshold)
    return float(near if float(near) > threshold else np.nextafter(near, np.float32(np.inf)))


def _float32(threshold: float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(threshold)


def _share(expected: int, part: int, whole: int) -> int:
    """``expected * part / whole``, rounded up."""
    return -(-expected * part // max(whole, 1))


def _room(expected: int) -> tuple[np.ndarray, np.ndarray]:
    """Twice the expected number and some more; what is not touched costs no memory."""
    capacity = 2 * expected + _SMALL if expected else 0
    return np.empty(capacity, dtype=np.int32), np.empty(capacity, dtype=np.float32)


def _collected(positions: np.ndarray, values: np.ndarray, count: int, start: int) -> Collected | None:
    if count < 0:
        return None
    if start:
        positions[:count] += start
    return Collected(torch.from_numpy(positions[:count]), torch.from_numpy(values[:count]))


def _joined(parts: Sequence[Collected | None], at_least: int) -> Collected | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or sum(part.positions.numel() for part in found) < at_least:
        return None
    if len(found) == 1:
        return found[0]
    return Collected(torch.cat([part.positions for part in found]), torch.cat([part.values for part in found]))


def warm_up() -> None:
    """Compile or load every loop now rather than within the first step."""
    ones: Any = torch.ones(2 * _SMALL)
    accumulate(ones, ones, 1.0, wanted=8)
    largest(ones, 8)
    moments(ones)
    count_at_least(ones, 1.0)
    above(ones, 0.5)
    many = np.ones(17 * _SMALL, dtype=np.float32)
    _kth_largest(many, many.size - 8)
    positions = torch.arange(8, dtype=torch.int32)
    data = pack_bits(positions, 3)
    unpack_bits(data, 8, 3)
    unpack_positions(data, 3, count_blocks(positions, 3, 1))
    ascending_below(positions, 8)
    clear_(add_mean_(ones, [Collected(positions, ones[:8])]), positions)
    checksum(torch.arange(8), 0)
    advance(ones, ones, ones, 0.5, False, (ones.clone(), ones.clone()), 8)
    codes.warm_up()
