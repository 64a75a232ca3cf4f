"""Runs the buckets' rounds over Horovod: named, fused, every phase of every bucket in flight before the next."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdcomp.assignment import Assignment, Told
from hvdcomp.buckets import Bucket, Spec
from hvdcomp.coordinator import Coordinator, Referee
from hvdcomp.errors import ReplicaError
from hvdcomp.plain import PlainMeans
from hvdcomp.rounds import BucketRun, Context, Fused, Gradients
from hvdcomp.schedules import DENSE, Decision, Evidence, Setting, Statistics

NOTHING = Told()


@dataclass
class StepRecord:
    """What one exchange did, sent and cost on this worker; sizes in bytes, times in seconds.

    Attributes:
        step: number of the exchange, from 0.
        cf: the compression factor that was sent: the papers' (values only) where the method has one, else dense bytes /
            sent bytes; 1 is dense.
        level: which of ``levels`` was sent, -1 for dense or without an adaptive schedule.
        levels: the two factors that an adaptive schedule evaluated.
        gains: the schedule's smoothed gain at each.
        fell_back: the step was exchanged dense by the honest switch.
        skipped: some worker met a NaN or an Inf, so all left this step out.
        bytes_sent: payload that this worker handed to collectives.
        bytes_dense: what plain Horovod would have handed over.
        bytes_received: what arrived: the other workers' payloads of an allgather or an alltoall, the ring's share of an
            allreduce.
        exchanges: collectives, decisions apart.
        messages: that follow one another in them, one after the other: 2 (N - 1) in a ring allreduce of N workers.
        elements: of gradients that each method compressed.
        encode_s: adding gradients to residuals, selecting, making payloads.
        decode_s: reading what arrived, writing the mean, keeping the residual.
        exchange_s: from the first collective's start to the last one's end.
        wait_s: the part of it in which this worker only waited.
        decide_s: waiting for the decision.
        cfs: by a bucket's index, where each is decided on by itself; ``cf`` is that of all their elements then, and
            ``level``, ``levels`` and ``gains`` tell nothing.
        statistics: what the decision on all was made on, on the worker that decides.
        evidence: what a schedule that assigns was told of this step, on the worker that decides.
        switched: the units whose setting such a schedule changes from the next step on, with the new one.
        sent: the tensors of each unit, and the bytes that it handed to collectives, headers of frames apart.
    """

    step: int
    cf: float = 1.0
    level: int = -1
    levels: tuple[float, float] | None = None
    gains: tuple[float, float] | None = None
    fell_back: bool = False
    skipped: bool = False
    bytes_sent: int = 0
    bytes_dense: int = 0
    bytes_received: int = 0
    exchanges: int = 0
    messages: int = 0
    elements: dict[str, int] = field(default_factory=dict)
    encode_s: float = 0.0
    decode_s: float = 0.0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    decide_s: float = 0.0
    cfs: dict[int, float] = field(default_factory=dict)
    statistics: Statistics | None = None
    evidence: Evidence | None = None
    switched: dict[str, Setting] = field(default_factory=dict)
    sent: list[tuple[list[Spec], int]] = field(default_factory=list, repr=False)

    @property
    def layer_bytes(self) -> dict[str, tuple[float, int]]:
        """Of each tensor the bytes sent for it, headers apart, and those that plain Horovod would have sent.

        Tensors that make up one unit share its bytes by their size.
        """
        found = {}
        for members, nbytes in self.sent:
            whole = sum(member.nbytes for member in members)
            for member in members:
                found[member.name] = (nbytes * member.nbytes / max(1, whole), member.nbytes)
        return found

    @property
    def compress_s(self) -> float:
        """What compression takes on this worker."""
        return self.encode_s + self.decode_s

    def count(self, fused: Fused, received: int, messages: int) -> None:
        """Book one collective."""
        self.exchanges += 1
        self.messages += messages
        self.bytes_sent += fused.buffer.numel() * fused.buffer.element_size()
        self.bytes_received += received


class Transport(Protocol):
    """Starts collectives by name and waits for them."""

    worker: int
    workers: int

    def start(self, fused: Fused, name: str) -> Callable[[], Tensor]:
        """Begin a collective; the returned call waits for its result."""

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Every worker's JSON-able value, in worker order."""


