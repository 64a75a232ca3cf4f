"""How soon the runs of a comparison are as good as the baseline's, on each of several modelled networks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdcomp import schedules
from hvdcomp.config import ComparisonConfig, NetworkConfig
from hvdcomp.training.metrics import known_by
from hvdcomp.training.modelled import step_times
from hvdcomp.training.units import bandwidth

if TYPE_CHECKING:
    from hvdcomp.report.plots import Array, Plot, Quantity
    from hvdcomp.report.trace import Trace
    from hvdcomp.training.comparison_report import Ended

HEAD = ("method", "arrives after, s", "of dense's time", "bytes sent until then, MB", "arrived")

NOTE = (
    "arrives: at the first evaluation that is within {tolerance:g} of {baseline}'s last score with the same seed, as a "
    "share of that; mean and standard deviation over the seeds that arrive. A schedule whose decisions depend on time "
    "was trained on each network; all others were trained once, and their steps priced."
)


COSTS: tuple[tuple[str, str, str, Quantity], ...] = (
    ("seconds", "How much modelled time", "modelled time", "seconds"),
    ("nbytes", "How many bytes", "bytes sent", "bytes"),
)
"""What a course spends: its attribute, question, and the axis' label and quantity."""


@dataclass(frozen=True)
class Course:
    """A run on a network: what it had spent, and reached, at each evaluation."""

    steps: Array
    seconds: Array
    nbytes: Array
    scores: Array
    metric: str

    def arrival(self, target: float) -> int | None:
        """The first evaluation that is as good as the target."""
        good = self.scores >= target if self.metric == "accuracy" else self.scores <= target
        return int(good.argmax()) if good.any() else None


@dataclass(frozen=True)
class Arrival:
    """A variant on a network; means over the seeds that arrived, None where none did.

    Attributes:
        mbit: the network's bandwidth, Mbit/s.
        ratio: seconds over the baseline's.
    """

    variant: str
    mbit: float
    seconds: float | None
    seconds_sd: float | None
    nbytes: float | None
    ratio: float | None
    arrived: int
    seeds: int


