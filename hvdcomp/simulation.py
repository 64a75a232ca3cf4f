"""N workers in one process, in lockstep: the same compressors, error feedback, buckets and wire format, without MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdcomp.assignment import Assignment
from hvdcomp.buckets import Bucket, Spec
from hvdcomp.checkpointing import residual_views
from hvdcomp.checks import check_count
from hvdcomp.compressors import Compressor, create
from hvdcomp.coordinator import Coordinator, LocalChannel
from hvdcomp.plugin import as_compressor, as_schedule, cf_in_force, layout_of
from hvdcomp.rounds import BucketRun, Context, Fused
from hvdcomp.schedules import Assigning, Decision, Evidence, Schedule, Setting


@dataclass
class _Gradients:
    """One worker's gradients, and the means that come back."""

    given: Mapping[str, Tensor | None]
    means: dict[str, Tensor] = field(default_factory=dict)

    def read(self, spec: Spec) -> Tensor | None:
        gradient = self.given.get(spec.name)
        return None if gradient is None else gradient.detach()

    def target(self, spec: Spec, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, spec: Spec, mean: Tensor) -> None:
        self.means[spec.name] = mean.view(spec.shape).to(spec.dtype, copy=True)


class _Told:
    """The channel of workers that are asked one after the other, the root first."""

    name = "told"

    def __init__(self, root: bool, said: list[np.ndarray]) -> None:
        self.root = root
        self._said = said

    def sum_to_root(self, vector: np.ndarray) -> np.ndarray:
        raise NotImplementedError("the simulation adds statistics itself")

    def from_root(self, vector: np.ndarray) -> np.ndarray:
        if self.root:
            self._said[:] = [vector]
        return self._said[0]


