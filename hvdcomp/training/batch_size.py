"""How many batches a step takes: a fixed number, or as Accordion's or Smith's schedule decides after each epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hvdcomp.config import RunConfig
from hvdcomp.schedules import AccordionBatchSize, BatchSize, SmithBatchSize


class BatchSizes:
    """Batches of `data.batch_size` in a step, and the learning rate that suits them.

    Accordion compares gradients that are summed up over an epoch. These are the exchanged ones, each as often as its
    step had batches: all workers have the same, and decide alike. (The paper takes one worker's own.)

    Raises ValueError for sizes that so many workers cannot have.
    """

    def __init__(self, config: RunConfig, workers: int) -> None:
        self._fixed, self._per_pass = config.accumulate, workers * config.data.batch_size
        self._schedule: BatchSize | None = None
        self._sum: dict[str, Tensor] = {}
        given = config.batch_schedule
        if given.name == "accordion":
            self._schedule = AccordionBatchSize(**given.model_dump(exclude={"name"}))
        elif given.name == "smith":
            self._schedule = SmithBatchSize(given.low, given.high)
        if self._schedule is not None:
            self._schedule.passes(self._per_pass)

    @property
    def passes(self) -> int:
        """Batches of each worker in a step."""
        return self._fixed if self._schedule is None else self._schedule.passes(self._per_pass)

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied by."""
        return 1.0 if self._schedule is None else self._schedule.factor

    def add(self, parameters: Iterable[tuple[str, nn.Parameter]], passes: int) -> None:
        """Take note of the gradients of a step of so many batches."""
        if self._schedule is None or not self._schedule.gathers:
            return
        for name, parameter in parameters:
            if parameter.grad is not None:
                gradient = parameter.grad.detach().to_dense()
                if name in self._sum:
                    self._sum[name].add_(gradient, alpha=passes)
                else:
                    self._sum[name] = passes * gradient

    def end_epoch(self, lr: float, next_lr: float) -> None:
        """Decide on the next epoch; the rates are those of its last step and of the next one, without `factor`."""
        if self._schedule is not None:
            squares = sum(float(total.double().square().sum()) for total in self._sum.values())
            self._schedule.after_epoch(math.sqrt(squares), lr, next_lr)
            self._sum = {}

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self._schedule.state_dict() if self._schedule else None, "sum": dict(self._sum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._schedule is not None and state["schedule"] is not None:
            self._schedule.load_state_dict(state["schedule"])
            self._sum = dict(state["sum"])
