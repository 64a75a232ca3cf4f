"""Ok-Topk: a sparse reduce-scatter, then an allgather, so that a worker moves as much in a world of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_choice
from hvdcomp.compressors.randomk import shared_seed
from hvdcomp.compressors.requests import Allgather, Alltoallv, Rounds, SharedSparse, Unit, Volume
from hvdcomp.compressors.sparsifier import Sparsifier, largest_of
from hvdcomp.errors import WireError
from hvdcomp.kernels import Collected, add_mean_, among, clear_, largest
from hvdcomp.wire import (
    ALIGNMENT,
    HEADER_NBYTES,
    VALUE_TYPES,
    check_indexable,
    decode_sparse,
    encode_sparse,
    expected_sparse_nbytes,
    largest_sparse_nbytes,
)


class OkTopK(Sparsifier):
    """Each worker's k largest elements go to the workers that own their positions, who return about k sums in all.

    A worker sends its k = max(1, floor(numel / cf)) elements to their owners, by alltoall. An owner adds up what it
    got and accepts the positions of the ceil(k / workers) largest sums, of all where there are fewer; the means there
    go to everybody, by allgather. So at most k + workers - 1 elements change in a step, and a worker sends and receives
    about 3 k positions with values (6 k numbers) in a world of any size: 2 k (1 - 1/workers) arrive, k leave.

    Ok-Topk cuts the positions into ranges, which it moves now and then to where the elements are. Here a hash deals
    them out (:class:`Deal`): that needs no round and no state, divides a cluster evenly, and makes the sums that an
    owner compares a random sample of all.

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all, by allreduce.
        values: type of the values on the wire, both ways: "fp32", "fp16", "bf16" or "int8"; what is rounded off stays
            behind, that of a mean in the residual of its owner.
        error_feedback: keep what was not sent or not accepted for the next step; without it that is lost, and what is
            accepted is not scaled to make up for it.
    """

    name: ClassVar[str] = "oktopk"
    collective: ClassVar[str] = "alltoall"
    source: ClassVar[str] = "Li and Hoefler 2022"

    def __init__(self, cf: float = 100.0, values: str = "fp32", error_feedback: bool = True) -> None:
        super().__init__(cf, error_feedback)
        self.values = check_choice("type of values", values, VALUE_TYPES)

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        return largest_of(values, k, unit, level)

    def searched(self, k: int) -> int:
        return k

    def send(self, kept: Collected, acc: Tensor, unit: Unit) -> Rounds:
        check_indexable(unit.numel)
        deal = Deal.of(unit)
        payloads = [self._encoded(part, deal) for part in deal.split(kept)]
        arrived = yield Alltoallv(payloads)
        sums = [decode_sparse(payload, deal.groups) for payload in arrived]
        means = largest_means(sums, _share(kept.positions.numel(), unit.workers), acc.new_zeros(deal.groups))
        answers = yield Allgather(self._encoded(means, deal))
        accepted = [decode_sparse(answer, deal.groups) for answer in answers]
        positions, values = deal.joined(accepted)
        sent, rounded = kept, None
        if self.values != "fp32":
            sent = Collected(*deal.joined([decode_sparse(payload, deal.groups) for payload in payloads]))
            own = positions.split([part.positions.numel() for part in accepted])[unit.worker]
            rounded = Collected(own, (means.values - accepted[unit.worker].values) * unit.workers)
        return Accepted(positions, values, taken=_at(sent, positions, unit.numel), rounded=rounded)

    def sparse_requests(self, kept: int, workers: int) -> list[Volume]:
        """The first bound holds however the elements are divided: beside a header a payload may be padded."""
        first = largest_sparse_nbytes(kept, self.values) + (workers - 1) * (HEADER_NBYTES + ALIGNMENT)
        return [
            Volume(0, "alltoall", first),
            Volume(1, "allgather", largest_sparse_nbytes(_share(kept, workers), self.values)),
        ]

    def expected_sparse_requests(self, kept: int, numel: int, workers: int) -> list[Volume]:
        share = expected_sparse_nbytes(_share(kept, workers), _share(numel, workers), self.values)
        return [Volume(0, "alltoall", workers * share), Volume(1, "allgather", share)]

    def _encoded(self, part: Collected, deal: Deal) -> Tensor:
        return encode_sparse(part.positions, part.values, deal.groups, self.values)


@dataclass
class Accepted(SharedSparse):
    """All workers accepted the same ``indices``, where some sent something; ``values`` is the mean there."""

    taken: Collected = field(kw_only=True)
    """What of this worker's own is in the mean."""
    rounded: Collected | None = field(kw_only=True)
    """What the means that this worker sent lost on their way, times the workers; None where values travel as they are.

    In one worker's residual it makes up for all: the mean of the residuals then has what the mean lacks.
    """

    def settle_(self, acc: Tensor) -> None:
        if self.rounded is None:
            clear_(acc, self.taken.positions)
        else:
            acc.index_add_(0, self.taken.positions, self.taken.values.to(acc.dtype), alpha=-1)
            acc.index_add_(0, self.rounded.positions, self.rounded.values.to(acc.dtype))


