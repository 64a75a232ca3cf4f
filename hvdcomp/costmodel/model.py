"""What a step takes: by our model, which plays a worker's timeline, or by the paper's formulas.

Ours differs from the paper's where that has faults: a latency is charged as it is measured; an allgather has one, too;
decoding grows with the workers; buckets are those that hvdcomp makes, each encoded when its last gradient has come and
sent while the backward pass goes on; what travels is the real wire format's bytes; workers may share nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hvdcomp.buckets import Layout, is_excluded
from hvdcomp.checks import check_choice, check_number
from hvdcomp.compressors import Compressor, NoCompression, create
from hvdcomp.costmodel import paper
from hvdcomp.costmodel.cluster import Cluster
from hvdcomp.costmodel.engine import Engine, Pending
from hvdcomp.costmodel.rates import Cost, Rates, rates_of
from hvdcomp.costmodel.traffic import BucketTraffic, Operation, Shapes, Work, specs_of, traffic

FORMULAS = ("ours", "paper")
DENSE = "dense"
"""Plain Horovod."""


@dataclass(frozen=True)
class Workload:
    """What a worker computes in a step.

    Attributes:
        shapes: of the trained tensors by name, in the order of the forward pass.
        backward_s: the backward pass alone, spread evenly over tensors of two and more dimensions.
        rest_s: everything else that is not exchange: data, forward pass, optimizer.
        granularity, bucket_mb, exclude: as in ``hvdcomp.DistributedOptimizer``.
    """

    shapes: Shapes
    backward_s: float
    rest_s: float = 0.0
    granularity: str = "tensor"
    bucket_mb: float = 25.0
    exclude: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_number("backward_s", self.backward_s, 0, hint="seconds of a backward pass")
        check_number("rest_s", self.rest_s, 0, hint="seconds of a step beside backward pass and exchange")

    @property
    def nbytes(self) -> int:
        """Of the float32 gradients."""
        return sum(spec.nbytes for spec in specs_of(self.shapes))

    def layout(self, method: Method) -> Layout:
        """As hvdcomp.DistributedOptimizer would lay it out. Raises ValueError where the method does not fit."""
        return Layout(method.compressor(), self.granularity, self.bucket_mb, self.exclude)

    def backward_parts(self) -> list[tuple[str, float]]:
        """Tensors in the order in which their gradients come, and what the backward pass takes for each."""
        matrices = max(1, sum(len(shape) > 1 for shape in self.shapes.values()))
        share_s = self.backward_s / matrices
        parts = [(name, share_s if len(shape) > 1 else 0.0) for name, shape in reversed(list(self.shapes.items()))]
        return parts if any(len(shape) > 1 for shape in self.shapes.values()) else [*parts, ("", self.backward_s)]


@dataclass(frozen=True)
class Method:
    """A compressor by name, or :data:`DENSE`; ``hierarchical`` averages densely inside nodes first."""

    name: str
    params: tuple[tuple[str, Any], ...] = ()
    hierarchical: bool = False

    @classmethod
    def of(cls, name: str, params: Mapping[str, Any] | None = None, hierarchical: bool = False) -> Method:
        return cls(name, tuple((params or {}).items()), hierarchical)

    def compressor(self) -> Compressor:
        """Raises ValueError for a name or a parameter that there is not."""
        return create(self.name, **dict(self.params))

    def __str__(self) -> str:
        parameters = ", ".join(f"{key}={value}" for key, value in self.params)
        return self.name + f" ({parameters})" * bool(parameters) + ", hierarchical" * self.hierarchical


@dataclass(frozen=True)
class Prediction:
    """What a step is predicted to take, in seconds, and to send.

    Attributes:
        step_s: all of it.
        compute_s: backward pass, slowed down as far as operations overlap with it, and the rest.
        encode_s, decode_s: of compression.
        wait_s: in which the worker only waits.
        nbytes: handed to collectives by one worker.
    """

    step_s: float
    compute_s: float
    encode_s: float
    decode_s: float
    wait_s: float
    nbytes: int


def predict(
    workload: Workload, cluster: Cluster, method: Method, rates: Mapping[str, Rates], model: str = "ours"
) -> Prediction:
    """One step of one method.

    Args:
        rates: what methods cost on the workers' device, see :mod:`hvdcomp.costmodel.rates`.

    Raises:
        ValueError: there is no such model or method, or the method has no nodes to average in.
        UnknownRates: what the method costs on this device is not known.
    """
    if check_choice("model", model, FORMULAS) == "paper":
        return _paper_step(workload, cluster, method, rates)
    if cluster.workers == 1:
        compute_s = workload.backward_s + workload.rest_s
        return Prediction(compute_s, compute_s, 0.0, 0.0, 0.0, 0)
    worker = _Worker(workload, cluster)
    if method.name in (DENSE, NoCompression.name) and not method.hierarchical:
        return worker.dense()
    if not method.hierarchical:
        return worker.compressed(_buckets(method, workload, cluster.workers), _Codec.of(rates, method))
    if cluster.per_node == 1 or cluster.nodes == 1:
        raise ValueError("a hierarchical exchange needs several nodes of several workers each")
    return worker.hierarchical(_buckets(method, workload, cluster.nodes), _Codec.of(rates, method))


def _buckets(method: Method, workload: Workload, workers: int) -> tuple[BucketTraffic, ...]:
    shapes = tuple((name, tuple(shape)) for name, shape in workload.shapes.items())
    return _traffic(method, shapes, workload.granularity, workload.bucket_mb, workload.exclude, workers)


@lru_cache(maxsize=4096)
def _traffic(
    method: Method,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    granularity: str,
    bucket_mb: float,
    exclude: tuple[str, ...] | None,
    workers: int,
) -> tuple[BucketTraffic, ...]:
    """Found once: sweeps and intervals ask for it again and again."""
    return tuple(traffic(Layout(method.compressor(), granularity, bucket_mb, exclude), dict(shapes), workers))


@dataclass(frozen=True)
class _Codec:
    """Seconds of encoding and decoding a bucket."""

    compressed: Rates
    plain: Rates

    @classmethod
    def of(cls, rates: Mapping[str, Rates], method: Method) -> _Codec:
        plain = rates.get("none", Rates())
        in_place = Rates(
            plain.encode, Cost(unit_s=plain.decode.unit_s)
        )  # the mean of what is not compressed is written there
        compressed = in_place if method.name == "none" else rates_of(rates, method.name, dict(method.params))
        return cls(compressed, in_place)

    def encode_s(self, bucket: BucketTraffic) -> float:
        return self.compressed.encode.seconds(bucket.encode) + self.plain.encode.seconds(bucket.plain)

    def decode_s(self, bucket: BucketTraffic) -> float:
        return self.compressed.decode.seconds(bucket.decode) + self.plain.decode.seconds(bucket.plain)


class _Worker:
    """A worker's timeline; all workers have the same."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload = workload
        self._cluster = cluster
        self._engine = Engine(cluster.cycle_s, cluster.memory_bandwidth, cluster.busy_factor)
        self._now_s = 0.0
        self._compute_s = self._encode_s = self._decode_s = self._wait_s = 0.0
        self._nbytes = 0
        self._busy_until_s = 0.0

    def dense(self) -> Prediction:
        """Plain Horovod, and "none": every tensor by itself as its gradient comes; Horovod fuses those of a cycle."""
        nbytes = {spec.name: spec.nbytes for spec in specs_of(self._workload.shapes)}
        pending = []
        for name, seconds in self._workload.backward_parts():
            self._compute(seconds)
            if name:
                pending.append(self._submit(self._cluster, Operation("allreduce", nbytes[name])))
        self._wait(pending)
        return self._outcome()

    def compressed(self, buckets: Sequence[BucketTraffic], codec: _Codec) -> Prediction:
        """hvdcomp: a bucket is encoded and sent with its last gradient, and gone on with after the backward pass."""
        flights = [_Flight(bucket) for bucket in buckets]
        for flight in self._backward(flights):
            self._encode(codec.encode_s(flight.bucket) / max(1, len(flight.bucket.phases)))
            self._launch(flight, self._cluster)
        self._finish(flights, self._cluster, codec)
        return self._outcome()

    def hierarchical(self, buckets: Sequence[BucketTraffic], codec: _Codec) -> Prediction:
        """Up inside the node, with the backward pass; between the nodes; down again."""
        inside, between = self._cluster.within(), self._cluster.between()
        nbytes = {spec.name: spec.nbytes for spec in specs_of(self._workload.shapes)}
        flights = [_Flight(bucket) for bucket in buckets]
        whole = {id(flight): sum(nbytes[name] for name in flight.bucket.members) for flight in flights}
        up = [self._submit(inside, Operation("allreduce", whole[id(flight)])) for flight in self._backward(flights)]
        self._wait(up)
        for flight in flights:
            self._encode(codec.encode_s(flight.bucket) / max(1, len(flight.bucket.phases)))
            self._launch(flight, between)
        self._finish(flights, between, codec)
        self._wait([self._submit(inside, Operation("broadcast", whole[id(flight)])) for flight in flights])
        return self._outcome()

    def _backward(self, flights: Sequence[_Flight]) -> Iterator[_Flight]:
        """The backward pass; yields each bucket when its last gradient has come."""
        missing = {id(flight): len(flight.bucket.members) for flight in flights}
        of_tensor = {name: flight for flight in flights for name in flight.bucket.members}
        for name, seconds in self._workload.backward_parts():
            self._compute(seconds)
            if name in of_tensor:
                self._work(self._cluster.tensor_s)
                flight = of_tensor[name]
                missing[id(flight)] -= 1
                if not missing[id(flight)]:
                    yield flight

    def _finish(self, flights: Sequence[_Flight], cluster: Cluster, codec: _Codec) -> None:
        """All phases of all buckets, then what they come to."""
        while any(flight.pending for flight in flights):
            for flight in flights:
                if flight.pending:
                    self._wait(flight.pending)
                    flight.phase += 1
                    if flight.phase < len(flight.bucket.phases):
                        self._encode(codec.encode_s(flight.bucket) / len(flight.bucket.phases))
                    self._launch(flight, cluster)
        for flight in flights:
            seconds = codec.decode_s(flight.bucket)
            self._decode_s += seconds
            self._work(seconds)

    def _launch(self, flight: _Flight, cluster: Cluster) -> None:
        phases = flight.bucket.phases
        operations = phases[flight.phase] if flight.phase < len(phases) else ()
        flight.pending = [self._submit(cluster, operation) for operation in operations]

    def _submit(self, cluster: Cluster, operation: Operation) -> Pending:
        self._work(self._cluster.tensor_s)
        self._nbytes += operation.nbytes
        began_s = max(self._busy_until_s, self._now_s + self._cluster.cycle_s / 2)
        self._busy_until_s = began_s + cluster.operation_s(operation)
        return self._engine.submit(self._now_s, cluster, operation)

    def _compute(self, seconds: float) -> None:
        seconds = self._slowed(seconds)
        self._compute_s += seconds
        self._work(seconds)

    def _encode(self, seconds: float) -> None:
        seconds = self._slowed(seconds)
        self._encode_s += seconds
        self._work(seconds)

    def _work(self, seconds: float) -> None:
        self._engine.computes(self._now_s, self._now_s + seconds)
        self._now_s += seconds

    def _slowed(self, seconds: float) -> float:
        """What work takes that begins now: gamma times as long for as long as operations on their way take alone."""
        busy_s, gamma = max(0.0, self._busy_until_s - self._now_s), self._cluster.gamma
        return gamma * seconds if gamma * seconds <= busy_s else seconds + busy_s * (1 - 1 / gamma)

    def _wait(self, pending: Sequence[Pending]) -> None:
        until_s = max((self._engine.end_of(one) for one in pending), default=0.0)
        self._wait_s += max(0.0, until_s - self._now_s)
        self._now_s = max(self._now_s, until_s)

    def _outcome(self) -> Prediction:
        rest_s = self._workload.rest_s
        return Prediction(
            self._now_s + rest_s, self._compute_s + rest_s, self._encode_s, self._decode_s, self._wait_s, self._nbytes
        )


