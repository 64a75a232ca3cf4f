"""One bucket's step, phase by phase: accumulate, run every unit's rounds together, commit or abort.

Whoever carries the fused requests, Horovod or the simulation, drives the same :class:`BucketRun`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdcomp.buckets import LARGE, Bucket, Part, Spec
from hvdcomp.compressors import NoCompression
from hvdcomp.compressors.dense import dense_rounds
from hvdcomp.compressors.requests import (
    Allgather,
    Allreduce,
    Alltoall,
    Alltoallv,
    Broadcast,
    Decide,
    Dense,
    Reduced,
    Request,
    Rounds,
)
from hvdcomp.compressors.sparsifier import Sparsifier, kept_elements
from hvdcomp.feedback import Accumulated, ErrorFeedback
from hvdcomp.kernels import moments_in_passing, squared_norm
from hvdcomp.schedules.base import Statistics
from hvdcomp.sparse_gradients import SparseRows, as_rows, no_rows, sparse_rounds
from hvdcomp.wire import decode_frames, encode_frame

LARGEST_ALLGATHER = 2**31 - 2**20
"""Bytes: Horovod counts what an allgather returns in int32; a little is left for frames."""

_KINDS: dict[type, str] = {
    Allreduce: "allreduce",
    Allgather: "allgather",
    Alltoall: "alltoall",
    Alltoallv: "alltoall",
    Broadcast: "broadcast",
}


class Gradients(Protocol):
    """Where a step's gradients come from and where their mean goes."""

    def read(self, spec: Spec) -> Tensor | None:
        """The gradient (dense or sparse), or None where this worker has none."""

    def write(self, spec: Spec, mean: Tensor) -> None:
        """Take the mean: flat, or sparse where the gradient is."""

    def target(self, spec: Spec, dtype: torch.dtype) -> Tensor | None:
        """A flat view to write the mean into directly, None where there is none of this type."""


@dataclass
class Fused:
    """Requests of one kind and type that travel as one buffer."""

    kind: str
    buffer: Tensor
    parts: list[int]
    owned: bool
    """The buffer may be overwritten."""
    root: int | None = None
    """The worker whose buffer a broadcast hands to all."""
    alone: bool = False
    """One large tensor, beside others of its kind and type."""
    splits: list[int] | None = None
    """Bytes of an alltoall's buffer that go to each worker; None where it is rows of one size."""

    @property
    def key(self) -> str:
        root = "" if self.root is None else f".{self.root}"
        number = f".{self.parts[0]}" if self.alone else ""
        return f"{self.kind}.{str(self.buffer.dtype).removeprefix('torch.')}{root}{number}"


@dataclass
class Context:
    """What all buckets of a step share."""

    worker: int
    workers: int
    step: int
    levels: tuple[float, float] | None
    check_finite: bool
    scale: float = 1.0
    """Loss scale of the gradients; residuals are kept without it."""
    summed: bool = False
    """The gradients' sum is wanted, not their mean."""
    watched: tuple[float, float] | None = None
    """Factors whose gains are estimated, for a decision on later steps."""
    dense: bool = False
    """This step is exchanged dense, with what the residuals hold."""
    overwrites: bool = True
    """A gradient may be overwritten by its mean before the step is settled, where that saves a copy."""
    cf: float | None = None
    """The factor of this step where no decision chooses it, None where the compressor has none."""


