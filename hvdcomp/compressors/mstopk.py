"""MSTopK: k elements between two thresholds that bisection closes in on."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_count
from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.sparsifier import GatheredSparsifier, moments_of, tail_of
from hvdcomp.kernels import Collected, collect, largest


class MSTopK(GatheredSparsifier):
    """Sends exactly k = max(1, floor(numel / cf)) elements, nearly the largest ones.

    Bisection of [mean, max] of the magnitudes gives t1, the lowest threshold that at most k elements reach, and t2, the
    highest that more than k reach. All that reach t1 are sent, and of those between t2 and t1 as many as are missing,
    at even distances.

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all.
        bisections: of [mean, max], >= 1; the paper's N. The more, the nearer to top-k.
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays behind.
        error_feedback: keep what was not sent for the next step.
    """

    name: ClassVar[str] = "mstopk"
    source: ClassVar[str] = "Shi et al. 2021, Algorithm 1"

    def __init__(
        self, cf: float = 100.0, bisections: int = 20, values: str = "fp32", error_feedback: bool = True
    ) -> None:
        super().__init__(cf, values, error_feedback)
        self.bisections = check_count("bisections", bisections, hint="of the range of magnitudes; the paper's N")

    def searched(self, k: int) -> int:
        return k + 1

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        if k >= values.numel():
            return largest(values, k)
        found = moments_of(values, unit, level)
        top = tail_of(values, self.searched(k), unit, level)
        above, below = bracket(found.mean_abs, found.largest, k, top.count, self.bisections)
        reach_below = collect(values, below, 2 * k, top)
        magnitude = reach_below.values.abs()
        chosen = magnitude >= above
        between = (~chosen).nonzero().flatten()
        missing = k - int(chosen.sum())
        steps = torch.arange(missing, device=values.device)
        chosen[between[steps * between.numel() // max(missing, 1)]] = True
        kept = chosen.nonzero().flatten()
        return Collected(reach_below.positions[kept], reach_below.values[kept])


def bracket(mean: float, top: float, k: int, count: Callable[[float], int], bisections: int) -> tuple[float, float]:
    """(t1, t2): the lowest threshold met that at most k elements reach, and the highest that more than k reach.

    Before any is met they are above the largest magnitude, and the mean; 0 where no more than k reach the mean.

    Args:
        count: the number of elements that reach a threshold; a number that is more than k need not be exact.
    """
    above, below = float("inf"), mean if count(mean) > k else 0.0
    low, high = 0.0, 1.0
    for _ in range(bisections):
        ratio = (low + high) / 2
        threshold = mean + ratio * (top - mean)
        if count(threshold) <= k:
            above, high = threshold, ratio
        else:
            below, low = threshold, ratio
    return above, below
