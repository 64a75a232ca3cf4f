"""AdaQS: less compression each time that a gradient's mean has got small beside its standard deviation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hvdcomp.checks import check_count, check_number
from hvdcomp.schedules.assigning import Assigning, Evidence, Setting, Sums
from hvdcomp.schedules.base import check_state_keys


def msdr(sums: Sums, numel: int) -> float:
    """|mean| / standard deviation of the elements; 0 where they are all zero, inf where all are alike."""
    mean = sums.total / numel if numel else 0.0
    variance = max(0.0, sums.squares / numel - mean**2) if numel else 0.0
    if variance == 0:
        return 0.0 if mean == 0 else math.inf
    return abs(mean) / math.sqrt(variance)


class AdaQS(Assigning):
    """Per tensor the next of a list of settings, whenever its gradient's mean-to-deviation ratio has fallen enough.

    It begins with the first setting, that of the most compression. After every `window` steps the ratio |mean| / std of
    rank 0's gradient, summed over them, is compared with the reference, the first one seen. Where it has fallen by the
    share `fall` or more, the tensor goes to the next setting, up to the last, and the ratio becomes the reference.

    Args:
        ladder: settings from the most to the least compression, such as ranks 1, 2, 4 of powersgd: each half of it.
        window: steps over which gradients are added up, >= 1.
        fall: relative fall of the ratio, above 0 and at most 1, that makes a tensor sensitive.

    Raises ValueError for a value out of these bounds.
    """

    name = "adaqs"
    source = "Guo et al. 2020 (ICASSP), for any method's levels as in Agarwal et al. 2021, figure 6"
    wants_sums = True
    parameter_docs: ClassVar[Mapping[str, str]] = {
        "ladder": "settings from the most to the least compression, such as [{rank: 1}, {rank: 2}, {rank: 4}]",
        "window": "steps over which gradients are added up, >= 1",
        "fall": "relative fall of |mean| / std, in (0, 1], that makes a tensor take its next setting",
    }

    def __init__(
        self,
        ladder: Sequence[Setting] = ({"rank": 1}, {"rank": 2}, {"rank": 4}),
        window: int = 100,
        fall: float = 0.5,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock=clock)
        if isinstance(ladder, (str, Mapping)) or not ladder or not all(isinstance(one, Mapping) for one in ladder):
            raise ValueError(
                f"ladder must be a list of settings such as [{{'rank': 1}}, {{'rank': 2}}], got {ladder!r}"
            )
        self.ladder = [dict(setting) for setting in ladder]
        self.window = check_count("window", window, hint="steps over which gradients are added up")
        self.fall = check_number("fall", fall, 0, 1, hint="of the ratio, relative; for a half 0.5")
        if self.fall == 0:
            raise ValueError("fall must be above 0, got 0 (every ratio would be a fall; for a half 0.5)")
        self._steps = 0
        self._references: dict[str, float] = {}
        self._rungs: dict[str, int] = {}

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(self.ladder)

    def ends_phase(self) -> bool:
        self._steps += 1
        return self._steps % self.window == 0

    def assign(self, evidence: Evidence) -> Sequence[int]:
        for unit, sums in zip(self.units, evidence.sums, strict=False):
            ratio = msdr(sums, unit.numel)
            reference = self._references.setdefault(unit.name, ratio)
            if 0 < reference < math.inf and reference - ratio >= self.fall * reference:
                self._rungs[unit.name] = min(self._rungs.get(unit.name, 0) + 1, len(self.ladder) - 1)
                self._references[unit.name] = ratio
        return [self._rungs.get(unit.name, 0) for unit in self.units]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "references": dict(self._references), "rungs": dict(self._rungs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; parameters may differ from the saved run's."""
        check_state_keys("AdaQS", state, self.state_dict())
        self._steps = state["steps"]
        self._references = dict(state["references"])
        self._rungs = {name: min(rung, len(self.ladder) - 1) for name, rung in state["rungs"].items()}
