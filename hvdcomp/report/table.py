"""The papers' table: which CF was used, what it kept, what it saved, what it cost in accuracy, and the speed-up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdcomp.report.plots import Array
from hvdcomp.report.trace import Trace, Variant, clock_of
from hvdcomp.training.units import duration, size

MEANINGS = {
    "CF used": "mean over steps, and the range; a dense step counts 1",
    "gain": "mean share of the gradient that was kept, as the schedule measures it",
    "bytes sent": "by worker 0, indices and headers included",
    "reduction": "bytes that plain Horovod would have sent / bytes sent",
    "step": "mean time of an iteration",
}
"""What the columns hold, where their names do not say it."""


@dataclass(frozen=True)
class Table:
    """Rows of texts under their heads; `notes` say what heads mean."""

    heads: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]


def table(variants: Mapping[str, Variant], baseline: str | None = None) -> Table:
    """A row for each variant, by the name that it is shown under: its run's figures, or mean and spread over its seeds.

    Accuracy and time are compared with the baseline, and where none is given with the first variant that sent
    everything dense. Variants of one metric are also compared at the best value that all of them reached.
    """
    dense = next((name for name, variant in variants.items() if variant.is_dense), None)
    base = baseline if baseline is not None else dense
    target = _common_target(variants)
    cells = {name: _cells(variant, variants.get(base or "")) for name, variant in variants.items()}
    notes = [f"{head}: {meaning}" for head, meaning in MEANINGS.items()]
    if any(len(variant.runs) > 1 for variant in variants.values()):
        notes.insert(
            0, "±: mean and standard deviation (n - 1) over the seeds, where these differ; compared is seed by seed"
        )
        for name, variant in variants.items():
            cells[name] = {"seeds": str(len(variant.runs))} | cells[name]
    if clock_of(variants.values()):
        notes.append(
            "times that are modelled are those that the steps would have taken on links of that bandwidth, by the cost "
            "model; what this machine took is not shown"
        )
    if len({variant.first.clock for variant in variants.values()}) > 1:
        for name, variant in variants.items():
            cells[name] |= {"times": variant.first.clock}
    if base is None:
        notes.append("speed-up: needs a run with compression=none among those that are shown")
    else:
        which = "the comparison's baseline" if baseline is not None else "the first dense run"
        notes.append(f"speed-up, difference: against {base}, {which}; speed-up is of a step's time")
    if target is not None:
        score, value = target
        head = f"to {_score_text(score, value)}"
        notes.append(f"{head}: bytes sent and time of training until {score} was first so good, as it was in all runs")
        for name, variant in variants.items():
            cells[name][head] = _reached(variant, score, value)
    for name, variant in variants.items():
        cells[name]["method"] = variant.first.method
    heads = dict.fromkeys(head for row in cells.values() for head in row)
    rows = {name: tuple(row.get(head, "") for head in heads) for name, row in cells.items()}
    return Table(tuple(heads), rows, tuple(notes))


def _cells(variant: Variant, baseline: Variant | None) -> dict[str, str]:
    sent, dense = (variant.of_each(_sum_of(name)) for name in ("bytes_sent", "bytes_dense"))
    reductions = [d / s for s, d in zip(sent, dense, strict=True) if s]
    scores = variant.of_each(_last_score)
    is_share = variant.score == "accuracy"
    return {
        variant.score: _spread([100 * s for s in scores], "{:.2f}", " %") if is_share else _spread(scores, "{:.2f}"),
        "difference": _difference(variant, baseline),
        "bytes sent": _spread(sent, size),
        "reduction": _spread(reductions, "{:.3g}", " ×"),
        "step": _spread(variant.of_each(lambda run: 1e3 * _step_s(run)), "{:.3g}", " ms"),
        "speed-up": _speed_up(variant, baseline),
        "CF used": _factors(variant),
        "gain": _spread(variant.of_each(lambda run: mean(sent_gain(run))), "{:.2f}"),
        "steps": _spread(variant.of_each(lambda run: len(run.metrics)), "{:,.0f}"),
    }


def _spread(values: Sequence[float], text: str | Callable[[float], str], unit: str = "") -> str:
    """ "98.61 %", of several that differ "98.61 ± 0.20 %"; of what is known, nothing of nothing.

    Args:
        text: a number's, as a format or a function.
    """
    write = text.format if isinstance(text, str) else text
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    if min(known) == max(known):
        return f"{write(known[0])}{unit}"
    average, deviation = write(statistics.mean(known)), statistics.stdev(known)
    decimals = len(average.partition(".")[2])
    spread = f"{deviation:.{decimals}f}" if isinstance(text, str) else text(float(f"{deviation:.2g}"))
    return f"{average} ± {spread}{unit}"


def _sum_of(column: str) -> Callable[[Trace], float]:
    return lambda run: float(np.nansum(run.metrics.column(column)))


def _last_score(run: Trace) -> float:
    return run.metrics.last(run.score)


def _step_s(run: Trace) -> float:
    return mean(run.metrics.column("iteration_s"))


def sent_gain(run: Trace) -> Array:
    """The gain of what was sent at each step; NaN of a dense step, and where no schedule measured it."""
    low, high, level = (run.metrics.column(name) for name in ("gains_0", "gains_1", "decision"))
    return np.asarray(np.where(level < 0, np.nan, np.where(level == 1, high, low)))


def _factors(variant: Variant) -> str:
    known = [np.maximum(cf[np.isfinite(cf)], 1.0) for cf in (run.metrics.column("cf") for run in variant.runs)]
    known = [cf for cf in known if len(cf)]
    if not known:
        return ""
    least, most = min(cf.min() for cf in known), max(cf.max() for cf in known)
    if most == 1:
        return "dense"
    low, high = (f"{value:.4g}" for value in (least, most))
    means = _spread([float(cf.mean()) for cf in known], "{:.4g}")
    return means if low == high else f"{means} ({low} to {high})"


def _difference(variant: Variant, baseline: Variant | None) -> str:
    """To the baseline: in points of accuracy, or in perplexity."""
    if baseline is None or variant is baseline or variant.score != baseline.score:
        return ""
    differences = [mine - other for mine, other in _pairs(variant, baseline, _last_score)]
    if variant.score == "accuracy":
        return _spread([100 * difference for difference in differences], "{:+.2f}", " points")
    return _spread(differences, "{:+.2f}")


def _speed_up(variant: Variant, baseline: Variant | None) -> str:
    pairs = [] if baseline is None else _pairs(variant, baseline, _step_s)
    return _spread([other / mine for mine, other in pairs if mine], "{:.2f}", " ×")


def _pairs(variant: Variant, baseline: Variant, value: Callable[[Trace], float]) -> list[tuple[float, float]]:
    """A figure of the runs, and the baseline's with the same seed; where they have no seed in common, its mean."""
    of_seed = {run.seed: value(run) for run in baseline.runs}
    common = [run for run in variant.runs if run.seed in of_seed] if len(of_seed) == len(baseline.runs) else []
    average = mean(np.array(baseline.of_each(value)))
    return [(value(run), of_seed[run.seed] if common else average) for run in common or variant.runs]


