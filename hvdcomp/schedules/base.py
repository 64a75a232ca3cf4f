"""What a schedule is: sums over one step's gradients go in, one decision for all ranks comes out.

Schedules are pure logic. They know nothing of tensors, Horovod or MPI; the coordinator carries their inputs and outputs
as short vectors of floats, and whoever drives them reads the clock.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdcomp.checks import check_count, check_number

DENSE = -1
"""`Decision.level` of a step that is exchanged uncompressed."""


@dataclass(frozen=True)
class Statistics:
    """One step's sums over all compressed tensors AND all workers.

    The element-wise sum of the workers' `to_vector()` is the vector of the sums, so that one allreduce joins them.
    """

    acc: float
    """Sum of ||g_ef||^2, the error-compensated gradient."""
    kept: tuple[float, float]
    """Sum of ||C(g_ef)||^2 at levels[0] and at levels[1]."""
    raw_norm: float
    """Sum over tensors (and workers) of ||g||, un-squared, of the raw gradient."""
    kept_norm: tuple[float, float]
    """Sum over tensors (and workers) of ||C(g_ef)||, un-squared, at each level."""
    finite: bool
    """False when any worker met a NaN or Inf; travels as the number of such workers."""

    SIZE: ClassVar[int] = 7

    def to_vector(self) -> tuple[float, ...]:
        """`SIZE` floats; a non-finite worker counts 1 in the last."""
        return (self.acc, *self.kept, self.raw_norm, *self.kept_norm, 0.0 if self.finite else 1.0)

    @classmethod
    def from_vector(cls, v: Sequence[float]) -> Statistics:
        """The statistics in `v`, one worker's vector or the sum of several. Raises ValueError unless len(v) == SIZE."""
        acc, kept_0, kept_1, raw_norm, kept_norm_0, kept_norm_1, non_finite = _floats(v, cls.SIZE, "statistics")
        return cls(acc, (kept_0, kept_1), raw_norm, (kept_norm_0, kept_norm_1), finite=non_finite == 0.0)


@dataclass(frozen=True)
class Decision:
    """What every rank does with this step, and what it evaluates at the next."""

    cf: float
    """Compression factor sent this step; 1.0 means dense."""
    level: int
    """Index into the levels evaluated this step; `DENSE` (-1) means dense."""
    skip: bool
    """Every rank leaves this step out."""
    levels: tuple[float, float]
    """The two CFs (cf_min, candidate) to evaluate at the NEXT step; equal when there is only one."""
    gains: tuple[float, float]
    """The smoothed gain at each level of this step, for the log; 0.0 where nothing was measured yet."""

    SIZE: ClassVar[int] = 7

    def to_vector(self) -> tuple[float, ...]:
        """`SIZE` floats, from which `from_vector` restores this decision exactly."""
        return (self.cf, float(self.level), float(self.skip), *self.levels, *self.gains)

    @classmethod
    def from_vector(cls, v: Sequence[float]) -> Decision:
        """The decision in `v`. Raises ValueError unless len(v) == SIZE."""
        cf, level, skip, cf_min, candidate, gain_min, gain_c = _floats(v, cls.SIZE, "decision")
        return cls(cf, int(level), bool(skip), (cf_min, candidate), (gain_min, gain_c))


@dataclass(frozen=True)
class Parameter:
    """One argument of a schedule, as `hvdcomp list schedules` shows it."""

    name: str
    default: Any
    doc: str