class World:
    """A world of ``size`` workers.

    Args:
        size: workers, >= 1.
        compression: a compressor or its name.
        schedule: a schedule or its name, or None for the compressor's own factor.
        granularity, bucket_mb, exclude: as in ``hvdcomp.DistributedOptimizer``, but nothing is excluded by default.
        parameters: of the compressor, where ``compression`` is a name.

    Attributes:
        nbytes: payload that worker 0 handed to collectives in the last step, headers included.
        decision: the schedule's last decision on a factor for all.
        decisions: the last decision on each bucket, by its index; the same on all unless the schedule tells them apart.
        switched: the units whose setting the schedule changed after the last step, with the new one.
        skipped: the last step met a NaN or an Inf on some worker and was left out by all.
    """

    def __init__(
        self,
        size: int,
        compression: Compressor | str = "none",
        *,
        schedule: Schedule | str | None = None,
        granularity: str = "tensor",
        bucket_mb: float = 25.0,
        exclude: Sequence[str] = (),
        **parameters: object,
    ) -> None:
        check_count("size", size, hint="workers")
        if parameters and isinstance(compression, Compressor):
            raise ValueError(f"parameters {sorted(parameters)} go with a compressor's name, got an object")
        named = isinstance(compression, str) and parameters
        compressor = create(str(compression), **parameters) if named else as_compressor(compression, size)
        chosen, compressor = as_schedule(schedule, compressor)
        self.size = size
        self.compression = compressor
        self.schedule = chosen if chosen.adaptive and not isinstance(chosen, Assigning) else None
        self._cf_at = partial(cf_in_force, chosen, compressor)
        self.nbytes = 0
        self.step_count = 0
        self.decision: Decision | None = None
        self.decisions: dict[int, Decision] = {}
        self.skipped = False
        self.switched: dict[str, Setting] = {}
        self._layout = layout_of(chosen, compressor, granularity, bucket_mb, exclude)
        self._buckets: list[list[Bucket]] = []
        self._assigning = chosen if isinstance(chosen, Assigning) else None
        self._assignments: list[Assignment] = []
        self._levels: dict[int, tuple[float, float]] = {}
        self._sending: dict[int, float] = {}
        chosen.prepare(size)
        self._ahead = self.schedule is not None and not chosen.exact

    def step(self, grads: Sequence[Mapping[str, Tensor | None]], **told: float) -> list[dict[str, Tensor]]:
        """One exchange.

        Args:
            grads: each worker's gradients by name; a missing one, or None, counts as zero.
            told: what a schedule that assigns is told of the step besides: fields of :class:`Evidence`, such as lr.

        Returns:
            Each worker's mean by name, NaN everywhere if some worker met a NaN or an Inf.

        Raises:
            ValueError: not one worker's gradients each, or a name or shape that the first step did not have.
        """
        if len(grads) != self.size:
            raise ValueError(f"expected the gradients of {self.size} workers, got {len(grads)}")
        if not self._buckets:
            self._buckets = [self._layout.buckets(_specs(grads)) for _ in range(self.size)]
            self._assignments = self._assigned()
        specs = [spec for bucket in self._buckets[0] for spec in bucket.members]
        unknown = sorted({name for worker in grads for name in worker} - {spec.name for spec in specs})
        if unknown and any(worker.get(name) is not None for worker in grads for name in unknown):
            raise ValueError(f"the first step had no gradients of {', '.join(unknown)}: start another World")
        _check_shapes(grads, specs)
        self.nbytes = 0
        gradients = [_Gradients(worker) for worker in grads]
        runs = [self._begin(worker, gradients[worker]) for worker in range(self.size)]
        levels = self._decide(runs)
        self.skipped = levels is None
        if levels is not None:
            for bucket in zip(*runs, strict=True):
                self._exchange(list(bucket), levels.get(bucket[0].bucket.index, -1))
            self.skipped = not all(run.settled() for run in runs[0])
        for run in (run for worker in runs for run in worker):
            if self.skipped:
                run.abort()
            else:
                run.commit()
        self._assign(told)
        self.step_count += 1
        if self.skipped:
            return [{s.name: torch.full(s.shape, torch.nan, dtype=s.dtype) for s in specs} for _ in grads]
        return [worker.means for worker in gradients]

    def residual(self, worker: int, name: str) -> Tensor:
        """What a worker has not sent of a tensor, in its shape; zeros where there is no error feedback.

        Raises:
            KeyError: no step had a gradient of that name.
        """
        if not self._buckets:
            raise KeyError(name)
        for bucket in self._buckets[worker]:
            for part in bucket.parts:
                if name in residual_views(part):
                    return residual_views(part)[name].clone()
                for offset, member in zip(part.offsets, part.members, strict=True):
                    if member.name == name:
                        kept = part.unit.state.get(part.compressor.residual_state or "")
                        own = torch.zeros(part.unit.numel) if kept is None else kept
                        return own[offset : offset + member.numel].view(member.shape).clone()
        raise KeyError(name)

    def _begin(self, worker: int, gradients: _Gradients) -> list[BucketRun]:
        runs = [BucketRun(bucket, gradients, self._context(worker, bucket.index)) for bucket in self._buckets[worker]]
        for run in runs:
            run.begin()
            for assignment in self._assignments[worker : worker + 1]:
                assignment.see(run)
        return runs

    def _context(self, worker: int, bucket: int) -> Context:
        levels, cf = None, None
        if self.schedule is None:
            cf = self._cf_at(self.step_count)
        else:
            levels = self._levels.get(bucket, self.schedule.levels)
            cf = self._sending.get(bucket, levels[0]) if self._ahead else None
        return Context(
            worker,
            self.size,
            self.step_count,
            None if self._ahead else levels,
            any(method.checks_finite for method in self._layout.methods),
            cf=cf,
            watched=levels if self._ahead else None,
        )

    def _assigned(self) -> list[Assignment]:
        """Each worker's part of what a schedule assigns."""
        if self._assigning is None:
            return []
        said: list[np.ndarray] = []
        return [
            Assignment(self._assigning, self._layout.settings, _Told(worker == 0, said), buckets)
            for worker, buckets in enumerate(self._buckets)
        ]

    def _assign(self, told: Mapping[str, float]) -> None:
        """Ask for each unit's setting in the next step."""
        self.switched = {}
        for assignment in self._assignments:
            assignment.settle(self.skipped)
        for assignment in self._assignments if not self.skipped else ():
            spec_bytes = sum(spec.nbytes for bucket in self._buckets[0] for spec in bucket.members)
            known: dict[str, Any] = {"bytes_sent": self.nbytes, "bytes_dense": spec_bytes, **told}
            _, self.switched = assignment.ask(Evidence(self.step_count, **known))

    def _decide(self, runs: list[list[BucketRun]]) -> dict[int, int] | None:
        """The level to send by a bucket's index, None to skip; empty where the last decision is obeyed."""
        if self.schedule is None:
            return {}
        same = list(zip(*runs, strict=True))
        shares = [np.sum([run.statistics() for run in bucket], axis=0) for bucket in same]
        made = Coordinator(self.schedule, LocalChannel()).decide(shares)
        self.decisions = {bucket[0].bucket.index: decision for bucket, decision in zip(same, made, strict=True)}
        self.decision = made[0]
        self._levels = {index: decision.levels for index, decision in self.decisions.items()}
        skip = any(decision.skip for decision in made)
        if self._ahead:
            self._sending |= {} if skip else {index: decision.cf for index, decision in self.decisions.items()}
            return {}
        return None if skip else {index: decision.level for index, decision in self.decisions.items()}

    def _exchange(self, workers: list[BucketRun], level: int) -> None:
        """All phases of one bucket, on all workers."""
        for run in workers:
            run.decide(level)
        while True:
            fused = [run.fuse() for run in workers]
            if not fused[0]:
                return
            self.nbytes += sum(request.buffer.nbytes for request in fused[0])
            answers = [collective(list(same)) for same in zip(*fused, strict=True)]
            for worker, run in enumerate(workers):
                run.answer(fused[worker], [answer[worker] for answer in answers])


