"""GraVAC: raises the compression factor while the gradient keeps enough of itself and throughput still grows.

Tyagi and Swany, "GraVAC: Adaptive Compression for Communication-Efficient Distributed DL Training", Algorithm 1. Where
the listing contradicts the prose (it scales before it moves cf_min, lets step * cf_min overshoot, and returns the CF of
the second-largest throughput), the prose holds.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hvdcomp.checks import check_choice, check_count, check_flag, check_number
from hvdcomp.schedules.base import (
    DENSE,
    Decision,
    LrWatch,
    Schedule,
    Statistics,
    check_below_1,
    check_state_keys,
)

Policy = Literal["exponential", "geometric"]
Gain = Literal["squared", "norm", "raw"]
Throughput = Literal["mean", "last"]
Per = Literal["model", "bucket"]

DENSE_CF = 1.0


@dataclass(frozen=True)
class _Gain:
    """A smoothed gain: two moving averages and their ratio (1 where nothing is there to lose)."""

    kept: float
    whole: float

    @property
    def value(self) -> float:
        return self.kept / self.whole if self.whole > 0 else 1.0

    def smoothed(self, newest: _Gain, factor: float) -> _Gain:
        """The exponentially weighted averages after `newest`, which counts by `factor` in (0, 1]."""
        return _Gain(
            self.kept + factor * (newest.kept - self.kept),
            self.whole + factor * (newest.whole - self.whole),
        )


@dataclass(frozen=True)
class _Record:
    """Compression throughput of one CF: `total / count` samples per second."""

    total: float
    count: int

    @property
    def mean(self) -> float:
        return self.total / self.count


class GraVAC(Schedule):
    """Searches for the CF of the highest compression throughput among those that keep `epsilon` of the gradient.

    Every step evaluates two CFs: cf_min, the safe one, and a candidate above it (first cf_min itself). A step sends the
    candidate if the candidate's gain is at least epsilon, else cf_min if that one's is, else the dense gradient. After
    `window` decided steps the policy proposes the next candidate; cf_min moves up to the candidate just evaluated if
    their gains differ by at most omega; and where the two largest recorded compression throughputs
    (samples * workers / seconds * gain) differ by at most omega, throughput has saturated: the candidate becomes the
    LOWER CF of the two, or cf_min if that is higher. The search never ends: every window asks again, and goes on above
    the candidate when throughputs part.

    A window ends inside `decide`, after its last step was decided, since that decision must already tell all ranks what
    to evaluate next. So it knows every time but the one of its own last step, which counts in the next window.
    A skipped step (NaN or Inf) changes nothing: not the averages, not the window, and its `observe` is ignored.

    Args:
        cf_min: first and lowest CF (original size / compressed size), >= 1. At CF 1 the dense gradient is sent.
        cf_max: highest CF, >= cf_min; candidates are clamped to it and stay there.
        policy: "exponential": candidates at cf_min times 1, r, r^2, r^4, r^8, ...; "geometric": 1, r, r^2, r^3, ...;
            always of the first cf_min, with r = ratio.
        epsilon: smallest gain in [0, 1] at which a CF may be sent. It decides everything: with error feedback the
            squared gain is often near .75 at CF 10, .16 at CF 100, .03 at CF 1000, long before accuracy suffers.
        omega: relative difference, in [0, 1], up to which two gains or two throughputs count as equal.
        window: steps for which a candidate is evaluated, >= 1.
        gain: "squared": moving average of sum ||C(g+r)||^2 / sum ||g+r||^2 (the paper); "norm": of its root; "raw": of
            sum ||C(g+r)|| over that of sum ||g||, un-squared (the authors' code), which can pass 1.
        throughput: of several recordings of a CF keep the "mean" (the paper's figures) or the "last" (its listing).
        ratio: r of the policy, >= 1.01.
        per: "model" (the paper): one search for all; "bucket": each bucket (`bucket_mb`) has a search of its own, by
            its own gains and the whole step's time, and sends at its own CF.
        exact: a step compresses at cf_min and then at the candidate, and its own gains decide what it sends, as in the
            paper. False: a step compresses once, at the factor that the last step's gains decided, and gains are
            estimated from a sample of the gradient, as those of the largest elements: it then costs little beyond a
            static factor, and buckets leave while the backward pass still runs.
        lr_drop: the search is opened again when the learning rate falls to this share of itself or less; None: never.
        loss_rise: the same when rank 0's loss (a moving average over about `window` steps) has risen by this share of
            its lowest; None: never.
        gain_fall: the same when cf_min's gain has fallen by this share of what it was as the last window ended.

    Opened again, the search starts as at first, from the first cf_min; averages and recorded throughputs are forgotten,
    since they are of another time. The paper does none of this: cf_min never comes down, and a critical region that
    comes late is met by dense steps alone.

    Raises ValueError for a value out of these bounds.
    """

    name = "gravac"
    adaptive = True
    timed = True
    source = "GraVAC (Tyagi and Swany, 2023), Algorithm 1 and section on scaling policies"
    parameter_docs: ClassVar[Mapping[str, str]] = {
        "cf_min": "first and lowest compression factor, >= 1",
        "cf_max": "highest compression factor, >= cf_min",
        "policy": "exponential (first cf_min times 1, r, r^2, r^4, ...) or geometric (1, r, r^2, r^3, ...)",
        "epsilon": "smallest gain at which a CF may be sent, in [0, 1]; decides everything, see the logged gains",
        "omega": "relative difference up to which two gains or two throughputs count as equal, in [0, 1]",
        "window": "steps for which a candidate CF is evaluated, >= 1",
        "gain": "squared (the paper), norm (its root), or raw (the authors' code; can pass 1)",
        "throughput": "of several recordings of a CF keep their mean, or the last",
        "ratio": "r of the policy, >= 1.01",
        "per": "model (one search, the paper) or bucket (each has its own)",
        "lr_drop": "share of itself, in [0, 1), to which a falling learning rate opens the search again; None: never",
        "loss_rise": "share of its lowest, > 0, by which a rising loss opens the search again; None: never",
        "gain_fall": "share, in (0, 1], by which a falling gain of cf_min opens the search again; None: never",
        "exact": "compress at both levels and decide at once (the paper); false: once, by the last step's gains",
    }

    def __init__(
        self,
        cf_min: float = 10.0,
        cf_max: float = 1000.0,
        policy: Policy = "exponential",
        epsilon: float = 0.7,
        omega: float = 0.01,
        window: int = 500,
        gain: Gain = "squared",
        throughput: Throughput = "mean",
        ratio: float = 2.0,
        exact: bool = True,
        lr_drop: float | None = None,
        loss_rise: float | None = None,
        gain_fall: float | None = None,
        per: Per = "model",
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock=clock)
        cf_hint = "a CF is original size / compressed size; for 1 % use 100"
        self.cf_min = check_number("cf_min", cf_min, 1, hint=cf_hint)
        self.cf_max = check_number("cf_max", cf_max, self.cf_min, hint=f"cf_min is {cf_min:g}; {cf_hint}")
        self.policy = check_choice("policy", policy, ("exponential", "geometric"))
        self.epsilon = check_number("epsilon", epsilon, 0, 1, hint="the smallest gain at which a CF may be sent")
        self.omega = check_number("omega", omega, 0, 1, hint="a relative difference; for 1 % use 0.01")
        self.window = check_count("window", window, hint="the steps for which a candidate CF is evaluated")
        self.gain = check_choice("gain", gain, ("squared", "norm", "raw"))
        self.throughput = check_choice("throughput", throughput, ("mean", "last"))
        self.exact = check_flag("exact", exact, hint="compress at both levels and decide at once, as the paper does")
        self.lr_drop = None if lr_drop is None else check_below_1("lr_drop", lr_drop)
        self.loss_rise = None if loss_rise is None else check_number(
            "loss_rise", loss_rise, 1e-9, hint="of the loss, relative; for a tenth 0.1"
        )  # fmt: skip
        self.gain_fall = None if gain_fall is None else check_number(
            "gain_fall", gain_fall, 1e-9, 1, hint="of the gain, relative; for a half 0.5"
        )  # fmt: skip
        self.per = check_choice("per", per, ("model", "bucket"))
        self.per_bucket = self.per == "bucket"
        self.ratio = check_number("ratio", ratio, 1.01, hint="the factor between the first two candidates")

        self.candidates = scaled_cfs(self.cf_min, self.cf_max, self.policy, self.ratio)
        """Every CF of the search, ascending."""
        self._workers: int | None = None
        self._levels = (self.cf_min, self.cf_min)
        self._steps = 0
        self._gains: tuple[_Gain | None, _Gain | None] = (None, None)
        self._records: dict[float, _Record] = {}
        self._pending: tuple[float, float] | None = None
        self._lr = LrWatch(self.lr_drop or 0.0)
        self._loss: float | None = None
        self._lowest_loss = math.inf
        self._gain_before: float | None = None
        """That of cf_min as the last window ended."""
        self._opens = False
        """The next decision opens the search again."""
        self._searches: list[GraVAC] = []
        """Each bucket's own."""

    def prepare(self, workers: int) -> None:
        """The newest gain counts by min(1, workers / 100). Throughputs recorded with other workers are forgotten."""
        check_count("workers", workers, hint="the number of ranks that exchange gradients")
        if workers != self._workers:
            self._records = {}
        self._workers = workers
        for search in self._searches:
            search.prepare(workers)

    @property
    def levels(self) -> tuple[float, float]:
        return self._levels

    @property
    def throughputs(self) -> dict[float, float]:
        """Compression throughput by CF, in samples per second, ascending; the dense step's is at CF 1."""
        return {cf: self._records[cf].mean for cf in sorted(self._records)}

    def decide(self, statistics: Statistics) -> Decision:
        """Send the candidate, cf_min or the dense gradient; skip a step whose statistics are not finite.

        Raises RuntimeError before `prepare`.
        """
        self._prepared()
        self._pending = None
        if not (statistics.finite and all(map(math.isfinite, statistics.to_vector()))):
            gains = tuple(0.0 if gain is None else gain.value for gain in self._gains)
            return Decision(DENSE_CF, DENSE, skip=True, levels=self._levels, gains=(gains[0], gains[1]))

        gain_min, gain_c = self._smooth(statistics)
        cf, level, gain = self._choose(gain_min.value, gain_c.value)
        self._pending = (cf, gain)
        self._steps += 1
        if self._opens or self._gain_has_fallen(gain_min.value):
            self._open_again()
        elif self._steps >= self.window:
            self._end_window(gain_min, gain_c)
        return Decision(cf, level, skip=False, levels=self._levels, gains=(gain_min.value, gain_c.value))

    def decide_each(self, statistics: Sequence[Statistics]) -> list[Decision]:
        if not self.per_bucket:
            return super().decide_each(statistics)
        workers = self._prepared()
        if len(self._searches) > len(statistics):  # resumed with buckets laid out anew: nobody knows whose is whose
            self._searches.clear()
        for _ in statistics[len(self._searches) :]:
            search = GraVAC(**self._of_search())
            search.prepare(workers)
            self._searches.append(search)
        return [search.decide(own) for search, own in zip(self._searches, statistics, strict=True)]

    def _prepared(self) -> int:
        if self._workers is None:
            raise RuntimeError("call prepare(workers) before the first decide(): the gain's average depends on it")
        return self._workers

    def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
        """Record the compression throughput of the CF just sent; compression time is left out of a dense step's.

        Ignored after a skipped step, and where the cost is no measurement (a time or a number of samples not above 0).
        """
        for search in self._searches:
            search.observe(seconds, compress_s, samples)
        pending, self._pending = self._pending, None
        if pending is None or self._workers is None:
            return
        cf, gain = pending
        own_s = seconds - compress_s if cf == DENSE_CF else seconds
        if not (0 < own_s < math.inf and 0 < samples < math.inf):
            return
        newest = samples * self._workers / own_s * gain
        past = self._records.get(cf)
        if past is None or self.throughput == "last":
            self._records[cf] = _Record(newest, 1)
        else:
            self._records[cf] = _Record(past.total + newest, past.count + 1)

    def hear(self, lr: float, loss: float) -> None:
        """Open the search again after a drop of the learning rate or a rise of the loss, where that is wanted.

        That is with the next decision, which still is on the levels that all ranks evaluate.
        """
        for search in self._searches:
            search.hear(lr, loss)
        dropped = self._lr.drops_to(lr) if self.lr_drop is not None and math.isfinite(lr) else False
        self._opens |= self._loss_has_risen(loss) or dropped

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": self._fixed_parameters(),
            "workers": self._workers,
            "levels": list(self._levels),
            "steps": self._steps,
            "gains": [None if gain is None else [gain.kept, gain.whole] for gain in self._gains],
            "records": [[cf, record.total, record.count] for cf, record in self._records.items()],
            "pending": None if self._pending is None else list(self._pending),
            "lr": self._lr.last,
            "loss": self._loss,
            "lowest_loss": self._lowest_loss if math.isfinite(self._lowest_loss) else None,
            "gain_before": self._gain_before,
            "opens": self._opens,
            "searches": [search.state_dict() for search in self._searches],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. epsilon, omega, window and throughput may differ from the saved run's.

        With another number of workers the recorded throughputs are forgotten, whether `prepare` came before or comes
        after. Raises ValueError for unknown or missing keys and for a state saved under another search or gain.
        """
        check_state_keys("GraVAC", state, self.state_dict().keys())
        own, saved = self._fixed_parameters(), state["parameters"]
        if saved != own:
            raise ValueError(f"this GraVAC state was saved with {saved}, not with {own}; use those, or start afresh")
        searches = [GraVAC(**self._of_search()) for _ in state["searches"]]
        for search, of_bucket in zip(searches, state["searches"], strict=True):
            search.load_state_dict(of_bucket)
        self._searches = searches
        prepared = self._workers
        cf_min, candidate = state["levels"]
        gain_min, gain_c = (None if gain is None else _Gain(*gain) for gain in state["gains"])
        records = {cf: _Record(total, count) for cf, total, count in state["records"]}
        pending = state["pending"]
        self._workers = state["workers"]
        self._levels = (cf_min, candidate)
        self._steps = state["steps"]
        self._gains = (gain_min, gain_c)
        self._records = records
        self._pending = None if pending is None else (pending[0], pending[1])
        self._lr = LrWatch(self.lr_drop or 0.0, state["lr"])
        self._loss, self._gain_before, self._opens = state["loss"], state["gain_before"], state["opens"]
        self._lowest_loss = math.inf if state["lowest_loss"] is None else state["lowest_loss"]
        if prepared is not None:
            self.prepare(prepared)

    def _of_search(self) -> dict[str, Any]:
        """The parameters of one bucket's search."""
        return {parameter.name: getattr(self, parameter.name) for parameter in self.parameters()} | {"per": "model"}

    def _fixed_parameters(self) -> dict[str, Any]:
        """The parameters that give the state its meaning."""
        return {name: getattr(self, name) for name in ("cf_min", "cf_max", "policy", "ratio", "gain", "per")}

    def _smooth(self, statistics: Statistics) -> tuple[_Gain, _Gain]:
        """Take this step's gains into the averages; an average starts at its first value."""
        assert self._workers is not None
        factor = min(1.0, self._workers / 100)
        newest = self._newest_gain(statistics, 0), self._newest_gain(statistics, 1)
        gain_min, gain_c = (
            new if past is None else past.smoothed(new, factor) for past, new in zip(self._gains, newest, strict=True)
        )
        self._gains = (gain_min, gain_c)
        return gain_min, gain_c

    def _newest_gain(self, statistics: Statistics, level: int) -> _Gain:
        if self.gain == "raw":
            return _Gain(statistics.kept_norm[level], statistics.raw_norm)
        share = statistics.kept[level] / statistics.acc if statistics.acc > 0 else 1.0
        return _Gain(math.sqrt(share) if self.gain == "norm" else share, 1.0)

    def _choose(self, gain_min: float, gain_c: float) -> tuple[float, int, float]:
        """What this step sends: (CF, level, gain). A level at CF 1 is dense."""
        cf_min, candidate = self._levels
        if gain_c >= self.epsilon and candidate > DENSE_CF:
            return candidate, 1, gain_c
        if gain_min >= self.epsilon and cf_min > DENSE_CF:
            return cf_min, 0, gain_min
        return DENSE_CF, DENSE, 1.0

    def _end_window(self, gain_min: _Gain, gain_c: _Gain) -> None:
        """Choose the next window's cf_min and candidate; a changed candidate's average starts anew."""
        cf_min, evaluated = self._levels
        if gain_min.value > 0 and abs(gain_min.value - gain_c.value) <= self.omega * gain_min.value:
            cf_min, gain_min = evaluated, gain_c
        ideal = self._saturated_cf()
        candidate = self._above(evaluated) if ideal is None else max(ideal, cf_min)
        self._gain_before = gain_min.value
        kept_gain_c = gain_min if candidate == cf_min else gain_c if candidate == evaluated else None
        self._levels, self._gains, self._steps = (cf_min, candidate), (gain_min, kept_gain_c), 0

    def _open_again(self) -> None:
        """Search from the first cf_min once more; what is known of gains, times and the loss is of another time."""
        self._levels, self._gains, self._steps = (self.cf_min, self.cf_min), (None, None), 0
        self._records, self._pending = {}, None
        self._loss, self._lowest_loss, self._gain_before, self._opens = None, math.inf, None, False

    def _gain_has_fallen(self, gain: float) -> bool:
        before = self._gain_before
        return self.gain_fall is not None and before is not None and gain <= (1 - self.gain_fall) * before

    def _loss_has_risen(self, loss: float) -> bool:
        if self.loss_rise is None or not math.isfinite(loss):
            return False
        factor = 2 / (self.window + 1)
        self._loss = loss if self._loss is None else self._loss + factor * (loss - self._loss)
        self._lowest_loss = min(self._lowest_loss, self._loss)
        return self._loss > self._lowest_loss + self.loss_rise * abs(self._lowest_loss)

    def _above(self, cf: float) -> float:
        return self.candidates[min(bisect.bisect_right(self.candidates, cf), len(self.candidates) - 1)]

    def _saturated_cf(self) -> float | None:
        """The lower CF of the two largest throughputs if these differ by at most omega, else None."""
        fastest = sorted(((record.mean, -cf) for cf, record in self._records.items()), reverse=True)[:2]
        if len(fastest) < 2 or fastest[0][0] - fastest[1][0] > self.omega * fastest[1][0]:
            return None
        return min(-fastest[0][1], -fastest[1][1])


def scaled_cfs(cf_min: float, cf_max: float, policy: Policy | str, ratio: float = 2.0) -> tuple[float, ...]:
    """Every candidate CF of a policy, ascending, the last clamped to cf_max.

    >>> scaled_cfs(10, 1000, "exponential")
    (10.0, 20.0, 40.0, 160.0, 1000.0)
    """
    cfs, factor = [float(cf_min)], ratio
    while cfs[-1] < cf_max:
        cfs.append(float(min(cf_min * factor, cf_max)))
        factor *= factor if policy == "exponential" else ratio
    return tuple(cfs)