class LocalTransport:
    """One worker alone: every collective returns what it was given."""

    worker = 0
    workers = 1

    def start(self, fused: Fused, name: str) -> Callable[[], Tensor]:
        return lambda: fused.buffer

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        return [value]


class HorovodTransport:
    """Horovod's asynchronous operations over a process set."""

    def __init__(self, hvd: Any, process_set: Any, predivide_factor: float = 1.0) -> None:
        self._hvd = hvd
        self._process_set = process_set
        self._predivide_factor = predivide_factor
        self.worker = process_set.rank()
        self.workers = process_set.size()

    def start(self, fused: Fused, name: str) -> Callable[[], Tensor]:
        if fused.kind == "allreduce":
            return partial(self._hvd.synchronize, self._allreduce(fused, name))
        if fused.kind == "allgather":
            return self._wait(self._hvd.allgather_async(fused.buffer, name=name, process_set=self._process_set))
        if fused.root is not None:
            ranks = self._process_set.ranks
            root = fused.root if ranks is None else ranks[fused.root]  # Horovod counts a root in the whole world
            broadcast = self._hvd.broadcast_async_ if fused.owned else self._hvd.broadcast_async
            return self._wait(broadcast(fused.buffer, root, name=name, process_set=self._process_set))
        splits = None if fused.splits is None else torch.tensor(fused.splits, dtype=torch.int32)
        handle = self._hvd.alltoall_async(fused.buffer, splits, name=name, process_set=self._process_set)
        return self._wait(handle)

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64)
        lengths = self._hvd.allgather(length, name=f"{name}.length", process_set=self._process_set).tolist()
        gathered = self._hvd.allgather(data, name=name, process_set=self._process_set)
        return [json.loads(part.numpy().tobytes()) for part in gathered.split(lengths)]

    def _allreduce(self, fused: Fused, name: str) -> int:
        hvd = self._hvd
        operation = hvd.allreduce_async_ if fused.owned else hvd.allreduce_async
        if fused.buffer.dtype == torch.float16:  # divided before the sum, which would overflow at 65504
            op, before, after = hvd.Sum, 1 / self.workers, 1.0
        else:
            op, before, after = hvd.Average, 1 / self._predivide_factor, self._predivide_factor
        handle = operation(
            fused.buffer,
            name=name,
            op=op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self._process_set,
        )
        return int(handle)

    def _wait(self, handle: int) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            result = self._hvd.synchronize(handle)
            return result[0] if isinstance(result, tuple) else result

        return wait


def bytes_received(fused: Fused, result: Tensor, worker: int, workers: int) -> int:
    """What arrives at a worker: the others' payloads, or a ring allreduce's share."""
    if fused.splits is not None:
        return result.numel() - fused.splits[worker]
    sent = fused.buffer.numel() * fused.buffer.element_size()
    if fused.kind == "allgather":
        return result.numel() * result.element_size() - sent
    if fused.kind == "broadcast":
        return sent
    share = sent * (workers - 1) // workers
    return 2 * share if fused.kind == "allreduce" else share


def messages(fused: Fused, workers: int) -> int:
    """How many messages follow one another: round a ring, and down a tree where one worker hands its buffer to all."""
    if fused.kind == "broadcast":
        return math.ceil(math.log2(workers))
    return (workers - 1) * (2 if fused.kind == "allreduce" else 1)


@dataclass
class _Flight:
    """A bucket under way, and the collectives of its present phase."""

    run: BucketRun
    fused: list[Fused] = field(default_factory=list)
    waits: list[Callable[[], Tensor]] = field(default_factory=list)


