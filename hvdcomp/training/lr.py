"""The learning rate as a pure function of the position in a run: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdcomp.config import LrScheduleConfig


@dataclass(frozen=True)
class Position:
    """Where a step stands in its run.

    Attributes:
        step: from 0.
        total: steps of the whole run.
        epoch: passes over the data before this step, with a fraction.
        epoch_after: the same after it.
        workers: number of them.
    """

    step: int
    total: int
    epoch: float = 0.0
    epoch_after: float = 0.0
    workers: int = 1

    def following(self) -> Position:
        """The next step's, as if that were of as many samples."""
        after = 2 * self.epoch_after - self.epoch
        return Position(self.step + 1, self.total, self.epoch_after, after, self.workers)


def lr_factor(config: LrScheduleConfig, at: Position) -> float:
    """What the learning rate is multiplied by in this step: in [0, 1], or up to `workers` where it scales with them."""
    peak = at.workers if config.scale_by_workers else 1
    start = 1 if config.scale_by_workers else 0
    risen = _risen(config, at)
    if risen < 1:
        return start + risen * (peak - start)
    if config.name == "step":
        passed = sum(at.step >= step for step in config.milestones)
        passed += sum(at.epoch >= epoch for epoch in config.milestone_epochs)
        return peak * config.factor**passed
    if config.name == "cosine":
        done = max(0, at.step - config.warmup_steps) / max(1, at.total - config.warmup_steps)
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return float(peak)


def _risen(config: LrScheduleConfig, at: Position) -> float:
    """The share of the warm-up that is over with this step."""
    if at.step < config.warmup_steps:
        return (at.step + 1) / config.warmup_steps
    return at.epoch_after / config.warmup_epochs if at.epoch < config.warmup_epochs else 1.0