class Schedule(ABC):
    """Chooses the compression factor of each step.

    Life of an adaptive schedule: `prepare` once on every rank; then every step all ranks evaluate the CFs of `levels`
    (before the first step) or of the last `Decision.levels`; rank 0 calls `decide` with the sums, and `observe` when
    the step's cost is known, before its next `decide`.

    Args of every schedule:
        clock: seconds, monotonic. The driver reads it to time a step (`schedule.clock()`), never the schedule itself,
            so that a replayed clock replays a run.
    """

    name: ClassVar[str]
    """The name in the registry."""
    adaptive: ClassVar[bool]
    """Needs one decision a step; False spares that collective."""
    timed: ClassVar[bool] = False
    """Its decisions depend on measured times, so that on another network it would decide otherwise."""
    per_bucket: bool = False
    """Each bucket has a decision of its own, by :meth:`decide_each`."""
    exact: bool = True
    """A step is decided by its own gains; False: by estimates of the last step's, so that nothing waits."""
    source: ClassVar[str]
    """Where it is defined: paper, section."""
    parameter_docs: ClassVar[Mapping[str, str]] = {}
    """Argument -> what it means, in which unit."""

    clock: Callable[[], float]

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    @abstractmethod
    def prepare(self, workers: int) -> None:
        """Tell the number of workers, once before the first step. Raises ValueError when it is below 1."""

    @property
    @abstractmethod
    def levels(self) -> tuple[float, float]:
        """The CFs (cf_min, candidate) to evaluate at the next step; before the first step alike on every rank."""

    def cf_at(self, step: int) -> float | None:
        """The CF of a step (counted from 0) that needs no decision; None: the compressor's own, or a decision's.

        It depends on nothing but the step, so that all ranks know it, and a resumed run goes on where it was.
        """
        return None

    @abstractmethod
    def decide(self, statistics: Statistics) -> Decision:
        """Decide this step for all ranks. On rank 0 only, once a step."""

    def decide_each(self, statistics: Sequence[Statistics]) -> list[Decision]:
        """As `decide`, with the statistics of every bucket apart, where `per_bucket`; else of all together, alone."""
        (together,) = statistics
        return [self.decide(together)]

    @abstractmethod
    def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
        """Tell what the last decided step cost. On rank 0, at most once, before the next `decide`.

        Args:
            seconds: wall time of the whole iteration, compression included.
            compress_s: seconds of it that went into compression, both levels together.
            samples: samples one worker processed in it.

        A step whose time means nothing (the first, one with an evaluation inside) is simply not observed.
        """

    def hear(self, lr: float, loss: float) -> None:
        """After each step that was made, on rank 0: the next step's learning rate, rank 0's loss; nan: not known."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it has learned, as JSON-able values; a resumed schedule goes on bitwise alike."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Raises ValueError for unknown or missing keys; then nothing has changed."""

    def describe(self) -> dict[str, Any]:
        """Its name and parameters: `create(**schedule.describe())` makes another like it."""
        return {"name": self.name, **{parameter.name: getattr(self, parameter.name) for parameter in self.parameters()}}

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """Its arguments with defaults and documentation, `clock` left out."""
        arguments = inspect.signature(cls).parameters.values()
        return tuple(Parameter(a.name, a.default, cls.parameter_docs[a.name]) for a in arguments if a.name != "clock")


class Undecided(Schedule):
    """A schedule without decisions: its CFs are known beforehand, by :meth:`cf_at`."""

    adaptive = False

    def prepare(self, workers: int) -> None:
        check_count("workers", workers, hint="the number of ranks that exchange gradients")

    @property
    def levels(self) -> tuple[float, float]:
        """The first step's CF, twice. Raises RuntimeError when that is the compressor's, which only it knows."""
        cf = self.cf_at(0)
        if cf is None:
            raise RuntimeError(
                f"this {self.name} schedule has no CF of its own: take the compressor's, or give one, cf=100"
            )
        return (cf, cf)

    def decide(self, statistics: Statistics) -> Decision:
        """Raises RuntimeError: ask `adaptive` first, and spare the collective."""
        raise RuntimeError(
            f"a {self.name} schedule decides nothing; call decide() only where schedule.adaptive is true"
        )

    def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
        """Nothing to learn from it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys(f"the {self.name} schedule", state, ())


class LrWatch:
    """Tells drops of the learning rate from its ordinary course.

    Args:
        drop: a rate that falls to this share of the last one or less has dropped.
        last: the rate that was seen last, None before the first.
    """

    def __init__(self, drop: float, last: float | None = None) -> None:
        self.drop = drop
        self.last = last

    def drops_to(self, lr: float) -> bool:
        before, self.last = self.last, lr
        return before is not None and before > 0 and lr <= self.drop * before


def check_below_1(name: str, value: Any) -> float:
    """`value` if it is a number in [0, 1), a share to which something falls, else a ValueError."""
    number = check_number(name, value, 0, 1, hint="a share; for a fall to a tenth 0.1")
    if number == 1:
        raise ValueError(f"{name} must be below 1, got 1 (what stays would have fallen; for any fall at all 0.999)")
    return number


def check_state_keys(owner: str, state: Mapping[str, Any], expected: Collection[str]) -> None:
    """Raise one ValueError that names every key of `state` that is missing or unknown."""
    missing, unknown = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unknown:
        faults = [f"{word}: {', '.join(keys)}" for word, keys in (("missing", missing), ("unknown", unknown)) if keys]
        raise ValueError(f"this is no state of {owner} ({'; '.join(faults)}); load one that {owner} has saved")


def _floats(v: Sequence[float], size: int, what: str) -> list[float]:
    if len(v) != size:
        raise ValueError(f"a {what} vector holds {size} floats, got {len(v)}; do all ranks run the same version?")
    return [float(x) for x in v]