class Exchange:
    """Exchanges all buckets once a step.

    Args:
        buckets: alike on every worker.
        transport: carries the collectives.
        coordinator: of a schedule that decides on a factor for all units, else None.
        label: prefix of the operations' names, unique to the optimizer.
        check_finite: skip a step in which any worker meets a NaN or an Inf.
        cf_at: a step's compression factor where no decision chooses it, None where there is none and the bytes tell.
        clock: seconds; a replayed one replays the schedule's decisions.
        referee: chooses between compressed and dense steps; None where all are compressed.

    Attributes:
        assignment: of a schedule that assigns settings to units, else None.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        transport: Transport,
        coordinator: Coordinator | None,
        *,
        label: str,
        check_finite: bool,
        cf_at: Callable[[int], float | None],
        clock: Callable[[], float],
        referee: Referee | None = None,
    ) -> None:
        self.buckets = buckets
        self.transport = transport
        self.coordinator = coordinator
        self.levels = coordinator.schedule.levels if coordinator is not None else None
        self.step = 0
        self.label = label
        self.clock = clock
        self.referee = referee
        self.assignment: Assignment | None = None
        self._check_finite = check_finite
        self._cf_at = cf_at
        self._flights: dict[int, _Flight] = {}
        self._plain = PlainMeans(transport.start, f"{label}.plain", transport.workers)
        self._assigned_plain: bool | None = None
        """No unit's setting compresses in the coming step: known before a step in which a bucket may be added."""
        self._are_plain: dict[int, bool] = {}
        """By a bucket's index, for this step."""
        self._summed = False
        self._record = StepRecord(0)
        self._first_start: float | None = None
        self.sending = self.levels[0] if self.levels is not None else None
        """The factor that the last decision chose, where steps obey the last one's."""
        self.of_buckets: dict[int, tuple[tuple[float, float], float]] = {}
        """Levels and that factor by a bucket's index, where each bucket is decided on by itself."""
        self._gains: tuple[float, float] | None = None
        self._shares: dict[int, list[float]] = {}

    @property
    def _dense(self) -> bool:
        """This step is dense by the honest switch."""
        return self.referee is not None and self.referee.dense

    @property
    def _decided(self) -> bool:
        """This step waits for a decision on it."""
        return self.coordinator is not None and self.coordinator.schedule.exact and not self._dense

    @property
    def _ahead(self) -> bool:
        """This step obeys the last one's decision."""
        return self.coordinator is not None and not self.coordinator.schedule.exact and not self._dense

    def _cf(self, bucket: int | None = None) -> float | None:
        """The factor, of a bucket or of all, of a step that is not decided on."""
        if self._dense or self._decided:
            return 1.0 if self._dense else None
        if bucket in self.of_buckets:
            return self.of_buckets[bucket][1]
        return self.sending if self._ahead else self._cf_at(self.step)

    def _levels(self, bucket: int) -> tuple[float, float] | None:
        return self.of_buckets[bucket][0] if bucket in self.of_buckets else self.levels

    @property
    def under_way(self) -> bool:
        """Some bucket has been started since the last :meth:`finish`."""
        return bool(self._flights) or bool(self._plain)

    def is_plain(self, bucket: Bucket) -> bool:
        """In this step a bucket's tensors are to be averaged and no more: :meth:`start_plain` takes them one by one."""
        if bucket.index not in self._are_plain:
            if self.assignment is not None:
                if self._assigned_plain is None:
                    self._assigned_plain = self.assignment.is_plain(self._dense)
                all_plain = self._assigned_plain
            else:
                all_plain = self._dense or not (self._check_finite or any(part.compressed for part in bucket.parts))
            self._are_plain[bucket.index] = bucket.plain and not bucket.holds and all_plain
        return self._are_plain[bucket.index]

    def start(self, bucket: Bucket, gradients: Gradients, *, scale: float = 1.0, summed: bool = False) -> None:
        """Begin a bucket's exchange without waiting for anybody.

        Args:
            scale: loss scale of the gradients (a power of two).
            summed: the sum over workers is wanted, not the mean.
        """
        self._begin()
        context = Context(
            self.transport.worker, self.transport.workers, self.step,
            self._levels(bucket.index) if self._decided else None,
            self._check_finite, scale, summed, cf=self._cf(bucket.index), dense=self._dense,
            watched=self._levels(bucket.index) if self._ahead else None,
            overwrites=self.assignment is None or not self.assignment.watch.sums,
        )  # fmt: skip
        flight = _Flight(BucketRun(bucket, gradients, context))
        self._flights[bucket.index] = flight
        if self.assignment is not None:
            with self._timed("decide_s"):
                self.assignment.see(flight.run)
        with self._timed("encode_s"):
            flight.run.begin()
            if self._ahead:
                self._shares[bucket.index] = flight.run.statistics()
        if not self._decided:
            self._launch(flight)

    def start_plain(self, spec: Spec, gradients: Gradients, *, scale: float = 1.0, summed: bool = False) -> None:
        """Begin the mean of one tensor of a plain bucket, unless it is under way; arguments as of :meth:`start`."""
        if spec.name not in self._plain:
            self._begin()
            self._summed = summed
            if self.assignment is not None:
                with self._timed("decide_s"):
                    self.assignment.see_plain(spec, gradients, scale)
            self._plain.start(spec, gradients)

    def _begin(self) -> None:
        if not self.under_way:
            apart = self.coordinator is not None and self.coordinator.schedule.per_bucket
            self._record = StepRecord(self.step, levels=None if apart else self.levels, fell_back=self._dense)
            self._first_start = None
            self._shares.clear()

    def finish(self) -> StepRecord:
        """Complete the exchange of all buckets that were started, and commit it or, on every worker alike, skip it."""
        record = self._record
        record.bytes_dense = sum(spec.nbytes for bucket in self.buckets for spec in bucket.members)
        decisions = self._decide()
        flights = [self._flights[index] for index in sorted(self._flights)]
        if any(decision.skip for decision in decisions.values()):
            record.skipped = True
        else:
            self._run_all(flights, decisions)
            self._finish_plain()
            record.skipped = not all(flight.run.settled() for flight in flights)
        with self._timed("decode_s"):
            for flight in flights:
                if record.skipped:
                    flight.run.abort()
                else:
                    flight.run.commit()
        for flight in flights:
            for method, numel in flight.run.compressed.items():
                record.elements[method] = record.elements.get(method, 0) + numel
        if self._ahead and self.of_buckets:
            self._note({index: cf for index, (_, cf) in self.of_buckets.items()})
        elif not decisions:
            assigned = self.assignment.cf if self.assignment is not None else None
            record.cf = self._cf() or assigned or record.bytes_dense / max(record.bytes_sent, 1)
            if self._ahead and self.levels is not None:
                record.gains = self._gains
                record.level = self.levels.index(record.cf) if record.cf in self.levels else DENSE
        if self.assignment is not None:
            self.assignment.settle(record.skipped)
        for flight in flights:
            record.sent += [(flight.run.parts[number].members, n) for number, n in flight.run.sent.items()]
        self._flights.clear()
        self._are_plain.clear()
        self.step += 1
        return record

    def conclude(self, record: StepRecord, seconds: float, samples: float, told: Told = NOTHING) -> None:
        """Tell schedule and referee what a step took, and hear what the next one does; every worker, after each step.

        Args:
            seconds: of the whole iteration, nan if that is no measurement.
            samples: that this worker processed.
            told: what else the caller knows of the step.
        """
        if self.coordinator is not None and not record.fell_back:
            if math.isfinite(seconds):
                self.coordinator.observe(seconds, record.compress_s, samples)
            if not record.skipped:
                self.coordinator.hear(told.next_lr, told.loss)
            if self._ahead:
                self._ask(self.coordinator, self._shares)
        if self.assignment is not None and record is self._record and not record.skipped:
            with self._timed("decide_s"):
                record.evidence, record.switched = self.assignment.ask(_evidence(record, seconds, samples, told))
        if self.referee is not None:
            self.referee.observe(seconds)
        if self.assignment is not None:
            self._assigned_plain = self.assignment.is_plain(self._dense)

    def _ask(self, coordinator: Coordinator, shares: Mapping[int, list[float]]) -> dict[int, Decision]:
        """The decision on each bucket, by its index, after this step's statistics, of which each has its share."""
        indices = sorted(shares)
        with self._timed("decide_s"):
            decisions = dict(zip(indices, coordinator.decide([shares[index] for index in indices]), strict=True))
        self._record.statistics = coordinator.statistics
        for index, decision in decisions.items():
            if coordinator.schedule.per_bucket:
                sending = self.of_buckets[index][1] if index in self.of_buckets else decision.levels[0]
                self.of_buckets[index] = decision.levels, sending if decision.skip else decision.cf
            else:
                self.levels, self._gains = decision.levels, decision.gains
                self.sending = self.sending if decision.skip else decision.cf
        return decisions

    def _note(self, cfs: Mapping[int, float]) -> None:
        """Take down what each bucket sends, and the factor of all their elements together."""
        numel = {b.index: sum(part.unit.numel for part in b.parts if part.compressed) for b in self.buckets}
        self._record.cfs = {index: cf for index, cf in sorted(cfs.items()) if numel.get(index)}
        kept = sum(numel[index] / cf for index, cf in self._record.cfs.items())
        self._record.cf = sum(numel[index] for index in self._record.cfs) / kept if kept else 1.0

    def drop(self) -> None:
        """Forget what is under way: after a failed collective nothing of it can be completed."""
        for flight in self._flights.values():
            flight.run.abort()
            for part in flight.run.parts:
                part.unit.spare = {}  # Horovod may still write there
        if self.assignment is not None:
            self.assignment.settle(skipped=True)
        self._flights.clear()
        self._plain.drop()
        self._are_plain.clear()
        self._assigned_plain = None

    def _decide(self) -> dict[int, Decision]:
        """The decision on each bucket, by its index; empty where the step waits for none."""
        if self.coordinator is None or not self._decided:
            return {}
        record = self._record
        with self._timed("encode_s"):
            shares = {index: flight.run.statistics() for index, flight in self._flights.items()}
        decisions = self._ask(self.coordinator, shares)
        if self.coordinator.schedule.per_bucket:
            self._note({index: decision.cf for index, decision in decisions.items()})
        else:
            for decision in decisions.values():
                record.cf, record.level, record.gains = decision.cf, decision.level, decision.gains
        return decisions

    def _run_all(self, flights: list[_Flight], decisions: Mapping[int, Decision]) -> None:
        for flight in flights if decisions else ():
            with self._timed("encode_s"):
                flight.run.decide(decisions[flight.run.bucket.index].level)
            self._launch(flight)
        while any(flight.fused for flight in flights):
            for flight in flights:
                self._land(flight)
        if self._first_start is not None:
            self._record.exchange_s = self.clock() - self._first_start

    def _finish_plain(self) -> None:
        for number, fused in enumerate(self._plain.fused):  # before the first wait, in whose shadow it costs nothing
            self._count(fused, fused.buffer, again=number > 0)
        self._record.sent += self._plain.sent
        with self._timed("wait_s"):
            self._plain.finish(summed=self._summed)

    def _count(self, fused: Fused, result: Tensor, *, again: bool = False) -> None:
        """Book a collective; one that Horovod joins with the last adds no messages."""
        workers = self.transport.workers
        received = bytes_received(fused, result, self.transport.worker, workers)
        self._record.count(fused, received, 0 if again else messages(fused, workers))

    def _launch(self, flight: _Flight) -> None:
        with self._timed("encode_s"):
            flight.fused = flight.run.fuse()
        if self._first_start is None and flight.fused:
            self._first_start = self.clock()
        prefix = f"{self.label}.{flight.run.bucket.index}.{flight.run.phase}"
        flight.waits = [self.transport.start(fused, f"{prefix}.{fused.key}") for fused in flight.fused]

    def _land(self, flight: _Flight) -> None:
        """Wait for a bucket's phase and launch the next."""
        if not flight.fused:
            return
        with self._timed("wait_s"):
            results = [wait() for wait in flight.waits]
        for fused, result in zip(flight.fused, results, strict=True):
            self._count(fused, result)
        with self._timed("decode_s"):
            flight.run.answer(flight.fused, results)
        self._launch(flight)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = self.clock()
        yield
        setattr(self._record, what, getattr(self._record, what) + self.clock() - began)


