"""SIDCo: the threshold is a quantile of a distribution that is fitted to the magnitudes, in several stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.requests import Rounds, Unit
from hvdcomp.compressors.sparsifier import ThresholdSparsifier, limited, moments_of
from hvdcomp.kernels import Collected, Moments, Tail, above, collect_above, largest, mean_log, moments

FIRST_SHARE = 0.25
"""What the first of several stages keeps."""
WINDOW = 5
"""Steps after which the number of stages is looked at."""
BAND = (0.8, 1.2)
"""The mean of (elements found / elements wanted) within which the number of stages is left alone."""
REST_WINDOW = 20
REST_BAND = (0.77, 1.28)
"""The same once a window was within the band: a mean at its edge must not be moved whenever noise takes it out."""
HOLD_WINDOW = 100
"""Steps for which it stays where no neighbour is better."""
_FLAT = 1e-4
"""|shape| of a generalised Pareto distribution below which it is taken as the exponential that it tends to."""

Fit = Callable[[Tensor, float, float, float], float]
"""(values, mean and unbiased variance of the excess over the last threshold, share) -> the share's quantile of it."""


def exponential(values: Tensor, mean: float, variance: float, share: float) -> float:
    """Quantile of an exponential distribution: mean * ln(1 / share)."""
    return -mean * math.log(share)


def pareto(values: Tensor, mean: float, variance: float, share: float) -> float:
    """Quantile of a generalised Pareto distribution that is fitted by moments; nan without a variance."""
    ratio = mean * mean / variance if variance > 0 else math.nan
    shape = (ratio - 1) / 2
    if abs(shape) < _FLAT:
        return exponential(values, mean, variance, share)
    return mean * (ratio + 1) / 2 * (1 - share**shape) / shape


def gamma(values: Tensor, mean: float, variance: float, share: float) -> float:
    """Quantile of a gamma distribution: shape by the closed form of Minka, quantile exact; nan where all are alike."""
    s = math.log(mean) - mean_log(values) if mean > 0 else math.nan
    if not s > 0:
        return math.nan
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return mean / alpha * gamma_quantile(alpha, share)


def gamma_quantile(alpha: float, share: float) -> float:
    """x with a share of the gamma distribution (shape ``alpha``, scale 1) above it."""
    shape = torch.tensor(alpha, dtype=torch.float64)

    def above(x: float) -> float:
        return float(torch.special.gammaincc(shape, torch.tensor(x, dtype=torch.float64)))

    low, high = 0.0, alpha + 1
    while above(high) > share:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) > share else (low, middle)
    return (low + high) / 2


def stage_shares(share: float, stages: int) -> list[float]:
    """What each stage keeps of what the last one left; their product is ``share``."""
    if stages == 1 or share >= FIRST_SHARE:
        return [share]
    return [FIRST_SHARE] + [(share / FIRST_SHARE) ** (1 / (stages - 1))] * (stages - 1)


def most_stages(share: float) -> int:
    return max(1, math.ceil(-math.log2(share)))


@dataclass(frozen=True)
class Estimate:
    """A threshold, and what is larger than it."""

    threshold: float
    found: Collected


def estimate(
    values: Tensor,
    share: float,
    stages: int,
    first: Fit,
    later: Fit,
    whole: Moments | None = None,
    known: Tail | None = None,
) -> Estimate:
    """The threshold that about ``share`` of the magnitudes exceed.

    Args:
        values: (n,), n > 0.
        stages: the more there are, the smaller the part of the tail that each extrapolates; each but the first takes a
            pass over the values, or over the known tail.
        first: fits the magnitudes of all values.
        later: fits the excess of what is left over the last threshold.
        whole, known: the values' moments, and largest elements, where they are known already.
    """
    whole = moments(values) if whole is None else whole
    shares = stage_shares(share, stages)
    threshold = _quantile(first, values, whole.mean_abs, whole.variance_abs, shares[0])
    for part in shares[1:]:
        left = above(known.found.values if known is not None and threshold >= known.bound else values, threshold)
        if left.count == 0:
            break
        threshold += _quantile(later, values, left.excess / left.count, left.variance, part)
    return Estimate(threshold, collect_above(values, threshold, math.ceil(share * values.numel()), known))


def _quantile(fit: Fit, values: Tensor, mean: float, variance: float, share: float) -> float:
    """A fit's quantile, or the exponential one where the fit gives none."""
    excess = fit(values, mean, variance, share)
    return excess if math.isfinite(excess) and excess >= 0 else exponential(values, mean, variance, share)


