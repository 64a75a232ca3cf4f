"""ScaDLES's rule: compressed where little of the gradient is lost, else dense."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvdcomp.checks import check_count, check_number
from hvdcomp.schedules.base import DENSE, Decision, Schedule, Statistics, check_state_keys


class ScaDLES(Schedule):
    """Sends a step at one CF if 1 - gain <= delta, else dense; the gain is ||C(g)||^2 / ||g||^2 over the whole model.

    The gain is the step's own, without any average, so that there is no state.

    Args:
        cf: original size / compressed size, above 1.
        delta: share of the squared norm, in [0, 1], that may stay behind.

    Raises ValueError for a value out of these bounds.
    """

    name = "scadles"
    adaptive = True
    source = "Tyagi and Swany 2022 (ScaDLES), adaptive compression"
    parameter_docs: ClassVar[Mapping[str, str]] = {
        "cf": "compression factor of the steps that are compressed, > 1",
        "delta": "share of the gradient's squared norm that may stay behind, in [0, 1]",
    }

    def __init__(self, cf: float = 10.0, delta: float = 0.3, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock=clock)
        self.cf = check_number("cf", cf, 1, hint="cf is original size / compressed size; for 1 % use cf=100")
        if self.cf == 1:
            raise ValueError("cf must be above 1, got 1 (every step would be dense; leave the schedule out)")
        self.delta = check_number("delta", delta, 0, 1, hint="share of the squared norm that may stay behind")

    def prepare(self, workers: int) -> None:
        check_count("workers", workers, hint="the number of ranks that exchange gradients")

    @property
    def levels(self) -> tuple[float, float]:
        return (self.cf, self.cf)

    def decide(self, statistics: Statistics) -> Decision:
        """Compressed or dense; skip a step whose statistics are not finite."""
        if not (statistics.finite and all(map(math.isfinite, statistics.to_vector()))):
            return Decision(1.0, DENSE, skip=True, levels=self.levels, gains=(0.0, 0.0))
        gain = statistics.kept[0] / statistics.acc if statistics.acc > 0 else 1.0
        compressed = 1 - gain <= self.delta
        cf, level = (self.cf, 0) if compressed else (1.0, DENSE)
        return Decision(cf, level, skip=False, levels=self.levels, gains=(gain, gain))

    def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
        """Nothing to learn from it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys("ScaDLES", state, ())
