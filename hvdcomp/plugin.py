"""Horovod's own ``Compression`` interface, in both directions: its compressors in ours, ours in its optimizer."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.assignment import compressors_of
from hvdcomp.buckets import Layout, Spec
from hvdcomp.compressors import FP16, Compressor, NoCompression, OkTopK, TopK, create
from hvdcomp.compressors.requests import Allreduce, Dense, Rounds, Unit, Volume
from hvdcomp.exchange import Exchange, HorovodTransport
from hvdcomp.horovod_api import horovod, initialised_horovod, label_of
from hvdcomp.kernels import warm_up
from hvdcomp.schedules import Assigning, Schedule, Static
from hvdcomp.schedules import create as create_schedule

_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


AUTO = "auto"
"""What a user who leaves the choice to us gives as ``compression=``."""
_AUTO_CF = 100.0
_AUTO_SHAPE = (1024, 1024)
"""Of a tensor for which volumes are compared."""


def automatic(workers: int) -> Compressor:
    """Of the exchanges of the largest elements the one that moves the fewest bytes with so many workers."""
    candidates = [TopK(_AUTO_CF), OkTopK(_AUTO_CF)]
    return min(candidates, key=lambda method: volume(method.requests(_AUTO_SHAPE, workers), workers))


def volume(requests: Sequence[Volume], workers: int) -> float:
    """Bytes that one worker sends and receives, where collectives go round a ring."""
    others, share = workers - 1, (workers - 1) / workers
    passes = {"allreduce": 4 * share, "allgather": 2 * others, "alltoall": 2 * share, "broadcast": 2}
    return sum(request.nbytes * passes[request.kind] for request in requests)


def as_compressor(compression: Any, workers: int) -> Compressor:
    """What a user may give as ``compression=``, as a compressor.

    Raises:
        ValueError: it is none of: a compressor, a name, or Horovod's interface.
    """
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, str):
        return automatic(workers) if compression == AUTO else create(compression)
    stock = horovod().Compression
    if compression is stock.none:
        return NoCompression()
    if compression is stock.fp16:
        return FP16()
    if isinstance(compression, BoundCompression):
        raise ValueError(
            "bind() is for Horovod's own optimizer; give hvdcomp.DistributedOptimizer the compressor itself"
        )
    is_class_of_ours = isinstance(compression, type) and issubclass(compression, Compressor)
    if not is_class_of_ours and callable(getattr(compression, "compress", None)):
        return HorovodCompression(compression)
    raise ValueError(
        f"compression must be a compressor such as hvdcomp.TopK(cf=100), a name such as 'topk', or one of Horovod's "
        f"Compression.*, got {compression!r}"
    )


def as_schedule(schedule: Schedule | str | None, compressor: Compressor) -> tuple[Schedule, Compressor]:
    """The schedule as an object, and the compressor as it is used under it.

    Raises:
        ValueError: it is no schedule, or chooses a factor that the compressor does not have.
    """
    chosen = Static() if schedule is None else create_schedule(schedule) if isinstance(schedule, str) else schedule
    if not isinstance(chosen, Schedule):
        raise ValueError(f"schedule must be a name or a hvdcomp.schedules.Schedule, got {schedule!r}")
    if isinstance(chosen, Assigning):
        return chosen, compressor
    if (chosen.adaptive or chosen.cf_at(0) is not None) and not compressor.takes_factors:
        raise ValueError(
            f"schedule {chosen.name!r} chooses a compression factor, which {compressor.name!r} does not have; "
            "use a sparse method such as topk, or powersgd, or leave the schedule out"
        )
    if chosen.adaptive and not chosen.exact and not compressor.has_levels:
        raise ValueError(
            f"schedule {chosen.name!r} with exact=False estimates the gain of the largest elements, which is not what "
            f"{compressor.name!r} sends: use exact=True, or a sparse method such as topk"
        )
    return chosen, compressor.as_selector() if chosen.adaptive else compressor


def layout_of(
    schedule: Schedule, compressor: Compressor, granularity: str, bucket_mb: float, exclude: Sequence[str] | None
) -> Layout:
    """How tensors become units and buckets under a schedule. Raises ValueError where something does not fit."""
    if not isinstance(schedule, Assigning):
        return Layout(compressor, granularity, bucket_mb, exclude)
    settings = compressors_of(schedule, compressor)
    return Layout(compressor, granularity, bucket_mb, exclude, settings=settings, first=schedule.first)


def cf_in_force(schedule: Schedule, compressor: Compressor, step: int) -> float | None:
    """The factor of a step that is not decided on: the schedule's, else the compressor's own; None if it has none.

    None, too, where units have settings of their own.
    """
    if isinstance(schedule, Assigning):
        return None
    cf = schedule.cf_at(step)
    own = getattr(compressor, "cf", None) if compressor.has_levels else None
    return own if cf is None else cf


def check_op(hvd: Any, compressor: Compressor, op: Any) -> None:
    """Raise a ValueError where a compressor does not fit a reduction."""
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise ValueError(f"op must be hvd.Average, hvd.Sum or hvd.Adasum, got {op!r}")
    if op == hvd.Adasum and not isinstance(compressor, NoCompression):
        raise ValueError(
            f"op=hvd.Adasum does not fit {compressor!r}: Adasum combines dense gradients itself; "
            "use op=hvd.Average or hvd.Sum, or compression='none'"
        )


class HorovodCompression(Compressor):
    """A compressor written for Horovod's interface: what its ``compress`` returns is averaged by allreduce."""

    name: ClassVar[str] = "horovod"
    collective: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "horovod.torch.compression.Compressor"
    default_exclude: ClassVar[tuple[str, ...]] = ()
    checks_finite: ClassVar[bool] = False

    def __init__(self, compression: Any) -> None:
        self.compression = compression

    def __repr__(self) -> str:
        """Alike in every process, which the object's own might not be: it may hold an address."""
        kind = self.compression if isinstance(self.compression, type) else type(self.compression)
        return f"{type(self).__name__}({kind.__module__}.{kind.__qualname__})"

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        payload, ctx = self.compress(acc.view(unit.shape))
        mean = yield Allreduce(payload)
        return Dense(self.decompress(mean, ctx))

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        payload, _ = self.compress(torch.zeros(shape))
        return [Volume(0, "allreduce", payload.numel() * payload.element_size())]

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        payload, ctx = self.compression.compress(tensor)
        return payload, ctx

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        tensor: Tensor = self.compression.decompress(payload, ctx)
        return tensor