@dataclass(frozen=True)
class Deal:
    """Which worker owns which position: of each group of neighbours, as many as there are workers, everyone owns one.

    Whose is which is turned from group to group by a hash, another one for each step and tensor. An owner knows its
    positions by their group, so that they are numbers below :attr:`groups`.

    Where workers select k each, an owner gets k elements in expectation whatever they are, and more than k + t with a
    probability of at most workers * k / t^2: the hash is pairwise independent (multiply-add-shift, Dietzfelbinger
    1996), and k positions that all workers select are the worst case. A row of neighbours is divided evenly.
    """

    numel: int
    workers: int
    factor: int
    offset: int

    @classmethod
    def of(cls, unit: Unit) -> Deal:
        factor, offset = (shared_seed(unit.step, unit.name, which) - 2**63 for which in ("factor", "offset"))
        return cls(unit.numel, unit.workers, factor, offset)

    @property
    def groups(self) -> int:
        return _share(self.numel, self.workers)

    def split(self, kept: Collected) -> list[Collected]:
        """Elements of the tensor by their owner, each by its group."""
        positions = kept.positions.long()
        groups = positions // self.workers
        owners = ((positions + self._turns(groups)) % self.workers).to(torch.int16)
        order = owners.argsort(stable=True)
        counts = owners.bincount(minlength=self.workers).tolist()
        found = groups.to(torch.int32)[order].split(counts), kept.values[order].split(counts)
        return [Collected(part, values) for part, values in zip(*found, strict=True)]

    def joined(self, parts: Sequence[Collected]) -> tuple[Tensor, Tensor]:
        """Positions in the tensor, int64, and values of the elements of every owner, by its groups.

        Raises:
            WireError: a position is beyond the tensor, as the last group may have fewer than there are owners.
        """
        groups = torch.cat([part.positions for part in parts]).long()
        counts = torch.tensor([part.positions.numel() for part in parts], device=groups.device)
        owners = torch.arange(self.workers, device=groups.device).repeat_interleave(counts)
        positions = groups * self.workers + (owners - self._turns(groups)) % self.workers
        if positions.numel() and int(positions.max()) >= self.numel:
            owner = int(owners[positions.argmax()])
            raise WireError(f"owner {owner} has no position in the last group of {self.numel} elements")
        return positions, torch.cat([part.values for part in parts])

    def _turns(self, groups: Tensor) -> Tensor:
        return (groups * self.factor + self.offset) >> 33  # of 64 bits, which wrap around; % counts below zero on


def largest_means(sums: Sequence[Collected], most: int, zeros: Tensor) -> Collected:
    """The ``most`` largest means over workers at positions that any of them sent.

    Args:
        sums: every worker's, in worker order.
        zeros: (n,) for the sums, in the type that they are taken in; overwritten.
    """
    positions = torch.cat([worker.positions for worker in sums]).unique()
    union = Collected(positions, add_mean_(zeros, sums)[positions])
    return among(union, largest(union.values, most))


def _at(sent: Collected, accepted: Tensor, numel: int) -> Collected:
    """The elements that are at accepted positions."""
    known = torch.zeros(numel, dtype=torch.bool, device=accepted.device)
    known[accepted] = True
    chosen = known[sent.positions.long()]
    return Collected(sent.positions[chosen], sent.values[chosen])


def _share(count: int, workers: int) -> int:
    return -(-count // workers)
