"""Error feedback: what a worker did not send is added to its next gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEAR_OVERFLOW_SQ = 1e60
"""Squared norm of a gradient from which on residual + gradient is checked before it is written."""


class ErrorFeedback:
    """One unit's residual, which between :meth:`accumulate` and the step's commit holds residual + gradient.

    Args:
        numel: elements of the unit.
        dtype: float32, or float64 for float64 gradients.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = torch.zeros(numel, dtype=dtype, device=device)
        self._near_overflow = False

    def accumulate(self, gradients: Sequence[tuple[int, Tensor]], grad_sq: float, inverse_scale: float) -> bool:
        """Add finite flat gradients at their offsets, times ``inverse_scale``.

        Returns False, and leaves the residual as it was, where the sum is not finite.
        """
        self._near_overflow |= grad_sq > _NEAR_OVERFLOW_SQ
        if self._near_overflow:
            return self._accumulate_checked(gradients, inverse_scale)
        self._add(self.residual, gradients, inverse_scale)
        return True

    def restore(self, gradients: Sequence[tuple[int, Tensor]], inverse_scale: float) -> None:
        """Undo :meth:`accumulate`, up to one rounding an element."""
        self._add(self.residual, gradients, -inverse_scale)

    def _accumulate_checked(self, gradients: Sequence[tuple[int, Tensor]], inverse_scale: float) -> bool:
        total = self.residual.clone()
        self._add(total, gradients, inverse_scale)
        finite = bool(torch.isfinite(total).all())
        if finite:
            self.residual.copy_(total)
        return finite

    @staticmethod
    def _add(target: Tensor, gradients: Sequence[tuple[int, Tensor]], factor: float) -> None:
        for offset, gradient in gradients:
            target[offset : offset + gradient.numel()].add_(gradient, alpha=factor)
