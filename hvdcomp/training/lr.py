"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from hvdcomp.config import LrScheduleConfig


def lr_factor(config: LrScheduleConfig, step: int, total: int) -> float:
    """What the learning rate is multiplied by at `step` (from 0) of `total` steps, in [0, 1]."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "step":
        return config.factor ** sum(step >= milestone for milestone in config.milestones)
    if config.name == "cosine":
        done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return 1.0
