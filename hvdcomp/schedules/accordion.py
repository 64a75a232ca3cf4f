"""Accordion: little compression in critical regimes, where the gradient's norm changes fast, and much elsewhere.

Agarwal et al., "Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification", Algorithm 1.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hvdcomp.checks import check_count, check_flag, check_number
from hvdcomp.schedules.assigning import Assigning, Evidence, Setting
from hvdcomp.schedules.base import LrWatch, check_below_1, check_state_keys

LOW, HIGH = 0, 1
"""Indices of the settings: of little compression, and of much."""


def is_critical(before: float, now: float, eta: float) -> bool:
    """Whether a norm has changed by at least the share ``eta`` of what it was; where it was 0, or none, it has.

    >>> [is_critical(*norms, 0.5) for norms in ((1, 0.4), (2, 1.5), (0, 5), (1, 0.5))]
    [True, False, True, True]
    """
    return before == 0 or abs(before - now) >= eta * before


_DOCS: dict[str, str] = {
    "eta": "relative change of a gradient's norm, in [0, 1], from which on a regime is critical",
    "interval": "epochs between two looks, >= 1",
    "lr_drop": "a learning rate that falls to this share or less, in [0, 1), makes all critical until the next look",
}


class Accordion(Assigning):
    """Per tensor one of two settings: `low` compression in critical regimes, `high` elsewhere.

    After every `interval`-th epoch, the first one included, rank 0 compares each tensor's gradient, its own and summed
    over the epoch, with that of the last look. A tensor whose norm has changed by `eta` or more is critical, and so is
    one that had none before. So all are at first, and after a drop of the learning rate until the next look. The paper
    takes any decrease for a drop; a rate that falls every step, as a cosine does, would then always be one.

    An epoch is `steps_per_epoch` steps that were not skipped. A drop is known one step ahead where the next rate is
    told (`optimizer.next_lr`), else with the first step that uses it, and answered from the step after that.

    Args:
        low: the setting of little compression, parameters of the method such as {"rank": 2}, or with "name" another.
        high: that of much, such as {"rank": 1}.
        steps_per_epoch: >= 1. There is no default; a training run's configuration may leave it out.
        eta: from 0 to 1.
        interval: epochs from look to look, >= 1.
        lr_drop: from 0 to below 1.

    Raises ValueError for a value out of these bounds.
    """

    name = "accordion"
    source = "Agarwal et al. 2021 (Accordion), Algorithm 1 and section 5.1"
    wants_sums = True
    parameter_docs: ClassVar[Mapping[str, str]] = {
        "low": "setting of little compression, such as {rank: 2}; with `name` another method",
        "high": "setting of much compression, such as {rank: 1}",
        "steps_per_epoch": "steps of an epoch, >= 1; a configuration may leave it out",
        **_DOCS,
    }

    def __init__(
        self,
        low: Setting | None = None,
        high: Setting | None = None,
        steps_per_epoch: int | None = None,
        eta: float = 0.5,
        interval: int = 10,
        lr_drop: float = 0.75,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock=clock)
        self.low, self.high = _setting("low", low), _setting("high", high)
        self.steps_per_epoch = None if steps_per_epoch is None else check_count(
            "steps_per_epoch", steps_per_epoch, hint="over which gradients are added up; len(loader)"
        )  # fmt: skip
        self.eta = check_number("eta", eta, 0, 1, hint=_DOCS["eta"])
        self.interval = check_count("interval", interval, hint=_DOCS["interval"])
        self.lr_drop = check_below_1("lr_drop", lr_drop)
        self._steps = 0
        self._lr = LrWatch(self.lr_drop)
        self._norms: dict[str, float] = {}
        self._levels: dict[str, int] = {}

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Raises ValueError where low, high or steps_per_epoch was not given."""
        if self.low is None or self.high is None:
            raise ValueError(
                'accordion needs two settings: low, of little compression, and high, such as low={"rank": 2}, '
                'high={"rank": 1} for powersgd'
            )
        self._epoch()
        return (self.low, self.high)

    @property
    def gathers(self) -> bool:
        return self._steps // self._epoch() % self.interval == 0

    def ends_phase(self) -> bool:
        last = self.gathers
        self._steps += 1
        return last and self._steps % self._epoch() == 0

    def assign(self, evidence: Evidence) -> Sequence[int]:
        if evidence.sums:
            for unit, sums in zip(self.units, evidence.sums, strict=True):
                critical = is_critical(self._norms.get(unit.name, 0.0), sums.norm, self.eta)
                self._levels[unit.name] = LOW if critical else HIGH
                self._norms[unit.name] = sums.norm
        if self._lr.drops_to(evidence.next_lr):
            self._levels.clear()
        return [self._levels.get(unit.name, LOW) for unit in self.units]

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "lr": self._lr.last,
            "norms": dict(self._norms),
            "levels": dict(self._levels),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; parameters may differ from the saved run's."""
        check_state_keys("Accordion", state, self.state_dict())
        self._steps = state["steps"]
        self._lr = LrWatch(self.lr_drop, state["lr"])
        self._norms, self._levels = dict(state["norms"]), dict(state["levels"])

    def _epoch(self) -> int:
        if self.steps_per_epoch is None:
            raise ValueError("accordion needs steps_per_epoch: give Accordion(..., steps_per_epoch=len(loader))")
        return self.steps_per_epoch


