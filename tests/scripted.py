"""A schedule that assigns what a test has written down, and keeps what it was told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdcomp.schedules import Assigning, Evidence, Setting


class Scripted(Assigning):
    """After the step of each key in `plan`, all units get its value, or one each.

    Args:
        phase: steps of each phase, 0 for none.
        fails_at: the step after which `assign` raises.
    """

    name = "scripted"
    source = "a test"

    def __init__(
        self,
        settings: Sequence[Setting] = ({},),
        plan: Mapping[int, Any] | None = None,
        phase: int = 0,
        fails_at: int = -1,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock=clock)
        self._settings = tuple(settings)
        self.plan, self.phase, self.fails_at = dict(plan or {}), phase, fails_at
        self.wants_sums = self.wants_overlaps = phase > 0
        self.seen: list[Evidence] = []
        self.now: list[int] = []
        self.steps = 0

    @property
    def settings(self) -> tuple[Setting, ...]:
        return self._settings

    def ends_phase(self) -> bool:
        self.steps += 1
        return self.phase > 0 and self.steps % self.phase == 0

    def assign(self, evidence: Evidence) -> Sequence[int]:
        self.seen.append(evidence)
        if evidence.step == self.fails_at:
            raise ArithmeticError("as planned")
        planned = self.plan.get(evidence.step, self.now + [self.first] * (len(self.units) - len(self.now)))
        self.now = [planned] * len(self.units) if isinstance(planned, int) else list(planned)
        return self.now

    def state_dict(self) -> dict[str, Any]:
        return {"now": list(self.now), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.now, self.steps = list(state["now"]), state["steps"]

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "settings": self._settings}
