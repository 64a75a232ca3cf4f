"""The papers' table: which CF was used, what it kept, what it saved, what it cost in accuracy, and the speed-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hvdcomp.report.plots import Array
from hvdcomp.report.trace import Trace
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


def table(runs: Mapping[str, Trace]) -> Table:
    """A row for each run, by the name that it is shown under.

    Accuracy and time are compared with the first run that sent everything dense. Runs of one metric are also compared
    at the best value that all of them reached.
    """
    baseline = next((name for name, run in runs.items() if run.is_dense), None)
    target = _common_target(runs)
    cells = {name: _cells(run, runs.get(baseline or "")) for name, run in runs.items()}
    notes = [f"{head}: {meaning}" for head, meaning in MEANINGS.items()]
    if baseline is None:
        notes.append("speed-up: needs a run with compression=none among those that are shown")
    else:
        notes.append(f"speed-up, difference: against {baseline}, the first dense run; speed-up is of a step's time")
    if target is not None:
        score, value = target
        head = f"to {_score_text(score, value)}"
        notes.append(f"{head}: bytes sent and time of training until {score} was first so good, as it was in all runs")
        for name, run in runs.items():
            cells[name][head] = _reached(run, score, value)
    heads = dict.fromkeys(head for row in cells.values() for head in row)
    rows = {name: tuple(row.get(head, "") for head in heads) for name, row in cells.items()}
    return Table(tuple(heads), rows, tuple(notes))


def _cells(run: Trace, baseline: Trace | None) -> dict[str, str]:
    metrics = run.metrics
    sent, dense = (float(np.nansum(metrics.column(name))) for name in ("bytes_sent", "bytes_dense"))
    step_s = mean(metrics.column("iteration_s"))
    cells = {
        "method": run.method,
        "steps": f"{len(metrics):,}",
        "CF used": _factors(metrics.column("cf")),
        "gain": _number(mean(sent_gain(run)), "{:.2f}"),
        "bytes sent": size(sent),
        "reduction": f"{dense / sent:.3g} ×" if sent else "",
        run.score: _score_text(run.score, metrics.last(run.score)),
        "difference": _difference(run, baseline),
        "step": _number(1e3 * step_s, "{:.3g} ms"),
        "speed-up": "",
    }
    if baseline is not None and step_s:
        cells["speed-up"] = _number(mean(baseline.metrics.column("iteration_s")) / step_s, "{:.2f} ×")
    return cells


def sent_gain(run: Trace) -> Array:
    """The gain of what was sent at each step; NaN of a dense step, and where no schedule measured it."""
    low, high, level = (run.metrics.column(name) for name in ("gains_0", "gains_1", "decision"))
    return np.asarray(np.where(level < 0, np.nan, np.where(level == 1, high, low)))


def _factors(cf: Array) -> str:
    known = np.maximum(cf[np.isfinite(cf)], 1.0)
    if not len(known):
        return ""
    if known.max() == 1:
        return "dense"
    low, high = (f"{value:.4g}" for value in (known.min(), known.max()))
    return f"{known.mean():.4g}" if low == high else f"{known.mean():.4g} ({low} to {high})"


def _difference(run: Trace, baseline: Trace | None) -> str:
    """To the baseline: in points of accuracy, or in perplexity."""
    if baseline is None or run is baseline or run.score != baseline.score:
        return ""
    difference = run.metrics.last(run.score) - baseline.metrics.last(run.score)
    return _number(100 * difference, "{:+.2f} points") if run.score == "accuracy" else _number(difference, "{:+.2f}")


def _common_target(runs: Mapping[str, Trace]) -> tuple[str, float] | None:
    """The best value that every run reached; None of one run, or of runs of different metrics."""
    scores = {run.score for run in runs.values()}
    if len(runs) < 2 or len(scores) > 1:
        return None
    score = scores.pop()
    bests = [_best(run.metrics.column(score), score) for run in runs.values()]
    if any(math.isnan(best) for best in bests):
        return None
    return score, max(bests) if score == "perplexity" else min(bests)


def _best(values: Array, score: str) -> float:
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan
    return float(known.min() if score == "perplexity" else known.max())


def _reached(run: Trace, score: str, target: float) -> str:
    values = np.nan_to_num(run.metrics.column(score), nan=math.inf if score == "perplexity" else -math.inf)
    first = int(np.argmax(values <= target if score == "perplexity" else values >= target))
    spent = (np.nansum(run.metrics.column(name)[: first + 1]) for name in ("bytes_sent", "iteration_s"))
    nbytes, seconds = (float(value) for value in spent)
    return f"{size(nbytes)}, {duration(seconds)}"


def _score_text(score: str, value: float) -> str:
    return _number(100 * value, "{:.2f} %") if score == "accuracy" else _number(value, "{:.2f}")


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else ""


def mean(values: Array) -> float:
    """Of what is known, NaN of nothing."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
