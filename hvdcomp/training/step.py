"""One training step of a worker: forward and backward over its batches, exchange, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hvdcomp.config import RunConfig
from hvdcomp.training.data import Batch
from hvdcomp.training.models import begin_text

Loss = Callable[[Tensor, Tensor], Tensor]

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The precision that a forward pass computes in."""
    return torch.autocast(device.type, _TYPES[config.precision], enabled=config.precision != "fp32")


def make_scaler(config: RunConfig, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss so that half-precision gradients do not vanish; without effect but for fp16."""
    return torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")


class Step:
    """Makes the steps of a run.

    Several batches in a step are computed one after the other and exchanged once: their gradient is that of all their
    samples, whatever the sizes of the batches.

    Args:
        optimizer: Horovod's or hvdcomp's, made with `scaler`.
        loss: the mean over a batch.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        model: nn.Module,
        optimizer: Any,
        loss: Loss,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self._config, self._device = config, device
        self._model, self._optimizer, self._loss, self._scaler = model, optimizer, loss, scaler

    def backward(self, group: Sequence[Batch]) -> float:
        """Compute these batches' gradients. Returns this worker's mean loss."""
        if self._optimizer.backward_passes_per_step != len(group):
            self._optimizer.set_backward_passes_per_step(len(group))
        self._optimizer.zero_grad()
        total = sum(batch.total for batch in group)
        losses = [self._backward(batch, batch.weight * batch.total / total) for batch in group]
        samples = sum(batch.samples for batch in group)
        return sum(batch.samples * loss for batch, loss in zip(group, losses, strict=True)) / samples

    def update(self) -> None:
        """Exchange the gradients and update the parameters."""
        limit = self._config.optimizer.clip_norm
        if limit is None and not self._scaler.is_enabled():
            self._optimizer.step()
            return
        self._optimizer.synchronize()
        self._scaler.unscale_(self._optimizer)
        if limit is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        with self._optimizer.skip_synchronize():
            self._scaler.step(self._optimizer)
        self._scaler.update()

    def _backward(self, batch: Batch, weight: float) -> float:
        inputs, targets = (to_device(part, self._device) for part in (batch.inputs, batch.targets))
        if batch.first:
            begin_text(self._model)
        with autocast(self._config, self._device):
            loss = self._loss(self._model(inputs), targets)
        self._scaler.scale(loss if weight == 1 else loss * weight).backward()
        return float(loss.detach())


def to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
