"""Which figures a report has."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hvdcomp.report.plots import Array, Line, Plot, Quantity, bars, binned, curves, distribution, stacked
from hvdcomp.report.table import mean, sent_gain
from hvdcomp.report.trace import Trace, Variant, clock_of

SPREAD = "Lines are means over the seeds, bands go from the lowest to the highest seed."

COSTS: tuple[tuple[str, str, str, Quantity], ...] = (
    ("steps", "How many steps", "step", "step"),
    ("bytes", "How many bytes", "bytes sent per worker", "bytes"),
    ("time", "How much time", "time of training", "seconds"),
)
"""What progress costs: name, question, and the axis' label and quantity."""

PARTS = ("compute", "encode", "decode", "compress", "wait", "decide")
"""What a step's time is made of, in the words of metrics.jsonl; compress where encode and decode are not known."""

QUANTITIES: Mapping[str, Quantity] = {"accuracy": "share", "perplexity": "number", "loss": "number"}

PLAIN = "plain Horovod"
MOST_MARKS = 40
MOST_LAYERS = 12
MOST_STAIRS = 300

Slots = Mapping[str, int]
Variants = Mapping[str, Variant]

Curve = tuple[Array, Array, Array | None, Array | None]
"""x, y, and a band around it."""


def figures(variants: Variants) -> list[Plot]:
    """The figures of some variants, which share the axes; one that no run has data for is left out.

    Args:
        variants: by the name that each is shown under.
    """
    slots = {label: slot for slot, label in enumerate(variants)}
    plots = [*_scores(variants, slots), *_losses(variants, slots), factors(variants, slots), _gains(variants, slots)]
    title = "At which CFs were the steps sent?"
    steps_at = {name: variant.steps_at() for name, variant in variants.items()}
    plots.append(distribution(steps_at, slots=slots, title=title))
    plots += [_times(variants), _layers(variants, slots)]
    return [plot for plot in plots if plot is not None]


def over_seeds(curves: Sequence[Curve]) -> Curve:
    """The mean of several at each of their points, as far as all go, and the least and the largest; one as it is."""
    known = [curve for curve in curves if len(curve[0])] or list(curves[:1])
    if len(known) == 1:
        return known[0]
    length = min(len(x) for x, *_ in known)
    x, y = (np.stack([values[:length] for values in of]) for of in zip(*(curve[:2] for curve in known), strict=True))
    return x.mean(0), y.mean(0), y.min(0), y.max(0)


def _scores(variants: Variants, slots: Slots) -> list[Plot]:
    plots = []
    for score in dict.fromkeys(variant.score for variant in variants.values()):
        known_by = {name: variant for name, variant in variants.items() if variant.score == score}
        for cost, question, label, quantity in COSTS:
            lines = []
            for name, variant in known_by.items():
                of_seeds: list[Curve] = []
                for run in variant.runs:
                    values = run.metrics.column(score)
                    known = np.isfinite(values)
                    of_seeds.append((_cost(run, cost)[known], values[known], None, None))
                lines.append(Line(name, slots[name], *over_seeds(of_seeds)))
            x, y = _labelled(label, quantity, known_by), (f"{score}, held out", QUANTITIES[score])
            title = f"{question} does a given {score} take?"
            plots.append(_curves(lines, f"{score}-{cost}", title, x, y, log_y=score == "perplexity"))
    return [replace(plot, note=SPREAD if _several(variants) else "") for plot in plots if plot is not None]


def _losses(variants: Variants, slots: Slots) -> list[Plot]:
    plots = []
    several = _several(variants)
    for cost, question, label, quantity in COSTS:
        lines = []
        for name, variant in variants.items():
            x, y, low, high = over_seeds(
                [binned(_cost(run, cost), _positive(run.metrics.column("loss")), 60) for run in variant.runs]
            )
            band = (None, None) if several and len(variant.runs) == 1 else (low, high)
            lines.append(Line(name, slots[name], x, y, *band))
        title = f"{question} does a lower loss take?"
        axes = _labelled(label, quantity, variants), ("training loss", QUANTITIES["loss"])
        plots.append(_curves(lines, f"loss-{cost}", title, *axes, log_y=True))
    band_is = SPREAD if several else "The band goes from the least to the largest loss of a step."
    return [replace(plot, note=f"Means of stretches of the run. {band_is}") for plot in plots if plot is not None]


