"""Schedules choose the compression factor of each step; `create` makes one by name."""

from __future__ import annotations

from typing import Any

from hvdcomp.checks import check_choice
from hvdcomp.schedules.accordion import Accordion, AccordionBatchSize, BatchSize, SmithBatchSize
from hvdcomp.schedules.adaqs import AdaQS
from hvdcomp.schedules.assigning import Assigning, Echo, Evidence, Overlap, Setting, Sums, UnitForm
from hvdcomp.schedules.auto import Auto
from hvdcomp.schedules.base import DENSE, Decision, Parameter, Schedule, Statistics
from hvdcomp.schedules.gravac import GraVAC
from hvdcomp.schedules.scadles import ScaDLES
from hvdcomp.schedules.static import Static
from hvdcomp.schedules.warmup import Warmup

__all__ = [
    "DENSE",
    "REGISTRY",
    "Accordion",
    "AccordionBatchSize",
    "AdaQS",
    "Assigning",
    "Auto",
    "BatchSize",
    "Decision",
    "Echo",
    "Evidence",
    "GraVAC",
    "Overlap",
    "Parameter",
    "ScaDLES",
    "Schedule",
    "Setting",
    "SmithBatchSize",
    "Static",
    "Statistics",
    "Sums",
    "UnitForm",
    "Warmup",
    "create",
]

REGISTRY: dict[str, type[Schedule]] = {
    schedule.name: schedule for schedule in (Static, GraVAC, Warmup, Accordion, AdaQS, ScaDLES, Auto)
}
"""Name -> class. Each class tells its `source`, its `parameters()` with defaults, and in its docstring what it does."""


def create(name: str, **params: Any) -> Schedule:
    """The schedule of that name, for example create("gravac", cf_max=2000, policy="geometric").

    Raises ValueError for an unknown name or parameter (the message names the nearest valid one, and all valid ones),
    and for a value that the schedule refuses.
    """
    schedule = REGISTRY[check_choice("schedule", name, REGISTRY)]
    valid = [*(parameter.name for parameter in schedule.parameters()), "clock"]
    for param in params:
        check_choice(f"parameter of schedule {name!r}", param, valid)
    return schedule(**params)