@dataclass(frozen=True)
class Stages:
    """A tensor's number of stages, and what moves it: see :meth:`observed`.

    Attributes:
        stages: in [1, ceil(log2(1 / share))].
        direction: of the last move, -1 or 1; 0 before the first, and after a window within the band.
        error: |ln(found / wanted)| of the window before that move; 0 after a window within the band.
        total, count: the present window's sum of found / wanted, and its steps.
        share: wanted elements / all, that this is about.
        turned: 0 as long as moves help; 1 after one that did not; 2 while the other side is tried; 3 where neither did.
    """

    stages: int = 1
    direction: int = 0
    error: float = math.inf
    total: float = 0.0
    count: int = 0
    share: float = 1.0
    turned: int = 0

    def for_share(self, share: float) -> Stages:
        """What holds for this share: the stages are kept, what was seen under a rather different share is not."""
        if abs(math.log(share / self.share)) < 0.1:
            return self
        return Stages(min(self.stages, most_stages(share)), share=share)

    def observed(self, found: int, wanted: int) -> Stages:
        """After another step. Every 5 steps, a mean of found / wanted outside the band moves the stages by one.

        The first move is the authors': fewer stages if too many were found, more if too few. It goes on in that
        direction as long as the error falls, and turns where it does not, or where the range of stages ends. Within the
        band it rests, and looks at 20 steps and a slightly wider band. Where it has turned on both sides, no number of
        stages is better, which residuals bring about: it stays for 100 steps, and tries one side again.
        """
        total, count = self.total + found / wanted, self.count + 1
        resting = self.error == 0
        if count < (REST_WINDOW if resting else HOLD_WINDOW if self.turned == 3 else WINDOW):
            return replace(self, total=total, count=count)
        mean = total / count
        low, high = REST_BAND if resting else BAND
        if low <= mean <= high:
            return Stages(self.stages, error=0.0, share=self.share)
        error = abs(math.log(max(mean, 0.5 / wanted)))
        direction = self.direction or (-1 if mean > 1 else 1)
        turned = 2 if self.turned in (1, 3) else 0
        if self.direction and error >= self.error:
            direction, turned = -direction, 3 if self.turned == 2 else 1
        if not 1 <= self.stages + direction <= most_stages(self.share):
            direction = -direction
        stages = min(max(self.stages + direction, 1), most_stages(self.share))
        return Stages(stages, direction, error, share=self.share, turned=turned)

    def to_tensor(self) -> Tensor:
        numbers = (self.stages, self.direction, self.error, self.total, self.count, self.share, self.turned)
        return torch.tensor(numbers, dtype=torch.float64)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Stages:
        stages, direction, error, total, count, share, turned = tensor.tolist()
        return cls(int(stages), int(direction), error, total, int(count), share, int(turned))


class SIDCo(ThresholdSparsifier):
    """What is larger than a fitted distribution's quantile is sent; every tensor has its own number of stages.

    If 2k elements or more are larger, the k largest are sent; one at least is. k = max(1, floor(numel / cf)).

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all.
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays behind.
        error_feedback: keep what was not sent for the next step.
    """

    source: ClassVar[str] = "Abdelmoniem et al. 2021"
    fits: ClassVar[tuple[Fit, Fit]]
    """Of the magnitudes, and of the excesses of later stages."""

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        unit.next_state = {}
        outcome = yield from super().rounds(acc, unit)
        if unit.next_state:
            outcome.state = unit.state | unit.next_state
        return outcome

    def searched(self, k: int) -> int:
        return math.ceil(1.5 * k)  # within the band, what is found is fewer

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        if k >= values.numel():
            return largest(values, k)
        key = f"stages.{level}"
        share = k / values.numel()
        state = Stages.from_tensor(unit.state[key]) if key in unit.state else Stages()
        state = state.for_share(share)
        known = unit.tail if level == 0 else None
        result = estimate(values, share, state.stages, *self.fits, moments_of(values, unit, level), known)
        unit.next_state[key] = state.observed(result.found.values.numel(), k).to_tensor()
        return limited(result.found, k, self.most(k), values)


class SIDCoE(SIDCo):
    __doc__ = f"""SIDCo with an exponential distribution at every stage. {SIDCo.__doc__}"""
    name: ClassVar[str] = "sidcoe"
    fits: ClassVar[tuple[Fit, Fit]] = (exponential, exponential)


class SIDCoGP(SIDCo):
    __doc__ = f"""SIDCo with a gamma distribution, then generalised Pareto distributions. {SIDCo.__doc__}"""
    name: ClassVar[str] = "sidcogp"
    fits: ClassVar[tuple[Fit, Fit]] = (gamma, pareto)


class SIDCoP(SIDCo):
    __doc__ = f"""SIDCo with a generalised Pareto distribution at every stage. {SIDCo.__doc__}"""
    name: ClassVar[str] = "sidcop"
    fits: ClassVar[tuple[Fit, Fit]] = (pareto, pareto)
