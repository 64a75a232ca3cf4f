"""Eight bits an element, at even distances between the tensor's extremes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.quantised import Deterministic, blank, split
from hvdcomp.compressors.requests import Unit
from hvdcomp.kernels.codes import STEPS, add_lookup_, round_steps


class Int8(Deterministic):
    """Sends the nearest of 256 numbers at even distances from the tensor's least to its greatest.

    The error is at most (max - min) / 510. One outlier makes that more than most elements have, and zero is none of the
    256, so that by default what is rounded off is kept for the next step. Every tensor is compressed.

    Args:
        error_feedback: keep what was rounded off for the next step.
    """

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "8-bit min-max quantisation; Dettmers 2015 compares 8-bit types"

    def __init__(self, error_feedback: bool = True) -> None:
        if not isinstance(error_feedback, bool):
            raise ValueError(f"error_feedback must be True or False, got {error_feedback!r} (keep what is rounded off)")
        self.error_feedback = error_feedback

    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        return 2 * itemsize + numel

    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        payload, ends, codes = blank(2, values.numel(), values)
        ends[0], ends[1] = round_steps(values, codes)
        return payload

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        ends, codes = split(payload, 2, out.dtype)
        part = torch.arange(STEPS + 1, dtype=torch.float64, device=ends.device) / STEPS
        add_lookup_(out, codes, 8, weight * (ends[0] * (1 - part) + ends[1] * part))

    def largest(self, payload: Tensor, dtype: torch.dtype) -> float:
        return float(split(payload, 2, dtype)[0].abs().max())