def course(run: Ended, mbit: float) -> Course:
    """The run's steps on a network, from its metrics.

    Raises ValueError where these do not say what is needed.
    """
    network = NetworkConfig(**run.config.network.model_dump() | {"bandwidth_mbit": mbit})
    workers = int((run.summary or {})["workers"])
    metric = known_by(run.summary or {})
    seconds = nbytes = 0.0
    points = []
    with (Path(str(run.config.run_dir)).expanduser() / "metrics.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            seconds += step_times(row, network, workers, run.config.bucket_mb).total_s
            nbytes += row["bytes_sent"]
            if row.get(metric) is not None:
                points.append((row["step"], seconds, nbytes, row[metric]))
    columns = np.array(points, dtype=float).reshape(-1, 4).T
    return Course(steps=columns[0], seconds=columns[1], nbytes=columns[2], scores=columns[3], metric=metric)


def counts_on(run: Ended, mbit: float) -> bool:
    """Whether the run would have gone so on this network."""
    by_time = schedules.REGISTRY[run.config.schedule.name].timed or run.config.never_slower
    return not by_time or run.config.network.bandwidth_mbit == mbit


def courses(comparison: ComparisonConfig, runs: Sequence[Ended]) -> dict[float, dict[str, dict[int, Course]]]:
    """By network, variant and seed, of all finished runs that count there."""
    found: dict[float, dict[str, dict[int, Course]]] = {}
    for mbit in comparison.networks:
        found[mbit] = {}
        for run in runs:
            if run.summary and counts_on(run, mbit):
                found[mbit].setdefault(run.variant, {})[run.seed] = course(run, mbit)
    return found


def arrivals(
    comparison: ComparisonConfig, found: Mapping[float, Mapping[str, Mapping[int, Course]]]
) -> dict[float, list[Arrival]]:
    """By network, the soonest first; those that never arrive last."""
    tables = {}
    for mbit, variants in found.items():
        targets = {seed: _target(c, comparison.tolerance) for seed, c in variants.get(comparison.baseline, {}).items()}
        rows = [_arrival(variant, mbit, of_seed, targets) for variant, of_seed in variants.items()]
        base = next((row.seconds for row in rows if row.variant == comparison.baseline), None)
        rows = [_with_ratio(row, base) for row in rows if row.seeds]
        tables[mbit] = sorted(rows, key=lambda row: (row.arrived < row.seeds, row.seconds or float("inf")))
    return tables


def _target(baseline: Course, tolerance: float) -> float:
    last = float(baseline.scores[-1])
    return last * (1 - tolerance) if baseline.metric == "accuracy" else last * (1 + tolerance)


def _arrival(variant: str, mbit: float, of_seed: Mapping[int, Course], targets: Mapping[int, float]) -> Arrival:
    seconds, nbytes = [], []
    known = {seed: found for seed, found in of_seed.items() if seed in targets}
    for seed, found in known.items():
        at = found.arrival(targets[seed])
        if at is not None:
            seconds.append(float(found.seconds[at]))
            nbytes.append(float(found.nbytes[at]))
    spread = statistics.stdev(seconds) if len(seconds) > 1 else None
    means = (statistics.mean(values) if values else None for values in (seconds, nbytes))
    mean_s, mean_bytes = means
    return Arrival(variant, mbit, mean_s, spread, mean_bytes, None, len(seconds), len(known))


def _with_ratio(row: Arrival, base: float | None) -> Arrival:
    ratio = row.seconds / base if row.seconds is not None and base else None
    return Arrival(**{**vars(row), "ratio": ratio})


def cells(row: Arrival) -> tuple[str, ...]:
    """A row's cells, under `HEAD`."""
    spread = "" if row.seconds_sd is None else f" ± {row.seconds_sd:.2g}"
    return (
        row.variant,
        "never" if row.seconds is None else f"{row.seconds:.3g}{spread}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.nbytes is None else f"{row.nbytes / 1e6:.3g}",
        f"{row.arrived} of {row.seeds}",
    )


def markdown(tables: Mapping[float, Sequence[Arrival]], comparison: ComparisonConfig) -> str:
    """A table for each network."""
    parts = [NOTE.format(tolerance=comparison.tolerance, baseline=comparison.baseline)]
    for mbit, rows in tables.items():
        lines = [HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *(cells(row) for row in rows)]
        parts += [f"At {bandwidth(mbit)}:", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts)


def figures(
    comparison: ComparisonConfig,
    runs: Sequence[Ended],
    found: Mapping[float, Mapping[str, Mapping[int, Course]]],
) -> list[Plot]:
    """Score against bytes and against time on each network; CF over steps, and steps over CFs, where these change."""
    from hvdcomp.report.figures import QUANTITIES, SPREAD, factors, over_seeds
    from hvdcomp.report.plots import Line, curves, distribution
    from hvdcomp.report.trace import Variant, load_trace

    slots = {variant: slot for slot, variant in enumerate(comparison.variants)}
    plots = []
    for mbit, variants in found.items():
        metric = next((course.metric for of in variants.values() for course in of.values()), "")
        for cost, question, label, quantity in COSTS if metric else ():
            lines = [
                Line(name, slots[name], *over_seeds([(getattr(c, cost), c.scores, None, None) for c in of.values()]))
                for name, of in variants.items()
            ]
            plot = curves(
                lines,
                name=f"{metric}-{label.split()[0] if cost == 'nbytes' else 'time'}-{mbit:g}mbit",
                title=f"{question} does a given {metric} take at {bandwidth(mbit)}?",
                x=(label, quantity),
                y=(f"{metric}, held out", QUANTITIES[metric]),
                log_x=True,
                log_y=metric != "accuracy",
            )
            plots.append(replace(plot, note=SPREAD))
    traces: dict[str, list[Trace]] = {}
    for run in runs:
        if run.summary and run.config.schedule.name != "static":
            traces.setdefault(run.variant, []).append(load_trace(Path(str(run.config.run_dir)).expanduser()))
    if traces:
        scheduled = {name: Variant(tuple(of)) for name, of in traces.items()}
        sent = factors(scheduled, slots)
        plots += [] if sent is None else [sent]
        steps_at = {name: variant.steps_at() for name, variant in scheduled.items()}
        title = "At which CFs were the steps sent, over all seeds?"
        plots.append(distribution(steps_at, slots=slots, title=title))
    return plots
