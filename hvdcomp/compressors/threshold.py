"""A fixed threshold."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_number
from hvdcomp.compressors.requests import Rounds, Unit, Volume
from hvdcomp.compressors.sparsifier import GatheredSparsifier, kept_elements
from hvdcomp.kernels import Collected, collect, count_at_least, largest


class Threshold(GatheredSparsifier):
    """Sends every element with a magnitude of at least ``threshold``: as many as there are, or none.

    There is no compression factor. Where more than ``max_density`` of all reach it, the largest of them are sent.

    Args:
        threshold: magnitude > 0, in the gradient's own units (with error feedback: of residual + gradient).
        max_density: the largest share of a tensor's elements that is sent, in (0, 1]; one element may always be.
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays behind.
        error_feedback: keep what was not sent for the next step.
    """

    name: ClassVar[str] = "threshold"
    source: ClassVar[str] = "Strom 2015 (values sent as they are); Sahu et al. 2021, hard threshold"
    has_levels: ClassVar[bool] = False
    takes_factors: ClassVar[bool] = False

    def __init__(
        self, threshold: float = 0.01, max_density: float = 0.1, values: str = "fp32", error_feedback: bool = True
    ) -> None:
        tiny = torch.finfo(torch.float32).tiny
        self.threshold = check_number("threshold", threshold, tiny, hint="a magnitude, in the gradient's own units")
        self.max_density = check_number("max_density", max_density, 1e-9, 1, hint="share of the elements that is sent")
        super().__init__(1 / self.max_density, values, error_feedback)

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        kept = self.select(acc, kept_elements(acc.numel(), self.cf), unit, level=0)
        return (yield from self.send(kept, acc, unit))

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        return self.sparse_requests(kept_elements(torch.Size(shape).numel(), self.cf), workers)

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        reached = count_at_least(values, self.threshold)
        return largest(values, k) if reached > k else collect(values, self.threshold, reached)
