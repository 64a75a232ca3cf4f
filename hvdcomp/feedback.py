"""Error feedback: what a worker did not send is added to its next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdcomp.kernels import Moments, Tail, accumulate


@dataclass(frozen=True)
class Accumulated:
    """What adding a unit's gradients told.

    Attributes:
        finite: every sum is finite; otherwise some of the gradients were not added.
        gradient_sq: sum of squares of the gradients, without a loss scale.
        total_sq: sum of squares of residual + gradient, None where only a part of the unit was looked at.
        moments, tail: of residual + gradient, if known; the tail holds the wanted largest elements.
    """

    finite: bool
    gradient_sq: float
    total_sq: float | None
    moments: Moments | None = None
    tail: Tail | None = None


class ErrorFeedback:
    """One unit's residual, which between :meth:`accumulate` and the step's commit holds residual + gradient.

    Args:
        numel: elements of the unit.
        dtype: float32, or float64 for float64 gradients.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = torch.zeros(numel, dtype=dtype, device=device)
        self.holds = True
        """False after a dense step, which leaves nothing behind."""
        self._written: list[list[tuple[int, int]]] = []

    def accumulate(self, gradients: Sequence[tuple[int, Tensor]], inverse_scale: float, wanted: int = 0) -> Accumulated:
        """Add flat gradients at their offsets, times ``inverse_scale``, up to the first sum that is not finite.

        Args:
            wanted: how many of the largest sums will be asked for.
        """
        whole = len(gradients) == 1 and gradients[0][1].numel() == self.residual.numel()
        done = [
            accumulate(self.residual[offset : offset + g.numel()], g, inverse_scale, wanted if whole else 0)
            for offset, g in gradients
        ]
        self._written = [accumulation.written for accumulation in done]
        return Accumulated(
            finite=all(accumulation.finite for accumulation in done),
            gradient_sq=sum(accumulation.gradient_sq for accumulation in done) * inverse_scale**2,
            total_sq=done[0].total_sq if whole else None,
            moments=done[0].moments if whole else None,
            tail=done[0].tail if whole else None,
        )

    def restore(self, gradients: Sequence[tuple[int, Tensor]], inverse_scale: float) -> None:
        """Undo :meth:`accumulate`, up to one rounding an element; what was not written stays as it is."""
        for (offset, gradient), ranges in zip(gradients, self._written, strict=True):
            for start, end in ranges:
                self.residual[offset + start : offset + end].add_(gradient[start:end], alpha=-inverse_scale)
