"""What a cluster is to the model: its links, its workers, and what Horovod costs beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdcomp.checks import check_count, check_number
from hvdcomp.costmodel.collectives import Network, collective_s
from hvdcomp.costmodel.traffic import Operation

CYCLE_S = 1e-3
"""Horovod looks for new operations once in so many seconds (``HOROVOD_CYCLE_TIME``)."""
FUSION_NBYTES = 128 * 2**20
"""Operations of one cycle travel together up to so many bytes (``HOROVOD_FUSION_THRESHOLD``)."""
TENSOR_S = 50e-6
"""A worker's work for an operation: a hook, Python, Horovod's queues."""
MEMORY_BANDWIDTH = 19e9
"""Bytes/s of a copy, read or written: a fusion buffer is filled and emptied."""


HALVES = "allreduce of float16"
"""A curve of its own: CPUs convert each number to add it."""
_LARGEST = 3
_LEAST_SLOPE_S = 1e-15
"""Of a byte: times that do not grow with their sizes, on a busy machine, stand for a network beyond all there are."""


@dataclass(frozen=True)
class Curve:
    """Measured seconds of a collective by its bytes, in a world of so many workers.

    Between points it is linear; below the first the first's time, beyond the last the last two points' line goes on.
    """

    workers: int
    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_count("workers", self.workers, 2, hint="in whose world the curve was measured")
        if len(self.nbytes) < 2 or len(self.nbytes) != len(self.seconds):
            raise ValueError(
                f"a curve needs two points or more, got {len(self.nbytes)} sizes, {len(self.seconds)} times"
            )
        if list(self.nbytes) != sorted(set(self.nbytes)) or not all(s > 0 for s in self.seconds):
            raise ValueError("a curve's sizes must ascend and its times be > 0")

    def scaled(self, factor: float) -> Curve:
        """So many times the seconds."""
        return replace(self, seconds=tuple(factor * second for second in self.seconds))

    def at(self, nbytes: float) -> float:
        """Seconds of so many bytes."""
        if nbytes <= self.nbytes[0]:
            return self.seconds[0]
        right = min(bisect_left(self.nbytes, nbytes), len(self.nbytes) - 1)
        (x0, y0), (x1, y1) = ((self.nbytes[i], self.seconds[i]) for i in (right - 1, right))
        slope = max(0.0, y1 - y0) / (x1 - x0)
        return y0 + slope * (nbytes - x0)


@dataclass(frozen=True)
class Cluster:
    """Workers and what joins them.

    Attributes:
        workers: all of them, >= 1.
        network: a worker's link, or a node's where several workers share one.
        curves: what was measured, by kind of collective, and :data:`HALVES`; where there is a curve, a formula only
            converts it to another number of workers. It holds the latencies, but not the wait for Horovod's cycle.
        gamma: by how much communication slows down a worker's own work while it is under way, >= 1.
        busy_factor: how many times as long a collective takes while its workers compute, >= 1: on CPUs whose cores
            computation and communication share.
        cycle_s: of Horovod's cycle.
        tensor_s: a worker's work for a tensor: a hook, Python, Horovod's queues.
        memory_bandwidth: bytes/s of a copy.
        per_node: workers of a node.
        inside: the link between the workers of a node.
    """

    workers: int
    network: Network
    curves: Mapping[str, Curve] = field(default_factory=dict)
    gamma: float = 1.04
    busy_factor: float = 1.0
    cycle_s: float = CYCLE_S
    tensor_s: float = TENSOR_S
    memory_bandwidth: float = MEMORY_BANDWIDTH
    per_node: int = 1
    inside: Network | None = None

    def __post_init__(self) -> None:
        check_count("workers", self.workers, hint="all workers of the job")
        check_count("workers of a node", self.per_node, hint="1 where each has a link of its own")
        check_number("gamma", self.gamma, 1, hint="slow-down of a backward pass by communication; 1.04 to 1.1 on GPUs")
        check_number("busy_factor", self.busy_factor, 1, hint="slow-down of collectives by computation; 1 on GPUs")
        check_number("cycle_s", self.cycle_s, 0, hint="seconds; HOROVOD_CYCLE_TIME / 1000")
        if self.workers % self.per_node:
            raise ValueError(f"{self.workers} workers cannot be {self.per_node} on every node: give a multiple")

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node

    def on(self, network: Network) -> Cluster:
        """The same workers on another network, of whose collectives nothing was measured."""
        return replace(self, network=network, curves={}, busy_factor=1.0)

    def between(self) -> Cluster:
        """One worker of each node."""
        return replace(self, workers=self.nodes, per_node=1)

    def within(self) -> Cluster:
        """The workers of one node."""
        return replace(self, workers=self.per_node, network=self.inside or self.network, curves={}, per_node=1)

    def operation_s(self, operation: Operation) -> float:
        """Seconds of a collective between all workers, its wait for a cycle apart."""
        kind, nbytes = operation.kind, operation.nbytes
        by_formula = collective_s(kind, nbytes, self.workers, self.network)
        curve = self.curves.get(HALVES if operation.halves else kind, self.curves.get(kind))
        if curve is None or self.workers == 1:
            return by_formula
        measured = curve.at(nbytes)
        if curve.workers == self.workers:
            return measured
        return measured * by_formula / collective_s(kind, nbytes, curve.workers, self.network)


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept (s) and slope (s/byte), neither below zero, of lines whose relative errors are the least.

    The intercept is that of all sizes, which the small ones settle; the slope that of the largest :data:`_LARGEST`: a
    switch's buffers and MPI's protocols let small messages travel faster than the link can go on.
    """
    return _line(nbytes, seconds)[0], _line(nbytes[-_LARGEST:], seconds[-_LARGEST:])[1]


def _line(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    import numpy as np
    from scipy.optimize import nnls

    sizes, times = np.asarray(nbytes, float), np.asarray(seconds, float)
    scale = sizes.max()
    (intercept, slope), _ = nnls(np.stack([1 / times, sizes / scale / times], axis=1), np.ones(len(times)))
    return float(intercept), float(slope / scale)


def network_of(kind: str, workers: int, intercept_s: float, slope_s: float) -> Network:
    """The network on which a collective's formula is this line; the inverse of the formula in both of its terms.

    The paper divides an allreduce's intercept by p - 1 but charges it 2 (p - 1) times; here both are 2 (p - 1).
    """
    messages = collective_s(kind, 0, workers, Network(1.0, 1.0))
    bits = collective_s(kind, 1, workers, Network(1.0, 0.0))
    return Network(bits / max(slope_s, _LEAST_SLOPE_S), intercept_s / messages)
