"""The optimizer's exchange between workers that are threads of one process, without Horovod."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdcomp.assignment import Assignment
from hvdcomp.buckets import Spec
from hvdcomp.compressors import Compressor
from hvdcomp.coordinator import Coordinator
from hvdcomp.exchange import Exchange, LocalTransport, StepRecord
from hvdcomp.plugin import layout_of
from hvdcomp.rounds import Fused
from hvdcomp.schedules import Assigning, Schedule, Static
from hvdcomp.simulation import collective


class Board:
    """Where the workers of one world meet, by name."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._news = threading.Condition()
        self._given: dict[str, dict[int, Any]] = {}

    def meet(self, name: str, worker: int, value: Any) -> Callable[[], list[Any]]:
        """Leave a value without waiting; the returned call waits for everybody's."""
        with self._news:
            given = self._given.setdefault(name, {})
            assert worker not in given, f"worker {worker} uses the name {name} twice"
            given[worker] = value
            self._news.notify_all()

        def wait() -> list[Any]:
            with self._news:
                assert self._news.wait_for(lambda: len(given) == self.workers, timeout=20), (
                    f"{name}: a worker is missing"
                )
            return [given[worker] for worker in range(self.workers)]

        return wait


class ThreadTransport:
    """A transport and a channel over a board."""

    name = "threads"

    def __init__(self, board: Board, worker: int) -> None:
        self.board, self.worker, self.workers = board, worker, board.workers
        self.root = worker == 0
        self.names: list[str] = []
        self._calls = itertools.count()

    def start(self, fused: Fused, name: str) -> Callable[[], Tensor]:
        self.names.append(name)
        sent = replace(fused, buffer=fused.buffer.clone())  # others may read it after we have written the mean
        wait = self.board.meet(f"{name}.{self.names.count(name)}", self.worker, sent)
        return lambda: collective(wait())[self.worker].clone()

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        return self.board.meet(name, self.worker, value)()

    def sum_to_root(self, vector: np.ndarray) -> np.ndarray:
        return np.sum(self.board.meet(f"up.{next(self._calls)}", self.worker, vector.copy())(), axis=0)

    def from_root(self, vector: np.ndarray) -> np.ndarray:
        return self.board.meet(f"down.{next(self._calls)}", self.worker, vector.copy())()[0]


@dataclass
class GivenGradients:
    """Gradients in place of ``p.grad``: the mean is written over them."""

    tensors: dict[str, Tensor | None]
    in_place: bool = True
    means: dict[str, Tensor] = field(default_factory=dict)

    def read(self, spec: Spec) -> Tensor | None:
        return self.tensors.get(spec.name)

    def target(self, spec: Spec, dtype: torch.dtype) -> Tensor | None:
        own = self.tensors.get(spec.name)
        if not self.in_place or own is None or own.is_sparse or own.dtype != dtype or not own.is_contiguous():
            return None
        self.means[spec.name] = own
        return own.view(-1)

    def write(self, spec: Spec, mean: Tensor) -> None:
        self.means[spec.name] = mean if mean.is_sparse else mean.view(spec.shape).to(spec.dtype, copy=True)


class ExchangeWorld:
    """N workers' exchanges; ``sparse`` names travel as rows. With ``alone`` one worker has no transport at all."""

    def __init__(
        self,
        size: int,
        compressor: Compressor,
        grads: Mapping[str, Tensor],
        *,
        schedules: Sequence[Schedule] | None = None,
        cf_at: Callable[[int], float | None] = lambda step: None,
        alone: bool = False,
        sparse: Sequence[str] = (),
        **layout: Any,
    ) -> None:
        board = Board(size)
        self.transports = [ThreadTransport(board, worker) for worker in range(size)]
        specs = [Spec.of(name, gradient) for name, gradient in grads.items()]
        self.exchanges = []
        for worker, transport in enumerate(self.transports):
            schedule = Static() if schedules is None else schedules[worker]
            schedule.prepare(size)
            assigns = isinstance(schedule, Assigning)
            coordinator = Coordinator(schedule, transport) if schedule.adaptive and not assigns else None
            given: dict[str, Any] = {"granularity": "tensor", "bucket_mb": 25.0, "exclude": (), **layout}
            made = layout_of(schedule, compressor, **given)
            exchange = Exchange(
                made.buckets(specs, sparse=sparse), LocalTransport() if alone else transport, coordinator,
                label="hvdcomp.0", check_finite=any(method.checks_finite for method in made.methods), cf_at=cf_at,
                clock=lambda: 0.0,
            )  # fmt: skip
            if isinstance(schedule, Assigning):
                exchange.assignment = Assignment(schedule, made.settings, transport, exchange.buckets)
            self.exchanges.append(exchange)
        self.records: list[StepRecord] = []

    def step(
        self, grads: Sequence[Mapping[str, Tensor | None]], *, scale: float = 1.0, summed: bool = False
    ) -> list[dict[str, Tensor]]:
        """Every worker starts its buckets in an order of its own, as hooks do."""

        def work(worker: int) -> tuple[StepRecord, dict[str, Tensor]]:
            exchange = self.exchanges[worker]
            given = GivenGradients({n: None if g is None else g.clone() for n, g in grads[worker].items()})
            for bucket in exchange.buckets if worker % 2 else reversed(exchange.buckets):
                exchange.start(bucket, given, scale=scale, summed=summed)
            record = exchange.finish()
            if exchange.assignment is not None:
                exchange.conclude(record, math.nan, 1.0)
            return record, given.means

        with ThreadPoolExecutor(len(self.exchanges)) as pool:
            results = list(pool.map(work, range(len(self.exchanges))))
        self.records = [record for record, _ in results]
        return [means for _, means in results]
