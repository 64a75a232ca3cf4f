"""Dense inside a node, compressed between nodes: which workers share one, and a step's exchange in three parts."""

from __future__ import annotations

import math
import os
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.assignment import Told
from hvdcomp.buckets import Bucket
from hvdcomp.compressors import NoCompression
from hvdcomp.compressors.requests import Broadcast, Dense, Rounds, Unit
from hvdcomp.coordinator import Coordinator, Referee
from hvdcomp.exchange import NOTHING, Exchange, StepRecord, Transport
from hvdcomp.horovod_api import DYNAMIC, process_set_of
from hvdcomp.rounds import Fused, Gradients


@dataclass(frozen=True)
class Nodes:
    """The nodes of this run, as this worker sees them; the first worker of each is its leader.

    Attributes:
        inside: the process set of this worker's node.
        leaders: the process set of all leaders.
    """

    inside: Any
    leaders: Any


def find_nodes(hvd: Any, world: Transport, name: str) -> Nodes | str:
    """The nodes, or why there is nothing to gain from them here; collective over the world, alike on all workers.

    Args:
        name: of the operation that asks the others.
    """
    own = {
        "node": hvd.cross_rank(),
        "place": hvd.local_rank(),
        "host": socket.gethostname(),
        "dynamic": os.environ.get(DYNAMIC, "0") not in ("", "0"),
    }
    places = world.gather_objects(own, name)
    nodes = ranks_of_nodes(places)
    if isinstance(nodes, str):
        return nodes
    wanted = [*nodes, [ranks[0] for ranks in nodes]]
    missing = [ranks for ranks in wanted if process_set_of(hvd, ranks) is None]
    if missing and not all(place["dynamic"] for place in places):
        return (
            f"Horovod has no process sets of ranks {', '.join(map(str, missing))}: set {DYNAMIC}=1 on every rank, or "
            "give them to hvd.init(process_sets=[hvd.ProcessSet(ranks), ...])"
        )
    for ranks in missing:
        hvd.add_process_set(ranks)
    inside = next(ranks for ranks in nodes if world.worker in ranks)
    return Nodes(process_set_of(hvd, inside), process_set_of(hvd, wanted[-1]))


