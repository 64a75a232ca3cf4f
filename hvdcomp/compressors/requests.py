"""The collectives that a compressor may ask for, and what it makes of their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.kernels import Collected, Moments, Tail, add_mean_, clear_

OWN = "own."


@dataclass(frozen=True)
class Allreduce:
    """Answered with the mean of ``tensor`` (any shape, float16, float32 or float64) over the workers.

    With ``in_place`` the mean may be written into ``tensor``, which is not needed any more.
    """

    tensor: Tensor
    in_place: bool = False


@dataclass(frozen=True)
class Allgather:
    """Answered with a list of every worker's ``payload`` (1-D uint8, lengths may differ), in worker order."""

    payload: Tensor


@dataclass(frozen=True)
class Alltoall:
    """Row j of ``tensor`` (workers, c) goes to worker j; answered with (workers, c), whose row j came from worker j."""

    tensor: Tensor


@dataclass(frozen=True)
class Alltoallv:
    """Payload j (1-D uint8, any length) goes to worker j; answered with what came from each, in worker order."""

    payloads: list[Tensor]


@dataclass(frozen=True)
class Broadcast:
    """Answered with ``tensor`` of worker ``root``; all workers' have its size.

    With ``in_place`` that may be written into ``tensor``, which is not needed any more.
    """

    tensor: Tensor
    root: int
    in_place: bool = False


@dataclass(frozen=True)
class Decide:
    """Answered with the level to send, -1 for dense: one decision for all units and workers.

    ``kept_sq`` are the squared norms (scalar tensors) of what each of the unit's two levels would send.
    """

    kept_sq: tuple[Tensor, Tensor]


Request = Allreduce | Allgather | Alltoall | Alltoallv | Broadcast | Decide


@dataclass(frozen=True)
class Volume:
    """A collective's size: what one worker hands over in one phase, without running anything.

    ``halves`` is said of float16, which CPUs take longer to add than their bytes let expect.
    """

    phase: int
    kind: str
    nbytes: int
    halves: bool = False


@dataclass(frozen=True)
class Hyper:
    """What the wrapped optimizer's parameter group says of a unit."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass
class Unit:
    """What a compressor is told about the tensor that it sees.

    Attributes:
        name: the parameter's name, or that of the bucket under ``granularity="bucket"``.
        shape: the gradient's shape; ``acc`` is always its flat view.
        worker, workers: this worker's index, and how many there are.
        step: exchanges made before this one.
        cf: the compression factor of this step, None where it is the compressor's own.
        levels: the two compression factors to evaluate under an adaptive schedule, None under any other.
        hyper: the optimizer's settings, for methods that take them over.
        state: tensors that the compressor keeps from step to step; changed only when a step is committed. A name that
            begins with :data:`OWN` marks one that differs between workers, and is averaged when their number changes.
        next_state: what ``state`` becomes if the step is committed, for methods that find it while they select.
        moments: of ``acc``, if adding the gradient took them.
        tail: the largest elements of ``acc``, :meth:`Compressor.wanted` at least, if adding the gradient found them.
        spare: memory that the compressor uses again, such as tensors that were in ``state`` before the last step; what
            it holds is never read.
    """

    name: str
    shape: torch.Size
    worker: int = 0
    workers: int = 1
    step: int = 0
    cf: float | None = None
    levels: tuple[float, float] | None = None
    hyper: Hyper = Hyper()
    state: dict[str, Tensor] = field(default_factory=dict)
    next_state: dict[str, Tensor] = field(default_factory=dict)
    moments: Moments | None = None
    tail: Tail | None = None
    spare: dict[str, Tensor] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return self.shape.numel()


def spare(unit: Unit, name: str) -> Tensor | None:
    """Memory for the next state, whose first touch costs more than the arithmetic; None after an aborted step."""
    found = unit.spare.get(name)
    return None if found is unit.state.get(name) else found


def keep_spare(unit: Unit, acc: Tensor, memory: dict[str, Tensor]) -> None:
    """Let the next step build its own in this memory, such as that of the state, once that is replaced.

    On a CPU only: elsewhere memory is cached, and better not held.
    """
    unit.spare = memory if acc.device.type == "cpu" else {}


class Reduced(ABC):
    """The outcome of a unit's rounds: the mean over workers, and this worker's own share of it."""

    state: dict[str, Tensor] | None = None
    """What :attr:`Unit.state` becomes when the step is committed; None leaves it."""
    ignores_scale: ClassVar[bool] = False
    """The mean is the same whatever the loss scale of the gradients was, so that it is yet to be multiplied by it."""

    @abstractmethod
    def write_mean_(self, out: Tensor) -> None:
        """Overwrite the flat ``out`` with the mean over workers."""

    @abstractmethod
    def settle_(self, acc: Tensor) -> None:
        """Take this worker's own share out of ``acc``, in place: what is left is the residual."""

    def finite(self) -> bool:
        """False where the workers' finite shares overflowed on their way into the mean; the same on every worker."""
        return True


@dataclass
class Dense(Reduced):
    """All of the tensor was sent: the residual is exactly zero."""

    mean: Tensor

    def write_mean_(self, out: Tensor) -> None:
        if out.data_ptr() != self.mean.data_ptr() or out.dtype != self.mean.dtype:  # else it was reduced in place
            out.copy_(self.mean.view(-1))

    def settle_(self, acc: Tensor) -> None:
        acc.zero_()

    def finite(self) -> bool:
        return bool(torch.isfinite(self.mean).all())


@dataclass
class Sparse(Reduced):
    """Some elements were sent; ``contributions`` holds what each worker's payload decodes to."""

    contributions: list[Collected]
    own: int
    """This worker's index."""
    exact: bool
    """Values travelled without loss, so that nothing of them is left behind."""

    def write_mean_(self, out: Tensor) -> None:
        add_mean_(out.zero_(), self.contributions)

    def settle_(self, acc: Tensor) -> None:
        sent = self.contributions[self.own]
        if self.exact:
            clear_(acc, sent.positions)
        else:
            acc.index_add_(0, sent.positions, sent.values.to(acc.dtype), alpha=-1)


@dataclass
class SharedSparse(Reduced):
    """All workers sent the same ``indices``; ``values`` is the mean there."""

    indices: Tensor
    values: Tensor
    scale: float = 1.0

    def write_mean_(self, out: Tensor) -> None:
        out.zero_().index_copy_(0, self.indices, (self.values * self.scale).to(out.dtype))

    def settle_(self, acc: Tensor) -> None:
        clear_(acc, self.indices)

    def finite(self) -> bool:
        return bool(torch.isfinite(self.values).all())


@dataclass
class LowRank(Reduced):
    """The mean is ``p @ q.T``; this worker's own share is ``p @ q_own.T``."""

    p: Tensor
    q: Tensor
    q_own: Tensor
    state: dict[str, Tensor] | None = None

    def write_mean_(self, out: Tensor) -> None:
        shape = (self.p.shape[0], self.q.shape[0])
        torch.mm(self.p, self.q.t(), out=out.view(shape))

    def settle_(self, acc: Tensor) -> None:
        acc.view(self.p.shape[0], self.q.shape[0]).addmm_(self.p, self.q_own.t(), alpha=-1)

    def finite(self) -> bool:
        return bool(torch.isfinite(self.p).all()) and bool(torch.isfinite(self.q).all())


Rounds = Generator[Request, Any, Reduced]