def _several(variants: Variants) -> bool:
    return any(len(variant.runs) > 1 for variant in variants.values())


def _labelled(label: str, quantity: Quantity, variants: Variants) -> tuple[str, Quantity]:
    """An axis' label, which says where a time was modelled."""
    clock = clock_of(variants.values()) if quantity == "seconds" else ""
    return (f"{label}, {clock}" if clock else label), quantity


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


def factors(variants: Variants, slots: Slots) -> Plot | None:
    """The CF of each step; over several seeds the geometric mean, in a band from the least to the largest."""
    lines = []
    for name, variant in variants.items():
        length = min(len(run.metrics) for run in variant.runs)
        step = variant.first.metrics.column("step")[:length]
        cf = np.maximum([run.metrics.column("cf")[:length] for run in variant.runs], 1.0)
        low, high = cf.min(0), cf.max(0)
        x, y, low, high = _stairs(step, np.where(low == high, low, np.exp(np.log(cf).mean(0))), low, high)
        if len(x):
            at = _thinned(np.unique(np.concatenate([_decisions(run) for run in variant.runs])))
            at = at[at <= x[-1]]
            marks = (at, y[np.maximum(np.searchsorted(x, at, side="right") - 1, 0)])
            lines.append(Line(name, slots[name], x, y, low, high, marks))
    title = "Which CF was sent, and when did the schedule move on?"
    y_axis: tuple[str, Quantity] = ("CF (1 is dense)", "factor")
    if not lines:
        return None
    plot = curves(lines, name="cf", title=title, x=("step", "step"), y=y_axis, log_y=True, stairs=True)
    moves = any(line.marks is not None and len(line.marks[0]) for line in lines)
    notes = ["A mark is where the schedule went on to other levels or settings."] if moves else []
    return replace(plot, note=" ".join([*notes, *([SPREAD] if _several(variants) else [])]))


def _gains(variants: Variants, slots: Slots) -> Plot | None:
    """Of what was sent; the band lies between the two CFs that were evaluated."""
    lines, thresholds = [], set()
    for name, variant in variants.items():
        x, y, _, _ = over_seeds([_course(run, sent_gain(run)) for run in variant.runs])
        if len(x):
            high, low = (
                np.mean([np.interp(x, *_course(run, run.metrics.column(of))[:2]) for run in variant.runs], axis=0)
                for of in ("gains_0", "gains_1")
            )
            lines.append(Line(name, slots[name], x, y, low, high))
            thresholds.add(_epsilon(variant.first))
    if not lines:
        return None
    known = {value: "epsilon" for value in thresholds if value is not None}
    title = "How much of the gradient did compression keep?"
    y_axis: tuple[str, Quantity] = ("gain (1: all of it)", "number")
    plot = curves(lines, name="gain", title=title, x=("step", "step"), y=y_axis, rules=known)
    means = ", means over the seeds" if _several(variants) else ""
    return replace(
        plot, note=f"The line is what was sent, the band lies between the two CFs that were evaluated{means}."
    )


def _course(run: Trace, values: Array) -> tuple[Array, Array, Array, Array]:
    return binned(run.metrics.column("step"), values, 100)


