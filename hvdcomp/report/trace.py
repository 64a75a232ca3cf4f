"""What a run's folder tells, finished or not: metrics.jsonl, config.yaml, job.json and summary.json."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hvdcomp import compressors, schedules
from hvdcomp.config import ConfigError
from hvdcomp.report.plots import Array
from hvdcomp.training.units import bandwidth

COLUMNS = (
    *("step", "loss", "lr", "cf", "decision", "skipped", "bytes_sent", "bytes_dense", "bytes_received"),
    *("compute_s", "compress_s", "encode_s", "decode_s", "exchange_s", "wait_s", "decide_s", "iteration_s"),
    *("accuracy", "perplexity", "test_loss"),
)
"""Of a line of metrics.jsonl, what is kept of every step; NaN where a line does not know it."""

PAIRS = ("levels", "gains")


class Metrics:
    """The lines of metrics.jsonl as columns; reads on where the file grows.

    Attributes:
        broken: lines that could not be read.
        assigned: step and settings of each change that a schedule made to units ("switched" of a line).
        layer_bytes: of the latest line that has them, {unit: [sent, dense]}.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clear()

    def _clear(self) -> None:
        self._columns = {name: array("d") for name in (*COLUMNS, *(f"{pair}_{i}" for pair in PAIRS for i in (0, 1)))}
        self._offset = 0
        self.broken = 0
        self.assigned: list[tuple[float, Mapping[str, Any]]] = []
        self.layer_bytes: Mapping[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def update(self) -> int:
        """Read what was added since the last call; a last line without an end is left for later. Returns the lines.

        A file that became shorter, as of a run that was resumed from an earlier step, is read anew. Raises OSError.
        """
        before = len(self)
        with self.path.open("rb") as lines:
            if lines.seek(0, 2) < self._offset:
                self._clear()
                before = 0
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._add(line)
        return len(self) - before

    def column(self, name: str) -> Array:
        """Values of all steps: one of `COLUMNS`, or levels_0, levels_1, gains_0, gains_1."""
        return np.array(self._columns[name])

    def last(self, name: str) -> float:
        """The latest value, NaN where there is none."""
        return next((value for value in reversed(self._columns[name]) if not math.isnan(value)), math.nan)

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step = float(row["step"])
        except (ValueError, KeyError, TypeError):
            self.broken += 1
            return
        for name in COLUMNS:
            self._columns[name].append(_number(row.get(name)))
        for pair in PAIRS:
            both = row.get(pair)
            low, high = both if isinstance(both, list) and len(both) == 2 else (None, None)
            self._columns[f"{pair}_0"].append(_number(low))
            self._columns[f"{pair}_1"].append(_number(high))
        if isinstance(row.get("switched"), dict) and row["switched"]:
            self.assigned.append((step, row["switched"]))
        if isinstance(row.get("layer_bytes"), dict) and row["layer_bytes"]:
            self.layer_bytes = row["layer_bytes"]


@dataclass(frozen=True)
class Trace:
    """A run.

    Attributes:
        config: as config.yaml holds it; empty where it cannot be read.
        job: as job.json holds it; empty likewise.
        summary: None where the run is not finished.
        notes: what is missing, for people.
    """

    folder: Path
    metrics: Metrics
    config: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def seed(self) -> Any:
        """As configured; None where that is not known."""
        return self.config.get("seed")

    @property
    def clock(self) -> str:
        """How its times came about: "measured", or "modelled at 100 Mbit/s"."""
        network = self.config.get("network")
        mbit = network.get("bandwidth_mbit") if isinstance(network, Mapping) else None
        return f"modelled at {bandwidth(mbit)}" if mbit else "measured"

    @property
    def score(self) -> str:
        """The metric that the run is known by: "perplexity" (lower is better) or "accuracy"."""
        return "perplexity" if math.isfinite(self.metrics.last("perplexity")) else "accuracy"

    @property
    def method(self) -> str:
        """ "topk, gravac (epsilon=0.2)": compression and schedule, with the parameters that are not the usual ones."""
        methods = {name: dict(cls.parameters()) for name, cls in compressors.available().items()}
        usual = {name: {p.name: p.default for p in cls.parameters()} for name, cls in schedules.REGISTRY.items()}
        compression = _named(self.config.get("compression"), methods)
        schedule = _named(self.config.get("schedule"), usual).removeprefix("static")
        return ", ".join(part for part in (compression, schedule) if part) or "not known"

    @property
    def is_dense(self) -> bool:
        """A run of plain Horovod, or one that compressed nothing."""
        return bool(np.nanmax(self.metrics.column("cf"), initial=1.0) <= 1.0)

    def steps_at(self) -> dict[float, int]:
        """Steps that were sent at each CF, which is rounded to four digits."""
        cf = self.metrics.column("cf")
        values, counts = np.unique(cf[np.isfinite(cf)], return_counts=True)
        found: Counter[float] = Counter()
        for value, count in zip(values, counts, strict=True):
            found[max(1.0, float(f"{value:.4g}"))] += int(count)
        return dict(found)


@dataclass(frozen=True)
class Variant:
    """Runs that differ by their seeds; a run by itself is one of one.

    Attributes:
        runs: by seed; at least one.
        notes: what is missing, for people.
    """

    runs: tuple[Trace, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Trace:
        return self.runs[0]

    @property
    def score(self) -> str:
        return self.first.score

    @property
    def is_dense(self) -> bool:
        return all(run.is_dense for run in self.runs)

    def steps_at(self) -> dict[float, int]:
        """As a run's, over all seeds."""
        return dict(sum((Counter(run.steps_at()) for run in self.runs), start=Counter()))

    def of_each(self, value: Callable[[Trace], float]) -> list[float]:
        """A figure of each run."""
        return [value(run) for run in self.runs]


def clock_of(variants: Iterable[Variant]) -> str:
    """How the times of some runs came about; nothing where all were measured."""
    clocks = {run.clock for variant in variants for run in variant.runs}
    if len(clocks) > 1:
        return "modelled or measured" if "measured" in clocks else "modelled on several networks"
    return clocks.pop().removeprefix("measured")


def load_trace(folder: Path, known: Metrics | None = None) -> Trace:
    """Read a run's folder; of one that was interrupted what is there.

    Args:
        known: metrics of that folder, read before, of which only what is new is read.

    Raises ConfigError when there is nothing to show.
    """
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no run: there is no such folder (give the run_dir of an `hvdcomp train`)")
    if not path.exists() and (inside := runs_inside(folder)):
        latest = max(inside, key=lambda run: (run / "metrics.jsonl").stat().st_mtime)
        raise ConfigError(f"{folder} is no run, but holds {len(inside)}: give one of them, such as {latest}")
    if not path.exists():
        raise ConfigError(f"{folder} is no run: it holds no metrics.jsonl, nor does a folder in it")
    metrics = known or Metrics(path)
    try:
        metrics.update()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not len(metrics):
        raise ConfigError(f"{path} holds no step yet, so there is nothing to show")
    notes = [f"{metrics.broken} lines of metrics.jsonl are broken and left out"] if metrics.broken else []
    config, job, summary = (_mapping(folder / name, notes) for name in ("config.yaml", "job.json", "summary.json"))
    if not summary:
        notes.append(f"not finished: step {metrics.last('step'):.0f} is the last that was written")
    return Trace(folder, metrics, config or {}, job or {}, summary, tuple(notes))


def runs_inside(folder: Path) -> list[Path]:
    """Folders of runs that are in a folder, such as that of a comparison."""
    return [path.parent for path in sorted(folder.rglob("metrics.jsonl"))]


def _mapping(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    """A file's content, YAML or JSON, None where there is none."""
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, Mapping):
        notes.append(f"{path.name} cannot be read")
        return None
    return found


def _named(section: Any, usual: Mapping[str, Mapping[str, Any]]) -> str:
    """A section's name, and the parameters that have not their usual values."""
    if not isinstance(section, Mapping):
        return "" if section is None else str(section)
    name = str(section.get("name", ""))
    known = usual.get(name, {})
    parameters = ", ".join(f"{k}={v}" for k, v in section.items() if k != "name" and (k not in known or v != known[k]))
    return f"{name} ({parameters})" if parameters else name


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
