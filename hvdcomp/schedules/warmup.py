"""Warm-up: the compression factor rises by the clock of steps, since early gradients change fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hvdcomp.checks import check_count, check_number
from hvdcomp.schedules.base import Undecided

SPARSITY_CFS = (4.0, 16.0, 64.0, 250.0, 1000.0)
"""The paper's sparsities of 75, 93.75, 98.4375, 99.6 and 99.9 %."""


class Warmup(Undecided):
    """Each CF of a list for some steps, then one CF for ever; without decisions and so without a collective for them.

    The compressor's state (DGC's u and v, residuals, SIDCo's stages) goes on as the CF changes. A skipped step counts.
    A training run's configuration may say `epochs_each` in place of `steps_each`; where it says neither, each CF holds
    for one epoch, as in the paper.

    Args:
        steps_each: steps for which each CF of the list holds, >= 1. There is no default: an epoch's steps are meant.
        cfs: the list, >= 1 (dense) and never falling; a CF is 1 / (1 - sparsity).
        cf: CF of all steps after the list, at least its last; None: that last one.

    Raises ValueError for a value out of these bounds.
    """

    name = "warmup"
    source = "Lin et al. 2018, section 3.3 (warm-up training)"
    parameter_docs: ClassVar[Mapping[str, str]] = {
        "steps_each": "steps for which each CF of the list holds, >= 1; a configuration may say epochs_each instead",
        "cfs": "the list of CFs, each >= 1 and none below the one before it",
        "cf": "CF of all steps after the list, at least its last; None: that last one",
    }

    def __init__(
        self,
        steps_each: int | None = None,
        cfs: Sequence[float] = SPARSITY_CFS,
        cf: float | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock=clock)
        hint = "steps for which each factor holds; the paper's is an epoch"
        self.steps_each = None if steps_each is None else check_count("steps_each", steps_each, hint=hint)
        self.cfs = _checked(cfs)
        after = f"the factor after the list, whose last is {self.cfs[-1]:g}"
        self.cf = None if cf is None else check_number("cf", cf, self.cfs[-1], hint=after)

    def cf_at(self, step: int) -> float:
        """Raises ValueError when `steps_each` was not given."""
        if self.steps_each is None:
            raise ValueError(
                "warm-up needs steps_each, the steps for which each factor holds: give those of an epoch, "
                "Warmup(steps_each=len(loader))"
            )
        place = step // self.steps_each
        if place < len(self.cfs):
            return self.cfs[place]
        return self.cfs[-1] if self.cf is None else self.cf


def _checked(cfs: Any) -> list[float]:
    """The list, if it can be a warm-up's."""
    if not isinstance(cfs, Sequence) or isinstance(cfs, str) or not cfs:
        raise ValueError(f"cfs must be a list of compression factors such as [4, 16, 64], got {cfs!r}")
    found: list[float] = []
    for place, cf in enumerate(cfs):
        lowest = found[-1] if found else 1
        hint = f"a warm-up's factors are >= 1 and never fall; a sparsity of 75 % is 4; got {list(cfs)!r}"
        found.append(check_number(f"cfs[{place}]", cf, lowest, hint=hint))
    return found
