"""What a schedule would have decided on a recorded run, without training."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hvdcomp import schedules
from hvdcomp.config import ConfigError, read_yaml
from hvdcomp.schedules import Assigning, Evidence, Overlap, Schedule, Statistics, Sums, UnitForm
from hvdcomp.schedules.base import Undecided

Row = Mapping[str, Any]


class UnknownError(Exception):
    """The trace does not hold what the schedule wants to know; the message says what."""


@dataclass(frozen=True)
class Replayed:
    """One step: what was done, and what the schedule would have."""

    step: int
    was: str
    would: str


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. Raises ConfigError where it cannot be read, or is none."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as metrics.jsonl: {error}") from None
    if not rows or not all(isinstance(row, dict) and {"step", "cf", "skipped"} <= set(row) for row in rows):
        raise ConfigError(f"{path} holds no steps: give the metrics.jsonl of a run's folder")
    return rows


def workers_of(path: Path) -> int | None:
    """The number of workers of the run that a trace lies beside, None where nothing says it."""
    try:
        return int(json.loads((path.parent / "summary.json").read_text(encoding="utf-8"))["workers"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def make_schedule(text: str, overrides: Sequence[str]) -> Schedule:
    """A schedule from its name, from {name: ..., ...} in YAML, or from the `schedule` of a configuration file.

    Raises ConfigError for one that there is not, and for parameters that it refuses.
    """
    if Path(text).is_file():
        found = read_yaml(Path(text).read_text(encoding="utf-8"), text)
        found = found.get("schedule", found) if isinstance(found, dict) else found
    else:
        found = read_yaml(text, "--schedule")
    chosen = {"name": found} if isinstance(found, str) else found
    if not isinstance(chosen, dict) or "name" not in chosen:
        raise ConfigError(f"--schedule must be a name, or {{name: gravac, epsilon: 0.9}}, got {text!r}")
    given = dict(chosen)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not (key and equals):
            raise ConfigError(f"{override!r} is no parameter: write name=value, for example epsilon=0.9")
        given[key] = read_yaml(value, override)
    try:
        return schedules.create(given.pop("name"), **given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--schedule: {error}") from None


def replay(rows: Sequence[Row], schedule: Schedule, workers: int) -> tuple[list[Replayed], str]:
    """Feed a trace to a schedule.

    Returns:
        Each step that could be replayed, and why no further one could ("" where all were).

    A gain is known at the factors that the run evaluated, and stands until it is evaluated again; a factor that was
    never evaluated before stops the replay, since all later decisions hang on it. A time is known at the factors that
    the run sent: where the schedule sends another, it is the median of those. Residuals are those of the run.
    """
    schedule.prepare(workers)
    if isinstance(schedule, Assigning):
        steps = _assigned(rows, schedule)
    elif isinstance(schedule, Undecided):
        steps = _undecided(rows, schedule)
    else:
        steps = _decided(rows, schedule)
    done: list[Replayed] = []
    try:
        for step in steps:
            done.append(step)
    except UnknownError as error:
        return done, str(error)
    return done, ""


def differences(steps: Iterable[Replayed]) -> list[dict[str, str]]:
    """Runs of steps that were, or would have been, otherwise, as rows of a table."""
    table = []
    for (was, would), run in groupby(steps, key=lambda step: (step.was, step.would)):
        span = list(run)
        if was != would:
            first, last = span[0].step, span[-1].step
            table.append({"steps": f"{first}" if first == last else f"{first}-{last}", "was": was, "would be": would})
    return table


def _undecided(rows: Sequence[Row], schedule: Schedule) -> Iterable[Replayed]:
    for row in rows:
        cf = schedule.cf_at(row["step"] - 1)
        if cf is None:
            raise UnknownError(f"schedule {schedule.name!r} leaves the factor to the compressor: give it one, cf=100")
        yield Replayed(row["step"], _cf(row["cf"]), _cf(cf))


def _decided(rows: Sequence[Row], schedule: Schedule) -> Iterable[Replayed]:
    if schedule.per_bucket:
        raise UnknownError("a trace has sums over all buckets, which do not tell each bucket's gain: give per=model")
    times: defaultdict[float, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.get("iteration_s") is not None:
            times[row["cf"]].append((row["iteration_s"], row.get("compress_s") or 0.0))
    known: dict[float, tuple[float, float]] = {}
    lr = _rates(rows)
    for place, row in enumerate(rows):
        if row["skipped"]:
            continue
        if row.get("statistics") is None:
            raise UnknownError(f"step {row['step']} has no statistics: they are recorded under an adaptive schedule")
        seen = Statistics.from_vector(row["statistics"])
        for level, cf in enumerate(row["levels"]):
            known[cf] = (seen.kept[level] / seen.acc if seen.acc else 1.0, seen.kept_norm[level])
        decision = schedule.decide(_at(schedule.levels, seen, known, row["step"]))
        own = row["cf"] == decision.cf and row.get("iteration_s") is not None
        cost = [(row["iteration_s"], row.get("compress_s") or 0.0)] if own else times.get(decision.cf)
        if cost:
            seconds, compress_s = (statistics.median(column) for column in zip(*cost, strict=True))
            schedule.observe(seconds, compress_s)
        schedule.hear(lr[place + 1], _number(row, "loss"))
        yield Replayed(row["step"], _cf(row["cf"]), _cf(decision.cf))


def _at(
    levels: tuple[float, float], seen: Statistics, known: Mapping[float, tuple[float, float]], step: int
) -> Statistics:
    """The statistics at the levels that the schedule wants."""
    shares = []
    for cf in levels:
        if cf not in known and cf != 1:
            held = ", ".join(f"{one:g}" for one in sorted(known))
            raise UnknownError(
                f"at step {step} it wants the gain at CF {cf:g}, which the trace does not hold (but {held}): "
                "what it would have done from there on cannot be known"
            )
        shares.append(known.get(cf, (1.0, seen.raw_norm)))
    (low, low_norm), (high, high_norm) = shares
    return Statistics(seen.acc, (low * seen.acc, high * seen.acc), seen.raw_norm, (low_norm, high_norm), seen.finite)


def _assigned(rows: Sequence[Row], schedule: Assigning) -> Iterable[Replayed]:
    if schedule.wants_echo:
        raise UnknownError(
            f"schedule {schedule.name!r} learns from what its own steps did to the next gradient, which no trace of "
            "other steps can tell: train with it"
        )
    phases = [row["phase"] for row in rows if row.get("phase")]
    if not phases:
        raise UnknownError(
            "the trace holds no phases: they are recorded under a schedule that assigns settings to tensors"
        )
    units = [UnitForm(name, tuple(shape)) for name, shape in phases[0]["units"].items()]
    schedule.prepare_units(units)
    now = [schedule.first] * len(units)
    lr = _rates(rows)
    for place, row in enumerate(rows):
        if row["skipped"]:
            continue
        ends, phase = schedule.ends_phase(), row.get("phase")
        if ends and phase is None:
            raise UnknownError(
                f"at step {row['step']} it wants the gradients' sums, and no phase of the trace ends there: "
                "replay it with the same steps of a phase"
            )
        assigned = list(schedule.assign(_evidence(row, lr[place], lr[place + 1], phase if ends else None)))
        changed = {
            unit.name: dict(schedule.settings[new])
            for unit, old, new in zip(units, now, assigned, strict=True)
            if old != new
        }
        now = assigned
        yield Replayed(row["step"], _switched(row.get("switched") or {}), _switched(changed))


def _evidence(row: Row, lr: float, next_lr: float, phase: Mapping[str, Any] | None) -> Evidence:
    return Evidence(
        row["step"] - 1,
        lr=lr,
        next_lr=next_lr,
        loss=_number(row, "loss"),
        seconds=_number(row, "iteration_s"),
        bytes_sent=row.get("bytes_sent") or 0,
        bytes_dense=row.get("bytes_dense") or 0,
        phase_steps=phase["steps"] if phase else 0,
        sums=tuple(Sums(*sums) for sums in phase["sums"]) if phase else (),
        overlaps=tuple(Overlap(*overlap) for overlap in phase["overlaps"]) if phase else (),
        compress_s=_number(row, "compress_s"),
        exchange_s=_number(row, "exchange_s"),
        wait_s=_number(row, "wait_s"),
    )


def _rates(rows: Sequence[Row]) -> list[float]:
    """The learning rate of each step, and of the one after the last, which is taken to stay."""
    rates = [_number(row, "lr") for row in rows]
    return [*rates, rates[-1]]


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return math.nan if value is None else float(value)


def _cf(cf: float) -> str:
    return "dense" if cf == 1 else f"CF {cf:g}"


def _switched(changed: Mapping[str, Any]) -> str:
    """Units by the setting that they take."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, setting in changed.items():
        names[", ".join(f"{key}={value}" for key, value in setting.items()) or "as given"].append(name)
    return "; ".join(f"{setting}: {', '.join(units)}" for setting, units in names.items()) or "no change"
