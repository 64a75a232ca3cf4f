"""One decision for all ranks: statistics are summed onto rank 0, whose schedule decides, and the decision is sent back.

Over MPI this takes microseconds on a communicator of its own (mpi4py); elsewhere two small Horovod operations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hvdcomp.fallback import BLOCK, Block, DenseFallback
from hvdcomp.schedules.base import Decision, Schedule, Statistics

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """Carries short vectors of float64 between the workers."""

    name: str
    root: bool
    """This worker is the one that decides."""

    def sum_to_root(self, vector: np.ndarray) -> np.ndarray:
        """The element-wise sum over workers, on the root; elsewhere the result means nothing."""

    def from_root(self, vector: np.ndarray) -> np.ndarray:
        """The root's vector, on every worker."""


class Coordinator:
    """Runs the schedule on the root and hands its decision to every worker."""

    def __init__(self, schedule: Schedule, channel: Channel) -> None:
        self.schedule = schedule
        self.channel = channel
        self.statistics: Statistics | None = None
        """What the last decision on all was made on, on the root."""
        self._fault: Exception | None = None

    def decide(self, shares: Sequence[Sequence[float]]) -> list[Decision]:
        """Blocking; every worker must call it once a step, in the same order.

        Args:
            shares: each bucket's of the statistics, as a vector.

        Returns:
            The decision on each bucket: the same on all, unless the schedule decides per bucket.

        Raises:
            Exception: the schedule's own, on the root; a RuntimeError on the others then.
        """
        rows = np.array(shares, dtype=np.float64).reshape(-1, Statistics.SIZE)
        if not self.schedule.per_bucket:
            rows = rows.sum(axis=0, keepdims=True)
        total = self.channel.sum_to_root(rows.ravel()).reshape(rows.shape)
        vector = np.full(len(rows) * Decision.SIZE, np.nan)
        if self.channel.root and self._fault is None:
            try:
                total[:, -1] = total[:, -1].sum()  # a step is skipped as a whole
                seen = [Statistics.from_vector(row) for row in total.tolist()]
                self.statistics = None if self.schedule.per_bucket else seen[0]
                decisions = self.schedule.decide_each(seen)
                vector[:] = [number for decision in decisions for number in decision.to_vector()]
            except Exception as error:
                self._fault = error
        vector = self.channel.from_root(vector)
        if self._fault is not None:
            raise self._fault
        if np.isnan(vector[:1]).any():
            raise RuntimeError(f"schedule {self.schedule.name!r} failed on worker 0, which decides; see its traceback")
        made = [Decision.from_vector(row) for row in vector.reshape(-1, Decision.SIZE).tolist()]
        return made if self.schedule.per_bucket else made * len(shares)

    def observe(self, seconds: float, compress_s: float, samples: float) -> None:
        """Tell the schedule what the last step cost, on the root; if it fails, so does the next :meth:`decide`."""
        self._tell(lambda: self.schedule.observe(seconds, compress_s, samples))

    def hear(self, lr: float, loss: float) -> None:
        """Tell the schedule the next learning rate and the last loss, as :meth:`observe` does the time."""
        self._tell(lambda: self.schedule.hear(lr, loss))

    def _tell(self, what: Callable[[], None]) -> None:
        if self.channel.root:
            try:
                what()
            except Exception as error:
                self._fault = error


class Referee:
    """Runs the honest switch on the root; every worker takes the same steps compressed and dense."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._fallback = DenseFallback()
        self._block = self._fallback.first
        self._left = self._block.steps

    @property
    def dense(self) -> bool:
        """The coming step is exchanged dense."""
        return self._block.dense

    @property
    def settled(self) -> bool:
        """No trial is under way."""
        return self._block.steps > BLOCK

    def observe(self, seconds: float) -> None:
        """Tell what a step took, nan if that means nothing; at the end of a block the workers hear of the next."""
        if self._channel.root:
            self._fallback.observe(seconds)
        self._left -= 1
        if self._left == 0:
            following = self._fallback.next() if self._channel.root else self._block
            vector = self._channel.from_root(np.array(following.to_vector()))
            self._block = Block.from_vector(vector.tolist())
            self._left = self._block.steps


class LocalChannel:
    """For one worker alone."""

    name = "local"
    root = True

    def sum_to_root(self, vector: np.ndarray) -> np.ndarray:
        return vector

    def from_root(self, vector: np.ndarray) -> np.ndarray:
        return vector


class MpiChannel:
    """mpi4py, on a communicator of its own, so that calls match by order whatever else the program sends."""

    name = "mpi"

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.root = communicator.Get_rank() == 0

    def sum_to_root(self, vector: np.ndarray) -> np.ndarray:
        total = np.empty_like(vector)
        self._communicator.Reduce(vector, total, root=0)
        return total

    def from_root(self, vector: np.ndarray) -> np.ndarray:
        self._communicator.Bcast(vector, root=0)
        return vector


class HorovodChannel:
    """Horovod's own allreduce and broadcast, for runs without MPI."""

    name = "horovod"

    def __init__(self, hvd: Any, label: str, process_set: Any) -> None:
        self._hvd = hvd
        self._label = label
        self._process_set = process_set
        self._root_rank = process_set.ranks[0]
        self.root = hvd.rank() == self._root_rank

    def sum_to_root(self, vector: np.ndarray) -> np.ndarray:
        total = self._hvd.allreduce(
            torch.from_numpy(vector), op=self._hvd.Sum, name=f"{self._label}.statistics", process_set=self._process_set
        )
        return np.asarray(total.numpy())

    def from_root(self, vector: np.ndarray) -> np.ndarray:
        sent = self._hvd.broadcast(
            torch.from_numpy(vector), self._root_rank, name=f"{self._label}.decision", process_set=self._process_set
        )
        return np.asarray(sent.numpy())


def channel_name(hvd: Any, process_set: Any) -> str:
    """The name of the channel that :func:`open_channel` opens; not collective."""
    if process_set.size() == 1:
        return LocalChannel.name
    return HorovodChannel.name if _mpi_of_this_run(hvd) is None else MpiChannel.name


def open_channel(hvd: Any, label: str, process_set: Any) -> Channel:
    """The fastest channel that this run has; collective over the process set."""
    if process_set.size() == 1:
        return LocalChannel()
    mpi = _mpi_of_this_run(hvd)
    if mpi is None:
        return HorovodChannel(hvd, label, process_set)
    group = mpi.COMM_WORLD.Get_group().Incl(list(process_set.ranks))
    return MpiChannel(mpi.COMM_WORLD.Create_group(group))


def _mpi_of_this_run(hvd: Any) -> Any:
    """mpi4py's MPI module if Horovod runs over MPI, with threads, and both number the workers alike; else None."""
    if not (hvd.mpi_built() and hvd.mpi_enabled()):
        return None
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # Horovod has started MPI, and will end it
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        logger.warning("mpi4py is not usable (%s): decisions travel through Horovod, about a millisecond a step", error)
        return None
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return None
    alike = MPI.COMM_WORLD.Get_size() == hvd.size() and MPI.COMM_WORLD.Get_rank() == hvd.rank()
    return MPI if alike else None