class BatchSize(ABC):
    """A batch that grows between epochs, and the learning rate with it; `batch` is that of the next step.

    For a training loop of one's own, once an epoch::

        batch = sizes.after_epoch(norm, lr, next_lr)     # norm: of the gradient summed over the epoch
        passes, scale = sizes.passes(per_pass), sizes.factor
        optimizer.set_backward_passes_per_step(passes)   # gradients are summed: divide the loss by passes
        for group in optimizer.param_groups: group["lr"] = next_lr * scale

    Args:
        low: the first batch, samples of all workers in a step, >= 1.

    Raises ValueError for another.
    """

    name: ClassVar[str]
    source: ClassVar[str]

    def __init__(self, low: int) -> None:
        self.low = check_count("low", low, hint="samples of all workers in a step")
        self.batch = self.low
        """Samples of all workers in a step."""

    @property
    def factor(self) -> float:
        """What the learning rate of the first batch is multiplied by: it grows as the batch does."""
        return self.batch / self.low

    @property
    def gathers(self) -> bool:
        """Whether this epoch's gradients are looked at when it is over: of other epochs the norm is not."""
        return False

    def passes(self, per_pass: int) -> int:
        """Backward passes of ``per_pass`` samples of all workers that make a batch; ValueError for a remainder."""
        if self.batch % check_count("per_pass", per_pass, hint="samples of all workers in a backward pass"):
            raise ValueError(f"per_pass must divide the batch of {self.batch}, got {per_pass}")
        return self.batch // per_pass

    @abstractmethod
    def after_epoch(self, norm: float, lr: float, next_lr: float | None = None) -> int:
        """The batch of the next epoch.

        Args:
            norm: of the gradient summed over the epoch (of the tensors together), before any residual.
            lr: of the epoch, for the first batch; next_lr: of the next one, None if it stays.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it has learned, as JSON-able values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. Raises ValueError for unknown or missing keys."""


