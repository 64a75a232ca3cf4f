"""RedSync: a threshold between the mean and the largest magnitude, found by bisection."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from hvdcomp.checks import check_choice, check_count
from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.sparsifier import ThresholdSparsifier, largest_of, limited, moments_of, tail_of
from hvdcomp.kernels import Collected, largest

VARIANTS = ("threshold", "trimmed")


class RedSync(ThresholdSparsifier):
    """Sends what reaches mean + ratio * (max - mean) of the magnitudes, where the ratio is bisected in [0, 1].

    The search ends when more than k and fewer than 2k elements reach the threshold. Where no threshold is found that
    does, the last one stands; 2k elements or more are then cut to the k largest, and one at least is sent.

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all. k = max(1, floor(numel / cf)).
        variant: "threshold", or "trimmed": the ratio falls from .8 by .2 until k elements reach the threshold, of which
            the k largest are sent. Those are the k largest of all, so that this is top-k, and is computed as such.
        bisections: at most so many, >= 1.
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays behind.
        error_feedback: keep what was not sent for the next step.
    """

    name: ClassVar[str] = "redsync"
    source: ClassVar[str] = "Fang et al. 2019, trimmed top-k and threshold binary search"

    def __init__(
        self,
        cf: float = 100.0,
        variant: str = "threshold",
        bisections: int = 20,
        values: str = "fp32",
        error_feedback: bool = True,
    ) -> None:
        super().__init__(cf, values, error_feedback)
        self.variant = check_choice("variant of redsync", variant, VARIANTS)
        self.bisections = check_count("bisections", bisections, hint="each halves the range of the threshold")

    def searched(self, k: int) -> int:
        return 2 * k

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        if self.variant == "trimmed":
            return largest_of(values, k, unit, level)
        found = moments_of(values, unit, level)
        top = tail_of(values, self.searched(k), unit, level)
        threshold = bisected(found.mean_abs, found.largest, k, top.count, self.bisections)
        if threshold < top.bound:  # 2k elements and more reach it
            return largest(values, k, top.found)
        return limited(top.at_least(threshold), k, self.most(k), values)


def bisected(mean: float, top: float, k: int, count: Callable[[float], int], bisections: int) -> float:
    """A threshold in [mean, top] that more than k and fewer than 2k elements reach, or the last that was tried.

    Args:
        count: the number of elements that reach a threshold; a number that is 2k or more need not be exact.
    """
    low, high = 0.0, 1.0
    threshold = mean
    for _ in range(bisections):
        ratio = (low + high) / 2
        threshold = mean + ratio * (top - mean)
        reached = count(threshold)
        if k < reached < 2 * k:
            break
        if reached <= k:
            high = ratio
        else:
            low = ratio
    return threshold