class BoundCompression:
    """A compressor for Horovod's own optimizer, one tensor at a time; see :meth:`Compressor.bind`.

    ``compress`` starts a tensor's own exchange and gives Horovod a carrier of one element to allreduce; the first
    ``decompress`` completes all that are under way. Horovod hands over nothing but the tensor, so that a gradient is
    known by being some parameter's ``grad``. A step with a NaN or an Inf leaves the residuals alone and gives NaN.
    """

    def __init__(
        self, compressor: Compressor, named_parameters: Iterable[tuple[str, Tensor]], *, op: Any, process_set: Any
    ) -> None:
        hvd = initialised_horovod()
        op = hvd.Average if op is None else op
        check_op(hvd, compressor, op)
        self._summed = op == hvd.Sum
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        specs = [Spec.of(name, parameter) for name, parameter in self._parameters.items()]
        layout = Layout(compressor)
        if layout.compresses:
            warm_up()
        self._buckets = {
            bucket.members[0].name: bucket for bucket in layout.buckets(specs, groups=[[spec.name] for spec in specs])
        }
        process_set = hvd.global_process_set if process_set is None else process_set
        transport = HorovodTransport(hvd, process_set)
        self._exchange = Exchange(
            list(self._buckets.values()),
            transport,
            None,
            label=label_of(_numbers, "hvdcomp.bound", process_set),
            check_finite=compressor.checks_finite,
            cf_at=partial(cf_in_force, Static(), compressor),
            clock=_no_clock,
        )
        self._means: dict[str, Tensor] = {}

    def compress(self, tensor: Tensor) -> tuple[Tensor, str]:
        """Start the exchange of a gradient.

        Raises:
            ValueError: the tensor is no gradient of the bound parameters.
        """
        name = self._name_of(tensor)
        self._exchange.start(self._buckets[name], self, summed=self._summed)
        return torch.zeros(1, device=tensor.device), name

    def decompress(self, carrier: Tensor, name: str) -> Tensor:
        """The mean gradient."""
        if self._exchange.under_way and self._exchange.finish().skipped:
            self._means = {name: torch.full_like(p, torch.nan) for name, p in self._parameters.items()}
        return self._means.pop(name)

    def read(self, spec: Spec) -> Tensor | None:
        gradient = self._parameters[spec.name].grad
        return None if gradient is None else gradient.detach()

    def target(self, spec: Spec, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, spec: Spec, mean: Tensor) -> None:
        self._means[spec.name] = mean.view(spec.shape).to(spec.dtype)

    def _name_of(self, tensor: Tensor) -> str:
        for name, parameter in self._parameters.items():
            if parameter.grad is tensor:
                return name
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is no gradient of the parameters that this compression was bound "
            "to (sparse_as_dense=True and parameters added later do not work here): use hvdcomp.DistributedOptimizer"
        )


def _no_clock() -> float:
    return 0.0


__all__ = [
    "BoundCompression",
    "HorovodCompression",
    "as_compressor",
    "as_schedule",
    "cf_in_force",
    "check_op",
    "layout_of",
]
