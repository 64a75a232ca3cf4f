"""Gaussian-k: the threshold that a normal distribution of the same mean and variance would have."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import ClassVar

from torch import Tensor

from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.sparsifier import ThresholdSparsifier, limited, moments_of, tail_of
from hvdcomp.kernels import Collected, Moments, largest

_CORRECTIONS = 3


class GaussianK(ThresholdSparsifier):
    """Sends what reaches |mean| + sigma * Phi^-1(1 - k / 2n) in magnitude, corrected in at most 3 rounds.

    The threshold is halved where fewer than 2k/3 elements reach it, and multiplied by 1.5 where more than 4k/3 do. (The
    mean's magnitude is taken, so that a gradient and its negative select alike.) If 2k elements or more are left, the k
    largest are sent; one at least is.

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all. k = max(1, floor(numel / cf)).
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays behind.
        error_feedback: keep what was not sent for the next step.
    """

    name: ClassVar[str] = "gaussiank"
    source: ClassVar[str] = "Shi et al. 2019, Algorithm 1"

    def searched(self, k: int) -> int:
        return 2 * k

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        top = tail_of(values, self.searched(k), unit, level)
        threshold = corrected(first_threshold(moments_of(values, unit, level), k), k, top.count)
        if threshold < top.bound:  # 2k elements and more reach it
            return largest(values, k, top.found)
        return limited(top.at_least(threshold), k, self.most(k), values)


def first_threshold(found: Moments, k: int) -> float:
    """The magnitude that k of the elements would reach if they were normal."""
    if found.count == 0:
        return 0.0
    quantile = NormalDist().inv_cdf(1 - k / found.count / 2) if k < found.count else 0.0
    return float(abs(found.total) / found.count + found.variance**0.5 * quantile)


def corrected(threshold: float, k: int, count: Callable[[float], int]) -> float:
    """The threshold after the rounds that bring the number of elements nearer to k.

    Args:
        count: the number of elements that reach a threshold; a number that is 2k or more need not be exact.
    """
    for _ in range(_CORRECTIONS):
        reached = count(threshold)
        if reached < 2 * k / 3:
            threshold *= 0.5
        elif reached > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return threshold
