"""One compression factor for the whole run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvdcomp.checks import check_count, check_number
from hvdcomp.schedules.base import Decision, Schedule, Statistics, check_state_keys


class Static(Schedule):
    """The same CF at every step, without decisions and so without a collective for them.

    Args:
        cf: original size / compressed size, >= 1; None leaves it at the compressor's own.

    Raises ValueError when cf is below 1.
    """

    name = "static"
    adaptive = False
    source = "the usual practice: a compression factor chosen by hand"
    parameter_docs: ClassVar[Mapping[str, str]] = {
        "cf": "compression factor of every step, >= 1; None: the compressor's own",
    }

    def __init__(self, cf: float | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock=clock)
        hint = "cf is original size / compressed size; for 1 % use cf=100"
        self.cf = None if cf is None else check_number("cf", cf, 1, hint=hint)

    def prepare(self, workers: int) -> None:
        check_count("workers", workers, hint="the number of ranks that exchange gradients")

    @property
    def levels(self) -> tuple[float, float]:
        """(cf, cf). Raises RuntimeError when cf is None: only the compressor knows it then."""
        if self.cf is None:
            raise RuntimeError("Static() has no CF of its own: take the compressor's, or give one, Static(cf=100)")
        return (self.cf, self.cf)

    def decide(self, statistics: Statistics) -> Decision:
        """Raises RuntimeError: ask `adaptive` first, and spare the collective."""
        raise RuntimeError("a static schedule decides nothing; call decide() only where schedule.adaptive is true")

    def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
        """Nothing to learn from it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys("the static schedule", state, ())
