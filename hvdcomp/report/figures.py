"""Which figures a report has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hvdcomp.report.plots import Array, Line, Plot, Quantity, bars, binned, curves, distribution, stacked
from hvdcomp.report.table import mean, sent_gain
from hvdcomp.report.trace import Trace

COSTS: tuple[tuple[str, str, str, Quantity], ...] = (
    ("steps", "How many steps", "step", "step"),
    ("bytes", "How many bytes", "bytes sent per worker", "bytes"),
    ("time", "How much time", "time of training", "seconds"),
)
"""What progress costs: name, question, and the axis' label and quantity."""

PARTS = ("compute", "encode", "decode", "compress", "wait", "decide")
"""What a step's time is made of, in the words of metrics.jsonl; compress where encode and decode are not known."""

PLAIN = "plain Horovod"
MOST_MARKS = 40
MOST_LAYERS = 12
MOST_STAIRS = 300

Slots = Mapping[str, int]


def figures(runs: Mapping[str, Trace]) -> list[Plot]:
    """The figures of some runs, which share the axes; one that no run has data for is left out.

    Args:
        runs: by the name that each is shown under.
    """
    slots = {label: slot for slot, label in enumerate(runs)}
    plots = [*_scores(runs, slots), *_losses(runs, slots), _factors(runs, slots), _gains(runs, slots)]
    title = "At which CFs were the steps sent?"
    plots.append(distribution({name: run.steps_at() for name, run in runs.items()}, slots=slots, title=title))
    plots += [_times(runs), _layers(runs, slots)]
    return [plot for plot in plots if plot is not None]


def _scores(runs: Mapping[str, Trace], slots: Slots) -> list[Plot]:
    plots = []
    for score in dict.fromkeys(run.score for run in runs.values()):
        known_by = {name: run for name, run in runs.items() if run.score == score}
        for cost, question, label, quantity in COSTS:
            lines = []
            for name, run in known_by.items():
                values = run.metrics.column(score)
                known = np.isfinite(values)
                lines.append(Line(name, slots[name], _cost(run, cost)[known], values[known]))
            y: tuple[str, Quantity] = (f"{score}, held out", "share" if score == "accuracy" else "number")
            title = f"{question} does {score} take?"
            plots.append(_curves(lines, f"{score}-{cost}", title, (label, quantity), y, log_y=score == "perplexity"))
    return [plot for plot in plots if plot is not None]


def _losses(runs: Mapping[str, Trace], slots: Slots) -> list[Plot]:
    plots = []
    for cost, question, label, quantity in COSTS:
        lines = [
            Line(name, slots[name], *binned(_cost(run, cost), _positive(run.metrics.column("loss")), 60))
            for name, run in runs.items()
        ]
        title = f"{question} does a lower loss take?"
        plots.append(_curves(lines, f"loss-{cost}", title, (label, quantity), ("training loss", "number"), log_y=True))
    note = "Means of stretches of the run; the band goes from the least to the largest loss of a step."
    return [replace(plot, note=note) for plot in plots if plot is not None]