def collective(requests: list[Fused]) -> list[Tensor]:
    """What each worker gets back.

    Args:
        requests: every worker's, in worker order.
    """
    buffers = [request.buffer for request in requests]
    kinds = {request.key for request in requests}
    if len(kinds) > 1:
        raise AssertionError(f"workers ask for different collectives: {sorted(kinds)}")
    if requests[0].kind == "allgather":
        return [torch.cat(buffers)] * len(buffers)
    splits = [request.splits for request in requests if request.splits is not None]
    if splits:
        sent = [buffer.split(lengths) for buffer, lengths in zip(buffers, splits, strict=True)]
        return [torch.cat(arriving) for arriving in zip(*sent, strict=True)]
    if requests[0].kind == "alltoall":
        return [torch.stack([buffer[worker] for buffer in buffers]) for worker in range(len(buffers))]
    if requests[0].root is not None:
        return [buffers[requests[0].root]] * len(buffers)
    if buffers[0].dtype == torch.float16:
        return [sum((buffer / len(buffers) for buffer in buffers), start=torch.zeros_like(buffers[0]))] * len(buffers)
    total = buffers[0].clone()
    for buffer in buffers[1:]:
        total += buffer
    return [total / len(buffers)] * len(buffers)


def _specs(grads: Sequence[Mapping[str, Tensor | None]]) -> list[Spec]:
    found: dict[str, Spec] = {}
    for worker in grads:
        for name, gradient in worker.items():
            if gradient is not None:
                found.setdefault(name, Spec.of(name, gradient))
    return list(found.values())


def _check_shapes(grads: Sequence[Mapping[str, Tensor | None]], specs: Sequence[Spec]) -> None:
    for worker, given in enumerate(grads):
        for spec in specs:
            gradient = given.get(spec.name)
            if gradient is not None and gradient.shape != spec.shape:
                raise ValueError(
                    f"worker {worker}'s gradient of {spec.name!r} has shape {tuple(gradient.shape)}, the first of that "
                    f"name had {tuple(spec.shape)}"
                )