def _evidence(record: StepRecord, seconds: float, samples: float, told: Told) -> Evidence:
    return Evidence(
        record.step,
        lr=told.lr,
        next_lr=told.next_lr,
        loss=told.loss,
        seconds=seconds,
        compress_s=record.compress_s,
        exchange_s=record.exchange_s,
        wait_s=record.wait_s,
        samples=samples,
        bytes_sent=record.bytes_sent,
        bytes_dense=record.bytes_dense,
        fell_back=record.fell_back,
    )


def check_alike(transport: Transport, description: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Every worker's description, after a check that their ``"same"`` parts agree.

    Raises:
        ReplicaError: on every worker, naming the first difference.
    """
    everyone = transport.gather_objects(description, name)
    first = everyone[0]["same"]
    for worker, other in enumerate(everyone[1:], 1):
        for key in first:
            if other["same"].get(key) != first[key]:
                raise ReplicaError(
                    f"worker {worker} differs from worker 0 in {_difference(key, first[key], other['same'].get(key))}; "
                    "every worker must build the same model and optimizer"
                )
    return everyone


def _difference(key: str, left: Any, right: Any) -> str:
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return f"{key}: {right!r} instead of {left!r}"
    for name in [*left, *right]:
        if left.get(name) != right.get(name):
            return f"{key} {name!r}: {right.get(name, 'missing')!r} instead of {left.get(name, 'missing')!r}"
    return f"the order of {key}"
