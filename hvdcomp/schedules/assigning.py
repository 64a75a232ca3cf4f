"""Schedules that assign each unit one of a short list of settings: a level of its method, or another method."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdcomp.checks import check_count
from hvdcomp.schedules.base import Schedule, Statistics

Setting = Mapping[str, Any]
"""Parameters that replace the compressor's own, {"cf": 10}; with "name" another method, {"name": "none"}."""


@dataclass(frozen=True)
class UnitForm:
    """A unit that a schedule may assign a setting to: a tensor, or several that are compressed as one."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sums:
    """Of one unit's raw gradients of rank 0, added up over the steps of a phase, before any residual: G."""

    total: float
    """Sum of the elements of G."""
    squares: float
    """Sum of their squares: ||G||^2."""

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)


@dataclass(frozen=True)
class Overlap:
    """Of one unit, on a sample of its elements that stays the same: G as in `Sums`, and r, rank 0's residual after it.

    The sample holds all elements of a small unit, and about a hundredth of a large one.
    """

    residual_sum: float
    """<r, G>."""
    sum_squares: float
    """||G||^2."""
    residual_squares: float
    """||r||^2."""


@dataclass(frozen=True)
class Echo:
    """The last step against this one's gradient g', which has seen its effect: of all units, on the same samples.

    The noise of the two steps' batches is independent, so that both are about what the workers' gradients have in
    common.
    """

    sent: float
    """<sent, g'>, where sent is what rank 0 sent: g + the residual before - the residual after."""
    gradient: float
    """<g, g'>."""


@dataclass(frozen=True)
class Evidence:
    """What rank 0 knows of a step when it is over. Times are in seconds, nan where they mean nothing."""

    step: int
    """Its number, from 0."""
    lr: float = math.nan
    """The learning rate of the step (of the first parameter group)."""
    next_lr: float = math.nan
    """That of the next step where the caller has told it (`optimizer.next_lr`), else `lr`."""
    loss: float = math.nan
    """Rank 0's, where the caller has told it (`optimizer.loss`)."""
    seconds: float = math.nan
    """Of the whole iteration."""
    compress_s: float = math.nan
    exchange_s: float = math.nan
    wait_s: float = math.nan
    samples: float = 1.0
    """That rank 0 processed."""
    bytes_sent: int = 0
    bytes_dense: int = 0
    fell_back: bool = False
    """The step was dense by the honest switch."""
    echo: Echo | None = None
    """None if not wanted, or without a step before."""
    phase_steps: int = 0
    """Steps of the phase that ends with this step; 0 where none ends. The following are empty then, or unwanted."""
    sums: tuple[Sums, ...] = ()
    """By unit."""
    overlaps: tuple[Overlap, ...] = ()
    """By unit."""


class Assigning(Schedule):
    """Assigns each unit one of `settings`, by evidence that only rank 0 has.

    Life: `prepare` once on every rank. After every step that was not skipped, on rank 0 only: `prepare_units` if units
    are new, then `ends_phase`, then `assign`. All ranks use its answer from the next step on.

    A phase is a number of steps over which gradients are added up; the schedule says when one ends, and the next
    begins with the step after it.
    """

    adaptive = True
    exact = False

    first: int = 0
    """Index of every unit's setting before the first `assign`, alike on all ranks."""
    wants_sums: bool = False
    """`Evidence.sums` at the end of a phase; costs rank 0 a copy of the gradients and a pass over them each step."""
    wants_overlaps: bool = False
    """`Evidence.overlaps` at the end of a phase; cheap."""
    wants_echo: bool = False
    """`Evidence.echo` of every step; cheap."""

    units: tuple[UnitForm, ...] = ()

    @property
    @abstractmethod
    def settings(self) -> tuple[Setting, ...]:
        """What a unit can be assigned; alike on all ranks and for the whole run, and never empty."""

    @property
    def gathers(self) -> bool:
        """The coming step's gradients belong to a phase; on rank 0."""
        return True

    def suit(self, compressor: Any) -> None:
        """Tell the user's compressor, before `settings` are asked for, where these depend on it."""

    def prepare(self, workers: int) -> None:
        check_count("workers", workers, hint="the number of ranks that exchange gradients")

    def prepare_units(self, units: Sequence[UnitForm]) -> None:
        """Tell the units, in the order of every `assign`; again when the model has got more, which come last."""
        self.units = tuple(units)

    def ends_phase(self) -> bool:
        """The step that was just made is the last of a phase."""
        return False

    @abstractmethod
    def assign(self, evidence: Evidence) -> Sequence[int]:
        """The index in `settings` of each unit, for the next step."""

    @property
    def levels(self) -> NoReturn:
        """Raises RuntimeError: settings are in force, not factors."""
        raise RuntimeError(f"schedule {self.name!r} assigns settings to units; it has no levels for all of them")

    def decide(self, statistics: Statistics) -> NoReturn:
        """Raises RuntimeError: see `assign`."""
        raise RuntimeError(f"schedule {self.name!r} assigns settings after a step; it decides nothing within one")

    def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
        """Nothing: evidence tells what a step cost."""
