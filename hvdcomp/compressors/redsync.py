"""RedSync: a threshold between the mean and the largest magnitude, found by bisection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from hvdcomp.checks import check_choice, check_count, check_flag
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.sparsifier import ThresholdSparsifier, largest_of, limited, moments_of, tail_of
from hvdcomp.kernels import Collected, largest
from hvdcomp.wire import MEAN

VARIANTS = ("threshold", "trimmed")


class RedSync(ThresholdSparsifier):
    """Sends what reaches mean + ratio * (max - mean) of the magnitudes, where the ratio is bisected in [0, 1].

    The search ends when more than k and fewer than 2k elements reach the threshold. Where no threshold is found that
    does, the last one stands; 2k elements or more are then cut to the k largest, and one at least is sent.

    Quantised, it sends positions and one number, the mean of what stands there. That needs values of one sign: positive
    ones are sent at even steps, negative ones at odd steps, and where a tensor has none of the step's sign, those of
    the other. Fewer than k are sent where fewer have the sign, and a zero where all are zero.

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all. k = max(1, floor(numel / cf)).
        variant: "threshold", or "trimmed": the ratio falls from .8 by .2 until k elements reach the threshold, of which
            the k largest are sent. Those are the k largest of all, so that this is top-k, and is computed as such.
        bisections: at most so many, >= 1.
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays behind.
        error_feedback: keep what was not sent for the next step.
        quantise: send the mean in place of the values, whose type must then be "fp32"; no adaptive schedule can be
            used, since its gain is that of a selection.
    """

    name: ClassVar[str] = "redsync"
    source: ClassVar[str] = "Fang et al. 2019, trimmed top-k, threshold binary search, quantisation"

    def __init__(
        self,
        cf: float = 100.0,
        variant: str = "threshold",
        bisections: int = 20,
        values: str = "fp32",
        error_feedback: bool = True,
        quantise: bool = False,
    ) -> None:
        super().__init__(cf, values, error_feedback)
        self.variant = check_choice("variant of redsync", variant, VARIANTS)
        self.bisections = check_count("bisections", bisections, hint="each halves the range of the threshold")
        self.quantise = check_flag("quantise", quantise, hint="send the mean of the chosen values in their place")
        if quantise and values != "fp32":
            raise ValueError(f"quantise sends no values, so that their type must be 'fp32', got {values!r}")

    @property
    def wire_type(self) -> str:
        return MEAN if self.quantise else self.values

    def as_selector(self) -> Compressor:
        """Raises ValueError when the means would be sent."""
        if self.quantise:
            raise ValueError(
                "redsync with quantise=True does not fit an adaptive schedule, which measures the gain of a selection, "
                "not of its mean: use quantise=False, or schedule 'static' or 'warmup'"
            )
        return self

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return Compressor.compress(self, tensor) if self.quantise else super().compress(tensor)  # it needs the step

    def searched(self, k: int) -> int:
        return 0 if self.quantise else 2 * k

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        if not self.quantise:
            return self._select(values, k, unit, level)
        sign = 1 if unit.step % 2 == 0 else -1
        for signed in (values * sign, values * -sign):
            found = self._select(signed.clamp_(min=0), k, unit, level=1)  # these are not acc
            chosen = (found.values > 0).nonzero().flatten()
            if chosen.numel():
                positions = found.positions[chosen]
                return Collected(positions, values[positions])
        return largest(values, 1)

    def _select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        if self.variant == "trimmed":
            return largest_of(values, k, unit, level)
        found = moments_of(values, unit, level)
        top = tail_of(values, 2 * k, unit, level)
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
