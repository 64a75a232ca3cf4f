"""One compression factor for the whole run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import ClassVar

from hvdcomp.checks import check_number
from hvdcomp.schedules.base import Undecided


class Static(Undecided):
    """The same CF at every step, without decisions and so without a collective for them.

    Args:
        cf: original size / compressed size, >= 1; None leaves it at the compressor's own.

    Raises ValueError when cf is below 1.
    """

    name = "static"
    source = "the usual practice: a compression factor chosen by hand"
    parameter_docs: ClassVar[Mapping[str, str]] = {
        "cf": "compression factor of every step, >= 1; None: the compressor's own",
    }

    def __init__(self, cf: float | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock=clock)
        hint = "cf is original size / compressed size; for 1 % use cf=100"
        self.cf = None if cf is None else check_number("cf", cf, 1, hint=hint)

    def cf_at(self, step: int) -> float | None:
        return self.cf