def _times(variants: Variants) -> Plot | None:
    rows, marks, whole = {}, {}, []
    for name, variant in variants.items():
        splits = [split for split in map(time_split, variant.runs) if split]
        if splits:
            rows[name] = {part: 1e3 * statistics.mean(split[part] for split in splits) for part in splits[0]}
            dense_s = [run.summary.get("dense_exchange_s", 0.0) for run in variant.runs if run.summary]
            if dense_s and all(dense_s):  # 0: nothing was sent, or a summary of an older version
                marks[name] = rows[name]["compute"] + 1e3 * statistics.mean(dense_s)
            exchange_s = variant.of_each(lambda run: mean(run.metrics.column("exchange_s")))
            whole.append(f"{name} {1e3 * statistics.mean(exchange_s):.3g} ms")
    if not rows:
        return None
    clock = clock_of(variants.values())
    title = "Where does a step's time go?"
    label = f"ms per step, {clock}" if clock else "ms per step"
    plot = stacked(rows, name="time-split", title=title, label=label, marks=marks, mark="compute + dense exchange")
    return replace(plot, note=f"Whole exchanges, which overlap the rest but for the wait: {', '.join(whole)}.")


def time_split(run: Trace) -> dict[str, float]:
    """Mean seconds of each part of a step; empty where a stock optimizer knew none."""
    metrics = run.metrics
    means = {part: mean(metrics.column(f"{part}_s")) for part in PARTS}
    if np.isfinite(means["encode"]):
        means["compress"] = np.nan
    return {part: value for part, value in means.items() if np.isfinite(value)}


def _layers(variants: Variants, slots: Slots) -> Plot | None:
    """Means over the seeds."""
    known: dict[str, dict[str, float]] = {}
    dense: dict[str, float] = {}
    for name, variant in variants.items():
        of_seeds = [run.metrics.layer_bytes for run in variant.runs if run.metrics.layer_bytes]
        if of_seeds:
            dense |= {layer: both[1] for layers in of_seeds for layer, both in layers.items()}
            known[name] = {layer: statistics.mean(of[layer][0] for of in of_seeds) for layer in of_seeds[0]}
    if not known:
        return None
    largest = sorted(dense, key=lambda layer: -dense[layer])
    shown, others = largest[:MOST_LAYERS], largest[MOST_LAYERS:]
    rows = {layer: {PLAIN: dense[layer]} for layer in shown}
    for name, layers in known.items():
        for layer in shown:
            if layer in layers:
                rows[layer][name] = layers[layer]
    if others:
        sums = {name: sum(layers[o] for o in others if o in layers) for name, layers in known.items()}
        rows[f"{len(others)} smaller ones"] = {PLAIN: sum(dense[layer] for layer in others), **sums}
    title = "Which layers are the bytes sent for?"
    return bars(rows, slots={**slots, PLAIN: -1}, name="layers", title=title, label="bytes sent by worker 0")


def _stairs(x: Array, y: Array, low: Array, high: Array) -> tuple[Array, Array, Array, Array]:
    """Values in a band that hold until the next change: the changes, or where these are many, means of stretches."""
    known = np.isfinite(y)
    x, y, low, high = (values[known] for values in (x, y, low, high))
    changes = np.flatnonzero(np.any([np.diff(values) for values in (y, low, high)], axis=0)) + 1
    if len(changes) > MOST_STAIRS:
        middle, means, _, _ = binned(x, y, MOST_STAIRS, geometric=True)
        return middle, means, binned(x, low, MOST_STAIRS)[2], binned(x, high, MOST_STAIRS)[3]
    kept = np.unique([*changes, 0, len(x) - 1])[: len(x)].astype(int)
    return x[kept], y[kept], low[kept], high[kept]


def _decisions(run: Trace) -> Array:
    """Steps at which the schedule moved to other levels, or assigned other settings to layers."""
    metrics = run.metrics
    step, levels = metrics.column("step"), np.stack([metrics.column("levels_0"), metrics.column("levels_1")])
    moved = np.isfinite(levels[:, 1:]).all(0) & (np.diff(levels) != 0).any(0)
    return np.union1d(step[1:][moved], np.array([step for step, _ in metrics.assigned]))


def _thinned(marks: Array) -> Array:
    """Some, if many."""
    return marks[:: -(-len(marks) // MOST_MARKS) or 1]


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
