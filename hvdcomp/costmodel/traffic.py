"""What a step sends, bucket by bucket: kinds and bytes of operations, from what compressors say themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdcomp.buckets import LARGE, Bucket, Layout, Spec
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.requests import Volume
from hvdcomp.wire import frame_nbytes

Shapes = Mapping[str, Sequence[int]]
"""Of the trained tensors by name, in the order of the forward pass."""


@dataclass(frozen=True)
class Operation:
    """A collective: what one worker hands over; ``halves`` as of :class:`Volume`."""

    kind: str
    nbytes: int
    halves: bool = False


@dataclass(frozen=True)
class Work:
    """What encoding or decoding has to do."""

    units: int = 0
    elements: int = 0
    nbytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.units + other.units, self.elements + other.elements, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class BucketTraffic:
    """A bucket's step.

    Attributes:
        members: names of its tensors.
        phases: the operations of each phase; one starts when the bucket's last phase has been answered.
        encode, decode: work for the units that are compressed.
        plain: work for those that are not.
    """

    members: frozenset[str]
    phases: tuple[tuple[Operation, ...], ...]
    encode: Work
    decode: Work
    plain: Work

    @property
    def nbytes(self) -> int:
        """Handed to collectives by one worker."""
        return sum(operation.nbytes for phase in self.phases for operation in phase)


def specs_of(shapes: Shapes) -> list[Spec]:
    """float32 tensors of these shapes."""
    return [Spec(name, torch.Size(shape), torch.float32, torch.device("meta")) for name, shape in shapes.items()]


def traffic(layout: Layout, shapes: Shapes, workers: int) -> list[BucketTraffic]:
    """What each bucket of a layout sends, in a world of so many workers."""
    return [_of_bucket(bucket, workers) for bucket in layout.buckets(specs_of(shapes))]


def payload_nbytes(layout: Layout, shapes: Shapes, workers: int) -> int:
    """Handed to collectives in a step by one worker."""
    return sum(bucket.nbytes for bucket in traffic(layout, shapes, workers))


def work_of(compressor: Compressor, shape: Sequence[int], workers: int) -> tuple[Work, Work]:
    """What encoding and decoding one tensor has to do: where answers grow with the workers, decoding reads them all."""
    asked = compressor.expected_requests(torch.Size(shape), workers)
    numel = torch.Size(shape).numel()
    sent = sum(volume.nbytes for volume in asked)
    read = sum(volume.nbytes * (workers if volume.kind == "allgather" else 1) for volume in asked)
    return Work(1, numel, sent), Work(1, numel, read)


def _of_bucket(bucket: Bucket, workers: int) -> BucketTraffic:
    volumes = [part.compressor.expected_requests(part.unit.shape, workers) for part in bucket.parts]
    encode = decode = plain = Work()
    for part in bucket.parts:
        first, last = work_of(part.compressor, part.unit.shape, workers)
        if part.compressed:
            encode += first
            decode += last
        else:
            plain += first
    names = frozenset(member.name for member in bucket.members)
    return BucketTraffic(names, _phases(volumes), encode, decode, plain)


def _phases(volumes: Iterable[list[Volume]]) -> tuple[tuple[Operation, ...], ...]:
    """Requests of one phase and kind travel together; those to reduce or broadcast that are large, by themselves."""
    together: defaultdict[int, defaultdict[tuple[str, bool], list[int]]] = defaultdict(lambda: defaultdict(list))
    alone: defaultdict[int, list[Operation]] = defaultdict(list)
    for asked in volumes:
        for volume in asked:
            if volume.kind in ("allreduce", "broadcast") and volume.nbytes >= LARGE:
                alone[volume.phase].append(Operation(volume.kind, volume.nbytes, volume.halves))
            else:
                together[volume.phase][volume.kind, volume.halves].append(volume.nbytes)
    last = max([*together, *alone], default=-1)
    return tuple(
        (*alone[phase], *(Operation(k, _joined(k, sizes), halves) for (k, halves), sizes in together[phase].items()))
        for phase in range(last + 1)
    )


def _joined(kind: str, sizes: list[int]) -> int:
    return frame_nbytes(sizes) if kind == "allgather" else sum(sizes)