@dataclass
class _Flight:
    """A bucket under way."""

    bucket: BucketTraffic
    phase: int = 0
    pending: list[Pending] = field(default_factory=list)


def _paper_step(workload: Workload, cluster: Cluster, method: Method, rates: Mapping[str, Rates]) -> Prediction:
    """The same by the paper's formulas: all bytes by bound, one bucket, no growth of decoding, no nodes."""
    workers, network = cluster.workers, cluster.network
    if method.name == DENSE:
        step_s = paper.dense_step_s(workload.nbytes, workers, network, workload.backward_s, gamma=cluster.gamma)
        codec_s, nbytes = 0.0, workload.nbytes
    else:
        layout = workload.layout(method)
        specs = [spec for spec in specs_of(workload.shapes) if not is_excluded(spec, layout.excluded)]
        volumes = [volume for spec in specs for volume in layout.compressor.requests(spec.shape, workers)]
        known = rates_of(rates, method.name, dict(method.params))
        nbytes = sum(volume.nbytes for volume in volumes)
        work = Work(len(specs), sum(spec.numel for spec in specs), nbytes)
        codec_s = known.encode.seconds(work) + known.decode.seconds(work)
        step_s = paper.compressed_step_s(volumes, workers, network, workload.backward_s, codec_s)
    compute_s = workload.backward_s + workload.rest_s
    step_s += workload.rest_s
    wait_s = max(0.0, step_s - compute_s - codec_s)
    return Prediction(step_s, compute_s, codec_s, 0.0, wait_s, nbytes)