@dataclass
class BucketRun:
    """The step of one bucket on one worker."""

    bucket: Bucket
    gradients: Gradients
    context: Context
    phase: int = 0
    finite: bool = True
    """No worker is known to have met a NaN or an Inf in this bucket."""
    sent: dict[int, int] = field(default_factory=dict)
    """Bytes that each unit, by its place in the bucket, handed to collectives so far; headers of frames apart."""
    outcomes: dict[int, Reduced] = field(default_factory=dict)
    """What the rounds of each unit came to, by its place in the bucket, once they are over."""
    _generators: dict[int, Rounds] = field(default_factory=dict)
    _waiting: dict[int, Request] = field(default_factory=dict)
    _accumulated: set[int] = field(default_factory=set)
    _acc: dict[int, Tensor] = field(default_factory=dict)
    _sums: dict[int, Accumulated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = self.context.dense and not self.bucket.holds
        self.parts = self.bucket.dense_parts if plain else self.bucket.parts
        self._checks_finite = self.context.check_finite and not plain  # with no residual that a NaN could harm

    def begin(self) -> None:
        """Add the gradients to the residuals and run every unit up to its first request."""
        for number, part in enumerate(self.parts):
            unit, context = part.unit, self.context
            unit.worker, unit.workers, unit.step = context.worker, context.workers, context.step
            unit.cf, unit.levels = (context.cf, context.levels) if part.compressed else (None, None)
            if part.sparse:
                self._generators[number] = self._sparse_rounds(part)
                continue
            self.finite &= self._accumulate(number, part)
            acc = self._acc[number]
            self._generators[number] = (
                dense_rounds(acc, unit) if self._whole(part) else part.compressor.rounds(acc, unit)
            )
        for number, generator in self._generators.items():
            self._advance(number, lambda generator=generator: next(generator))  # type: ignore[misc]

    def statistics(self) -> list[float]:
        """This bucket's share of the step's :class:`Statistics`, as a vector."""
        total = [0.0] * Statistics.SIZE
        for number, request in self._waiting.items():
            if isinstance(request, Decide):
                total = [a + b for a, b in zip(total, self._unit_statistics(number, request), strict=True)]
        if self.context.watched is not None:
            for number, part in enumerate(self.parts):
                if isinstance(part.compressor, Sparsifier):
                    squares = self._estimated(number, part.compressor, self.context.watched)
                    total = [a + b for a, b in zip(total, self._squares_as_statistics(number, squares), strict=True)]
        if not self.finite:
            total[-1] = 1.0
        return total

    def _estimated(self, number: int, method: Sparsifier, factors: tuple[float, float]) -> tuple[float, float]:
        """What the squares of the elements that each factor keeps add up to, about."""
        acc = self._acc[number]
        low, high = method.estimated_squares(acc, [kept_elements(acc.numel(), cf) for cf in factors])
        return low, high

    @property
    def compressed(self) -> dict[str, int]:
        """Elements that each method compresses in this step."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            if part.compressed and not self.context.dense:
                sizes[part.compressor.name] = sizes.get(part.compressor.name, 0) + part.unit.numel
        return sizes

    def decide(self, level: int) -> None:
        """Answer every unit that waits for the decision."""
        for number, request in list(self._waiting.items()):
            if isinstance(request, Decide):
                self._send(number, level)

    def fuse(self) -> list[Fused]:
        """The requests of this phase, those of one kind, type and root together; none when the bucket is done.

        Large tensors to reduce or to broadcast travel by themselves.
        """
        groups: dict[tuple[str, str, int, int], list[int]] = {}
        for number, request in sorted(self._waiting.items()):
            self.sent[number] = self.sent.get(number, 0) + _nbytes(request)
            dtype = "" if isinstance(request, (Allgather, Alltoallv)) else str(_tensor_of(request).dtype)
            root = request.root if isinstance(request, Broadcast) else -1
            large = isinstance(request, (Allreduce, Broadcast)) and request.tensor.nbytes >= LARGE
            alone = number if large else -1
            groups.setdefault((_KINDS[type(request)], dtype, root, alone), []).append(number)
        return [
            self._fuse(kind, root, numbers, alone >= 0) for (kind, _, root, alone), numbers in sorted(groups.items())
        ]

    def answer(self, fused: list[Fused], answers: list[Tensor]) -> None:
        """Hand each unit its part of what the collectives of :meth:`fuse` returned, and run it to its next request."""
        split: dict[int, Any] = {}
        for request, result in zip(fused, answers, strict=True):
            split.update(self._split(request, result))
        self.phase += 1
        for number, value in split.items():
            self._send(number, value)

    def settled(self) -> bool:
        """False where any worker met a non-finite value, or a mean overflowed that would harm what is kept: skip."""
        kept = [o for n, o in self.outcomes.items() if n in self._accumulated or o.state is not None]
        return self.finite and all(outcome.finite() for outcome in kept)

    def commit(self) -> None:
        """Write the means and keep the residuals and states."""
        self.write_means()  # before settling: alone in the world, a mean may be a view of the residual
        self.keep()

    def write_means(self) -> None:
        """The first half of :meth:`commit`."""
        for number, outcome in self.outcomes.items():
            self._write(self.parts[number], outcome)

    def keep(self) -> None:
        """The second half of :meth:`commit`: what was sent leaves the residuals, and states change."""
        for number, outcome in self.outcomes.items():
            part = self.parts[number]
            if part.feedback is not None and number in self._accumulated:
                self._settle(part, part.feedback, outcome)
            if outcome.state is not None:
                part.unit.state = outcome.state

    def abort(self) -> None:
        """Leave residuals and states as they were before the step."""
        for number in self._accumulated:
            part = self.parts[number]
            assert part.feedback is not None
            part.feedback.restore(self.flat_gradients(part), 1 / self.context.scale)
        for generator in self._generators.values():
            generator.close()

    def _whole(self, part: Part) -> bool:
        """The unit is sent dense, and what it is sent from must stay as it is until the step is settled."""
        if self.context.dense and part.feedback is not None:
            return True
        dense = type(part.compressor) is NoCompression
        return dense and ((part.assigned and part.feeds_back) or not self.context.overwrites)

    @staticmethod
    def _settle(part: Part, feedback: ErrorFeedback, outcome: Reduced) -> None:
        """What was sent leaves the residual, and all does where the compressor keeps none."""
        feedback.holds = part.compressor.error_feedback and not isinstance(outcome, Dense)
        if feedback.holds:
            outcome.settle_(feedback.residual)
        else:
            feedback.residual.zero_()

    # -- accumulating

    def _accumulate(self, number: int, part: Part) -> bool:
        """Residual + gradient of a unit, or its gradient alone. Returns whether all of it is finite."""
        gradients = self.flat_gradients(part)
        unit = part.unit
        unit.moments = unit.tail = None
        if part.feedback is not None and part.feeds_back:
            wanted = part.compressor.wanted(unit)
            done = part.feedback.accumulate(gradients, 1 / self.context.scale, wanted)
            self._acc[number] = part.feedback.residual
            self._accumulated.add(number)
            unit.moments, unit.tail = done.moments, done.tail
        else:
            self._acc[number] = part.joined(gradients)
            if part.unscaled and self.context.scale != 1.0:
                self._acc[number] = self._acc[number] / self.context.scale
            if not self._checks_finite or self._is_checked_later(part):
                return True
            unit.moments = moments_in_passing(self._acc[number])
            norm_sq = float(squared_norm(self._acc[number])) if unit.moments is None else unit.moments.total_sq
            finite = math.isfinite(norm_sq) or bool(torch.isfinite(self._acc[number]).all())
            done = Accumulated(finite, norm_sq / self.context.scale**2, norm_sq)
        self._sums[number] = done
        return done.finite

    def _is_checked_later(self, part: Part) -> bool:
        """Its mean tells whether all gradients were finite, while others are on their way; a decision cannot wait."""
        plain = type(part.compressor) is NoCompression and part.dtype != torch.bfloat16
        return plain and self.context.levels is None

    def flat_gradients(self, part: Part) -> list[tuple[int, Tensor]]:
        """(offset, flat gradient) of each member that has one; a missing one is zero."""
        found = []
        for offset, member in zip(part.offsets, part.members, strict=True):
            gradient = self.gradients.read(member)
            if gradient is not None:
                found.append((offset, (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)))
        return found

    def _sparse_rounds(self, part: Part) -> Rounds:
        spec = part.members[0]
        gradient = self.gradients.read(spec)
        rows = no_rows(spec.shape, spec.dtype, spec.device) if gradient is None else as_rows(gradient)
        if self._checks_finite:
            self.finite &= bool(torch.isfinite(rows.values()).all())
        return sparse_rounds(rows, part.unit)

    def _unit_statistics(self, number: int, request: Decide) -> tuple[float, ...]:
        return self._squares_as_statistics(number, (float(request.kept_sq[0]), float(request.kept_sq[1])))

    def _squares_as_statistics(self, number: int, kept_sq: tuple[float, float]) -> tuple[float, ...]:
        sums = self._sums[number]
        return Statistics(
            acc=sums.total_sq if sums.total_sq is not None else float(squared_norm(self._acc[number])),
            kept=kept_sq,
            raw_norm=math.sqrt(sums.gradient_sq),
            kept_norm=(math.sqrt(kept_sq[0]), math.sqrt(kept_sq[1])),
            finite=True,
        ).to_vector()

    # -- rounds

    def _send(self, number: int, value: Any) -> None:
        self._advance(number, lambda: self._generators[number].send(value))

    def _advance(self, number: int, resume: Callable[[], Request]) -> None:
        self._waiting.pop(number, None)
        try:
            self._waiting[number] = resume()
        except StopIteration as stop:
            self.outcomes[number] = stop.value

    def _fuse(self, kind: str, root: int, numbers: list[int], alone: bool) -> Fused:
        requests = [self._waiting[number] for number in numbers]
        if kind == "allgather":
            payloads = [request.payload for request in requests if isinstance(request, Allgather)]
            return Fused(kind, self._frame(payloads), numbers, owned=True)
        split = [request.payloads for request in requests if isinstance(request, Alltoallv)]
        if split:
            frames = [self._frame(list(payloads)) for payloads in zip(*split, strict=True)]
            return Fused(kind, torch.cat(frames), numbers, owned=True, splits=[frame.numel() for frame in frames])
        tensors = [_tensor_of(request) for request in requests]
        if kind == "alltoall":
            joined = torch.cat(tensors, dim=1) if len(tensors) > 1 else tensors[0]
            return Fused(kind, joined, numbers, owned=len(tensors) > 1)
        first = requests[0]
        owned = len(tensors) > 1 or (isinstance(first, (Allreduce, Broadcast)) and first.in_place)
        flat = [tensor.reshape(-1) for tensor in tensors]
        buffer = torch.cat(flat) if len(flat) > 1 else flat[0].contiguous()
        if kind == "broadcast":  # whole numbers cannot tell of a NaN: the values that follow do
            return Fused(kind, buffer, numbers, owned, root, alone)
        return self._flagged(Fused(kind, buffer, numbers, owned, alone=alone))

    def _frame(self, payloads: list[Tensor]) -> Tensor:
        total = self.context.workers * sum(payload.numel() for payload in payloads)
        if total > LARGEST_ALLGATHER:
            raise ValueError(
                f"bucket {self.bucket.index} would gather {total} bytes from {self.context.workers} workers, but "
                f"Horovod takes {LARGEST_ALLGATHER} at most: use a smaller bucket_mb, or a larger cf"
            )
        return encode_frame(payloads, self.finite)

    def _flagged(self, fused: Fused) -> Fused:
        """A worker that met a non-finite value tells the others by a NaN in front."""
        if not self.finite and fused.buffer.numel():
            fused.buffer = fused.buffer if len(fused.parts) > 1 else fused.buffer.clone()
            fused.buffer[0] = torch.nan
            fused.owned = True
        return fused

    def _split(self, fused: Fused, result: Tensor) -> dict[int, Any]:
        requests = [self._waiting[number] for number in fused.parts]
        if fused.kind == "allgather" or fused.splits is not None:
            frames = decode_frames(result, self.context.workers, len(requests))
            self.finite &= all(frame.finite for frame in frames)
            return {n: [frame.payloads[i] for frame in frames] for i, n in enumerate(fused.parts)}
        tensors = [_tensor_of(request) for request in requests]
        if fused.kind == "alltoall":
            pieces = result.split([tensor.shape[1] for tensor in tensors], dim=1)
            return {n: piece.contiguous() for n, piece in zip(fused.parts, pieces, strict=True)}
        if self._checks_finite and result.is_floating_point() and result.numel():
            whole = any(self._is_checked_later(self.parts[number]) for number in fused.parts)
            self.finite &= is_finite(result) if whole else not bool(torch.isnan(result[0]))
        pieces = result.split([tensor.numel() for tensor in tensors])
        return {n: p.view(t.shape) for n, p, t in zip(fused.parts, pieces, tensors, strict=True)}

    # -- committing

    def _write(self, part: Part, outcome: Reduced) -> None:
        factor = self.context.scale if part.unscaled or outcome.ignores_scale else 1.0
        factor *= self.context.workers if self.context.summed else 1
        if isinstance(outcome, SparseRows):
            self.gradients.write(part.members[0], outcome.mean * factor)
            return
        target = self.gradients.target(part.members[0], part.dtype) if len(part.members) == 1 else None
        mean = target
        if mean is None:
            mean = torch.empty(part.unit.numel, dtype=part.dtype, device=part.members[0].device)
        outcome.write_mean_(mean)
        if factor != 1.0:
            mean.mul_(factor)
        if target is None:
            for offset, member in zip(part.offsets, part.members, strict=True):
                self.gradients.write(member, _saturated(mean[offset : offset + member.numel], member.dtype))


def is_finite(values: Tensor) -> bool:
    """Whether all elements of a 1-D tensor are."""
    return math.isfinite(float(squared_norm(values))) or bool(torch.isfinite(values).all())


def _nbytes(request: Request) -> int:
    if isinstance(request, Alltoallv):
        return sum(payload.nbytes for payload in request.payloads)
    return request.payload.nbytes if isinstance(request, Allgather) else _tensor_of(request).nbytes


def _tensor_of(request: Request) -> Tensor:
    assert isinstance(request, (Allreduce, Alltoall, Broadcast))
    return request.tensor


def _saturated(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """A mean that is about to be cast: what several steps left behind may not fit into a half."""
    limits = torch.finfo(dtype)
    return mean.clamp_(limits.min, limits.max) if dtype.itemsize < mean.dtype.itemsize else mean
