"""Horovod's background thread: operations wait for a cycle, are fused, and run one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvdcomp.costmodel.cluster import FUSION_NBYTES, Cluster
from hvdcomp.costmodel.traffic import Operation

FUSED = ("allreduce", "allgather")
"""Kinds of which several travel as one."""


@dataclass
class Pending:
    """An operation under way."""

    ready_s: float
    cluster: Cluster
    operation: Operation
    done_s: float | None = None


class Engine:
    """Says when operations end that are handed over at given times.

    Args:
        cycle_s: operations are looked for once in so long; an idle engine finds one after half of it.
        memory_bandwidth: of copies into and out of a fusion buffer, bytes/s.
        busy_factor: how many times as long an operation takes while the worker computes.
    """

    def __init__(self, cycle_s: float, memory_bandwidth: float, busy_factor: float = 1.0) -> None:
        self._cycle_s = cycle_s
        self._busy_factor = busy_factor
        self._busy: list[tuple[float, float]] = []
        self._copy_s = 2 / memory_bandwidth
        self._queue: list[Pending] = []
        self._free_s = 0.0

    def submit(self, ready_s: float, cluster: Cluster, operation: Operation) -> Pending:
        """Hand over an operation between the workers of a cluster; times must not descend."""
        pending = Pending(ready_s, cluster, operation)
        self._queue.append(pending)
        return pending

    def computes(self, begins_s: float, ends_s: float) -> None:
        """The worker computes for this long; times must not descend. What is told after an operation's end was asked
        for does not slow down that operation any more, nor the others of its cycle."""
        if self._busy and begins_s <= self._busy[-1][1]:
            begins_s = self._busy.pop()[0]
        self._busy.append((begins_s, ends_s))

    def end_of(self, pending: Pending) -> float:
        """When it ends. Operations that are handed over later must be so after that, or after its start."""
        while pending.done_s is None:
            self._run_cycle()
        return pending.done_s

    def _run_cycle(self) -> None:
        began_s = max(self._free_s, self._queue[0].ready_s + self._cycle_s / 2)
        batch = [pending for pending in self._queue if pending.ready_s <= began_s]
        self._queue = self._queue[len(batch) :]
        while batch:
            together = _fusible(batch)
            began_s = self._run(together, began_s)
            batch = [pending for pending in batch if pending.done_s is None]
        self._free_s = began_s

    def _run(self, together: list[Pending], began_s: float) -> float:
        first = together[0]
        nbytes = sum(pending.operation.nbytes for pending in together)
        copied_s = self._copy_s * nbytes if len(together) > 1 else 0.0
        alone_s = copied_s + first.cluster.operation_s(replace(first.operation, nbytes=nbytes))
        done_s = self._ends_s(began_s, alone_s)
        for pending in together:
            pending.done_s = done_s
        return done_s

    def _ends_s(self, now_s: float, left_s: float) -> float:
        """When an operation ends that begins now and would take so long alone."""
        for begins_s, ends_s in self._busy:
            if ends_s <= now_s:
                continue
            free_s = max(0.0, begins_s - now_s)
            if left_s <= free_s:
                break
            now_s, left_s = now_s + free_s, left_s - free_s
            if self._busy_factor * left_s <= ends_s - now_s:
                return now_s + self._busy_factor * left_s
            now_s, left_s = ends_s, left_s - (ends_s - now_s) / self._busy_factor
        return now_s + left_s


def _fusible(batch: list[Pending]) -> list[Pending]:
    """The first of a batch, and those that travel with it."""
    first = batch[0]
    if first.operation.kind not in FUSED:
        return [first]
    together, nbytes = [first], first.operation.nbytes
    for pending in batch[1:]:
        operation = pending.operation
        alike = (operation.kind, operation.halves) == (first.operation.kind, first.operation.halves)
        if alike and pending.cluster is first.cluster and nbytes + operation.nbytes <= FUSION_NBYTES:
            together.append(pending)
            nbytes += operation.nbytes
    return together