class AccordionBatchSize(BatchSize):
    """Accordion's other mode: a small batch in critical regimes, a large one elsewhere; one decision for the model.

    Every `interval`-th epoch, the first one included, compares the norm with that of the last look. All workers must be
    told the same norm, such as worker 0's; then all decide alike.

    Args:
        low: batch of critical regimes, >= 1; the first one.
        high: batch elsewhere, a multiple of low.
        eta, interval, lr_drop: as of :class:`Accordion`.
        shrinks: go back to the small batch in a critical regime; False, as in the paper's runs, only grows.

    Raises ValueError for a value out of these bounds.
    """

    name = "accordion"
    source = "Agarwal et al. 2021 (Accordion), section 4.3 and appendix A"

    def __init__(
        self,
        low: int = 512,
        high: int = 4096,
        eta: float = 0.5,
        interval: int = 10,
        lr_drop: float = 0.75,
        shrinks: bool = False,
    ) -> None:
        super().__init__(low)
        self.high = check_count("high", high, self.low, hint=f"low is {low}")
        if self.high % self.low:
            raise ValueError(f"high must be a multiple of low, got {high} of {low} (gradients are accumulated)")
        self.eta = check_number("eta", eta, 0, 1, hint=_DOCS["eta"])
        self.interval = check_count("interval", interval, hint=_DOCS["interval"])
        self.lr_drop = check_below_1("lr_drop", lr_drop)
        self.shrinks = check_flag("shrinks", shrinks, hint="go back to the small batch in a critical regime")
        self._epoch = 0
        self._norm = 0.0

    @property
    def gathers(self) -> bool:
        return self._epoch % self.interval == 0

    def after_epoch(self, norm: float, lr: float, next_lr: float | None = None) -> int:
        norm = check_number("norm", norm, 0, hint="of the gradient summed over the epoch")
        if self.gathers:
            critical = is_critical(self._norm, norm, self.eta)
            self._norm = norm
            if not critical:
                self.batch = self.high
            elif self.shrinks:
                self.batch = self.low
        if self.shrinks and next_lr is not None and next_lr <= self.lr_drop * lr:
            self.batch = self.low
        self._epoch += 1
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "epoch": self._epoch, "norm": self._norm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys("AccordionBatchSize", state, self.state_dict())
        self.batch, self._epoch, self._norm = state["batch"], state["epoch"], state["norm"]


class SmithBatchSize(BatchSize):
    """Where a step schedule would divide the learning rate, the batch is multiplied, and the rate stays.

    Between epochs: where the rate falls within one, the batch grows when it is over.

    Args:
        low: batch of the first steps, >= 1.
        high: batch beyond which the rate is divided after all; None: no limit.

    Raises ValueError for a value out of these bounds.
    """

    name = "smith"
    source = "Smith et al. 2018 (Don't decay the learning rate, increase the batch size)"

    def __init__(self, low: int = 512, high: int | None = None) -> None:
        super().__init__(low)
        self.high = None if high is None else check_count("high", high, self.low, hint=f"low is {low}")
        self._highest_lr = 0.0

    def at(self, lr: float, first_lr: float) -> tuple[int, float]:
        """(batch, learning rate) where the schedule would have come from ``first_lr`` to ``lr``.

        A batch is a multiple of the first one; what that rounds off, and what is beyond the largest, the rate takes.

        >>> SmithBatchSize(128, high=1280).at(0.001, 0.1)
        (1280, 0.01)
        """
        wanted = max(1, round(first_lr / lr)) if lr > 0 else 1
        most = wanted if self.high is None else self.high // self.low
        times = max(1, min(wanted, most))
        return self.low * times, lr * times

    def after_epoch(self, norm: float, lr: float, next_lr: float | None = None) -> int:
        """The batch of the next epoch, by how far its rate is below the highest so far: a warm-up comes first."""
        self._highest_lr = max(self._highest_lr, lr)
        self.batch, _ = self.at(lr if next_lr is None else next_lr, self._highest_lr)
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "highest_lr": self._highest_lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys("SmithBatchSize", state, self.state_dict())
        self.batch, self._highest_lr = state["batch"], state["highest_lr"]


def _setting(name: str, setting: Any) -> dict[str, Any] | None:
    if setting is not None and not isinstance(setting, Mapping):
        raise ValueError(f'{name} must be parameters of the method such as {{"rank": 2}}, got {setting!r}')
    return None if setting is None else dict(setting)