def ranks_of_nodes(places: list[dict[str, Any]]) -> list[list[int]] | str:
    """Each node's ranks in ascending order, or why an exchange in a node and between nodes does not fit.

    Args:
        places: each rank's number of its "node", its "place" on the node, and its "host"'s name.
    """
    found: defaultdict[int, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        found[place["node"]].append(rank)
    nodes = [ranks for _, ranks in sorted(found.items())]
    sizes = [sum(place["place"] == at for place in places) for at in range(1 + max(p["place"] for p in places))]
    if sizes[0] == 1:
        return f"all {len(places)} workers are on one node"
    if len(sizes) == 1:
        return f"each of the {sizes[0]} nodes has one worker"
    if len(set(sizes)) > 1:
        return f"the {sizes[0]} nodes have different numbers of workers, so that the mean would not weigh all alike"
    if any(len({places[rank]["host"] for rank in ranks}) > 1 for ranks in nodes):
        return "ranks lie so that Horovod's cross_rank() does not number the nodes: place them by slot or by node"
    return nodes


class _FromLeader(NoCompression):
    """Not a mean: the leader's tensor, as it is."""

    name: ClassVar[str] = "from leader"
    collective: ClassVar[str] = "broadcast"

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        bits = acc.view(torch.int16) if acc.dtype == torch.bfloat16 else acc  # a type that Horovod takes
        sent = yield Broadcast(bits, 0, in_place=True)
        return Dense(sent.view(acc.dtype))


class NodeExchange:
    """The workers of a node average densely, their leaders exchange compressed means, and hand the result on.

    Only the first part is started from gradient hooks. Residuals and states are the leaders', in ``between``. What the
    honest switch makes dense is a plain exchange between all workers, once the residuals hold nothing any more.

    Args:
        buckets: of a leader: those of ``between``; of another worker: the same tensors, without residuals.
        inside: transport of this worker's node.
        between: the leaders' exchange, None on the other workers.
        flat: a dense exchange between all workers, whose referee is the honest switch, and is that of ``between``,
            too; None without the switch.
        gradients: where all parts read and write, except that ``between`` reads what :meth:`start` is given.
        label: prefix of the operations' names, unique to the optimizer.
        clock: seconds.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        inside: Transport,
        between: Exchange | None,
        flat: Exchange | None,
        gradients: Gradients,
        *,
        label: str,
        clock: Callable[[], float],
    ) -> None:
        self.buckets = buckets
        self.between = between
        self.clock = clock
        self._flat = flat
        self._inside = inside
        self._label = label
        self._gradients = gradients
        # A NaN is in the mean of its node, where the leaders find it.
        self._up, self._down = (
            Exchange(
                [], inside, None, label=f"{label}.{part}", check_finite=False, cf_at=lambda step: None, clock=clock
            )
            for part in ("up", "down")
        )
        self._started: dict[int, Callable[[Exchange], None]] = {}
        self._summed = False
        self._holds = True
        """Leaders' residuals may hold something, which they send in the first of several dense steps."""

    @property
    def referee(self) -> Referee | None:
        return None if self._flat is None else self._flat.referee

    @property
    def coordinator(self) -> Coordinator | None:
        return None if self.between is None else self.between.coordinator

    def start(self, bucket: Bucket, gradients: Gradients, *, scale: float = 1.0, summed: bool = False) -> None:
        """Begin the mean inside the node, without waiting for anybody; arguments as of :meth:`Exchange.start`."""
        plain = Bucket(bucket.index, bucket.dense_parts)
        if self._flat is not None and self._is_flat:
            self._flat.start(plain, self._gradients, scale=scale, summed=summed)
            return
        self._summed = summed
        self._started[bucket.index] = lambda between: between.start(bucket, gradients, scale=scale, summed=summed)
        self._up.start(plain, self._gradients)

    def finish(self) -> StepRecord:
        """The rest of all buckets that were started; a step is skipped by every worker or by none.

        Returns:
            A leader's record is that of its exchange with the other leaders. The other workers', who send nothing
            between nodes, has the leader's step, cf, level, fell_back and skipped. Both wait inside the node, too.

        Raises:
            Exception: that of the exchange between leaders; on the other workers a RuntimeError then.
        """
        record = self._flat.finish() if self._flat is not None and self._is_flat else self._finish_in_nodes()
        record.bytes_dense = sum(spec.nbytes for bucket in self.buckets for spec in bucket.members)
        if not record.skipped:
            self._holds = not record.fell_back
        for exchange in (self.between, self._flat):
            if exchange is not None:
                exchange.step = record.step + 1
        return record

    def conclude(self, record: StepRecord, seconds: float, samples: float, told: Told = NOTHING) -> None:
        """See :meth:`Exchange.conclude`; decisions are made between leaders, the honest switch is everybody's."""
        if self.between is not None:
            self.between.conclude(record, seconds, samples, told)
        elif self.referee is not None:
            self.referee.observe(seconds)

    def drop(self) -> None:
        """Forget what is under way; see :meth:`Exchange.drop`."""
        for exchange in (self._up, self.between, self._down, self._flat):
            if exchange is not None:
                exchange.drop()
        self._started.clear()
        self._holds = True

    @property
    def _is_flat(self) -> bool:
        """This step is a dense exchange between all workers."""
        return self.referee is not None and self.referee.dense and not self._holds

    def _finish_in_nodes(self) -> StepRecord:
        up = self._up.finish()
        record = self._tell(None if self.between is None else self._lead(self.between))
        if not record.skipped:
            for bucket in self.buckets:
                if bucket.index in self._started:
                    parts = [replace(part, compressor=_FromLeader()) for part in bucket.dense_parts]
                    self._down.start(Bucket(bucket.index, parts), self._gradients, summed=self._summed)
            record.wait_s += self._down.finish().wait_s
        record.wait_s += up.wait_s
        self._started.clear()
        return record

    def _lead(self, between: Exchange) -> StepRecord:
        """The exchange with the other leaders."""
        try:
            for index in sorted(self._started):
                self._started[index](between)
            return between.finish()
        except Exception:
            self._from_leader(StepRecord(0, cf=math.nan))
            raise

    def _tell(self, record: StepRecord | None) -> StepRecord:
        """The leader's record on the leader; on the others what it says of it."""
        if record is not None:
            self._from_leader(record)
            return record
        began = self.clock()
        told = self._from_leader(StepRecord(0))
        if math.isnan(told.cf):
            raise RuntimeError("the exchange between nodes failed on this node's first worker; see its traceback")
        told.wait_s = self.clock() - began
        return told

    def _from_leader(self, record: StepRecord) -> StepRecord:
        said = [record.step, record.cf, record.level, record.fell_back, record.skipped]
        vector = torch.tensor(said, dtype=torch.float64)
        step, cf, level, fell_back, skipped = self._inside.start(
            Fused("broadcast", vector, [0], owned=True, root=0), f"{self._label}.record"
        )().tolist()
        return StepRecord(int(step), cf=cf, level=int(level), fell_back=bool(fell_back), skipped=bool(skipped))


__all__ = ["NodeExchange", "Nodes", "find_nodes", "ranks_of_nodes"]