def _curves(
    lines: list[Line], name: str, title: str, x: tuple[str, Quantity], y: tuple[str, Quantity], *, log_y: bool
) -> Plot | None:
    """None where no line has a point. Costs that differ much between runs get a logarithmic axis."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return None
    ends = [line.x[-1] for line in lines]
    log_x = x[1] != "step" and max(ends) > 5 * min(ends) > 0
    return curves(lines, name=name, title=title, x=x, y=y, log_x=log_x, log_y=log_y)


def _factors(runs: Mapping[str, Trace], slots: Slots) -> Plot | None:
    lines = []
    for name, run in runs.items():
        step, cf = run.metrics.column("step"), np.maximum(run.metrics.column("cf"), 1.0)
        x, y, low, high = _stairs(step, cf)
        if len(x):
            at = _decisions(run)
            marks = (at, y[np.maximum(np.searchsorted(x, at, side="right") - 1, 0)])
            lines.append(Line(name, slots[name], x, y, low, high, marks))
    title = "Which CF was sent, and when did the schedule move on?"
    y_axis: tuple[str, Quantity] = ("CF (1 is dense)", "factor")
    if not lines:
        return None
    plot = curves(lines, name="cf", title=title, x=("step", "step"), y=y_axis, log_y=True, stairs=True)
    moves = any(line.marks is not None and len(line.marks[0]) for line in lines)
    return replace(plot, note="A mark is where the schedule went on to other levels or settings." if moves else "")


def _gains(runs: Mapping[str, Trace], slots: Slots) -> Plot | None:
    """Of what was sent; the band lies between the two CFs that were evaluated."""
    lines, thresholds = [], set()
    for name, run in runs.items():
        x, y, _, _ = binned(run.metrics.column("step"), sent_gain(run), 100)
        if len(x):
            gains = [run.metrics.column(name) for name in ("gains_0", "gains_1")]
            high, low = (np.interp(x, *binned(run.metrics.column("step"), gain, 100)[:2]) for gain in gains)
            lines.append(Line(name, slots[name], x, y, low, high))
            thresholds.add(_epsilon(run))
    if not lines:
        return None
    known = {value: "epsilon" for value in thresholds if value is not None}
    title = "How much of the gradient did compression keep?"
    y_axis: tuple[str, Quantity] = ("gain (1: all of it)", "number")
    plot = curves(lines, name="gain", title=title, x=("step", "step"), y=y_axis, rules=known)
    return replace(plot, note="The line is what was sent, the band lies between the two CFs that were evaluated.")


def _times(runs: Mapping[str, Trace]) -> Plot | None:
    rows, marks = {}, {}
    for name, run in runs.items():
        split = time_split(run)
        if split:
            rows[name] = {part: 1e3 * seconds for part, seconds in split.items()}
            dense_s = (run.summary or {}).get("dense_exchange_s")
            if dense_s:
                marks[name] = 1e3 * (split["compute"] + dense_s)
    if not rows:
        return None
    title = "Where does a step's time go?"
    mark = "compute + dense exchange"
    plot = stacked(rows, name="time-split", title=title, label="ms per step", marks=marks, mark=mark)
    whole = ", ".join(f"{name} {1e3 * mean(runs[name].metrics.column('exchange_s')):.3g} ms" for name in rows)
    return replace(plot, note=f"Whole exchanges, which overlap the rest but for the wait: {whole}.")


def time_split(run: Trace) -> dict[str, float]:
    """Mean seconds of each part of a step; empty where a stock optimizer knew none."""
    metrics = run.metrics
    means = {part: mean(metrics.column(f"{part}_s")) for part in PARTS}
    if np.isfinite(means["encode"]):
        means["compress"] = np.nan
    return {part: value for part, value in means.items() if np.isfinite(value)}


def _layers(runs: Mapping[str, Trace], slots: Slots) -> Plot | None:
    known = {name: run.metrics.layer_bytes for name, run in runs.items() if run.metrics.layer_bytes}
    if not known:
        return None
    dense = {layer: both[1] for layers in known.values() for layer, both in layers.items()}
    largest = sorted(dense, key=lambda layer: -dense[layer])
    shown, others = largest[:MOST_LAYERS], largest[MOST_LAYERS:]
    rows = {layer: {PLAIN: dense[layer]} for layer in shown}
    for name, layers in known.items():
        for layer in shown:
            if layer in layers:
                rows[layer][name] = layers[layer][0]
    if others:
        sums = {name: sum(layers[o][0] for o in others if o in layers) for name, layers in known.items()}
        rows[f"{len(others)} smaller ones"] = {PLAIN: sum(dense[layer] for layer in others), **sums}
    title = "Which layers are the bytes sent for?"
    return bars(rows, slots={**slots, PLAIN: -1}, name="layers", title=title, label="bytes sent by worker 0")


def _stairs(x: Array, y: Array) -> tuple[Array, Array, Array, Array]:
    """A value that holds until the next change: the changes, or where there are too many, means of stretches."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    changes = np.flatnonzero(np.diff(y)) + 1
    if len(changes) > MOST_STAIRS:
        return binned(x, y, MOST_STAIRS, geometric=True)
    kept = np.unique([*changes, 0, len(x) - 1])[: len(x)].astype(int)
    return x[kept], y[kept], y[kept], y[kept]


def _decisions(run: Trace) -> Array:
    """Steps at which the schedule moved to other levels, or assigned other settings to layers; some, if many."""
    metrics = run.metrics
    step, levels = metrics.column("step"), np.stack([metrics.column("levels_0"), metrics.column("levels_1")])
    moved = np.isfinite(levels[:, 1:]).all(0) & (np.diff(levels) != 0).any(0)
    at = np.union1d(step[1:][moved], np.array([step for step, _ in metrics.assigned]))
    return at[:: -(-len(at) // MOST_MARKS) or 1]


def _cost(run: Trace, cost: str) -> Array:
    """What a run had spent when each of its steps was over."""
    if cost == "steps":
        return run.metrics.column("step")
    return np.asarray(np.nancumsum(run.metrics.column("bytes_sent" if cost == "bytes" else "iteration_s")))


def _epsilon(run: Trace) -> float | None:
    schedule = run.config.get("schedule")
    found = schedule.get("epsilon") if isinstance(schedule, Mapping) else None
    return float(found) if isinstance(found, (int, float)) else None


def _positive(values: Array) -> Array:
    """For a logarithmic axis."""
    return np.asarray(np.where(values > 0, values, np.nan))