def _common_target(variants: Mapping[str, Variant]) -> tuple[str, float] | None:
    """The best value that every run reached; None of one variant, or of runs of different metrics."""
    runs = [run for variant in variants.values() for run in variant.runs]
    scores = {run.score for run in runs}
    if len(variants) < 2 or len(scores) > 1:
        return None
    score = scores.pop()
    bests = [_best(run.metrics.column(score), score) for run in runs]
    if any(math.isnan(best) for best in bests):
        return None
    return score, max(bests) if score == "perplexity" else min(bests)


def _best(values: Array, score: str) -> float:
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan
    return float(known.min() if score == "perplexity" else known.max())


def _reached(variant: Variant, score: str, target: float) -> str:
    nbytes: list[float] = []
    seconds: list[float] = []
    for run in variant.runs:
        values = np.nan_to_num(run.metrics.column(score), nan=math.inf if score == "perplexity" else -math.inf)
        first = int(np.argmax(values <= target if score == "perplexity" else values >= target))
        for found, name in ((nbytes, "bytes_sent"), (seconds, "iteration_s")):
            found.append(float(np.nansum(run.metrics.column(name)[: first + 1])))
    return f"{_spread(nbytes, size)}, {_spread(seconds, duration)}"


def _score_text(score: str, value: float) -> str:
    return f"{100 * value:.2f} %" if score == "accuracy" else f"{value:.2f}"


def mean(values: Array) -> float:
    """Of what is known, NaN of nothing."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
