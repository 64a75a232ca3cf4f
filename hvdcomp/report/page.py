"""`hvdcomp report`: one page in HTML that needs nothing beside itself, and the figures as files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hvdcomp.config import ConfigError
from hvdcomp.report.figures import figures
from hvdcomp.report.plots import Plot, key
from hvdcomp.report.table import table
from hvdcomp.report.trace import Trace, Variant, clock_of, load_trace, runs_inside
from hvdcomp.training.checkpoint import write_atomically

MOST_CHANGES = 40
"""Of a schedule's assignments, how many are listed."""

SEED = re.compile(r"seed-(\d+)")
"""The folder of a run of a comparison, in that of its variant."""

SECTIONS = {
    "accuracy": "Does it learn?",
    "perplexity": "Does it learn?",
    "loss": "Does it learn?",
    "cf": "What was compressed?",
    "gain": "What was compressed?",
    "distribution": "What was compressed?",
    "time-split": "Where did time and bytes go?",
    "layers": "Where did time and bytes go?",
}
"""Under which heading a figure is, by how its name begins."""


def write(folders: Sequence[Path], output: Path, figures_folder: Path | None = None) -> list[str]:
    """Write a report on some runs, and the figures as PNG and SVG where a folder for them is given.

    Args:
        folders: of runs, or of comparisons, whose runs take part then, all seeds of a variant together.

    Returns what to tell the user: what was written, and what is missing from it.

    Raises ConfigError when a folder holds no run with a step, or a file cannot be written.
    """
    shown = load(folders)
    plots = figures(shown.variants)
    said = [f"{name}: {note}" for name, variant in shown.variants.items() for note in variant.notes] + shown.notes
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, page(shown, plots).encode())
        if figures_folder is not None:
            files = [path for plot in plots for path in plot.save(figures_folder)]
            said.append(f"{len(files)} figures are in {figures_folder}")
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from error
    return [*said, f"the report is {output}"]


@dataclass(frozen=True)
class Shown:
    """What a report is on.

    Attributes:
        variants: by the names that they are shown under.
        baseline: the variant that a comparison compares with; None: none is named.
        notes: what is missing, for people.
    """

    variants: dict[str, Variant]
    baseline: str | None = None
    notes: list[str] = field(default_factory=list)


def load(folders: Sequence[Path]) -> Shown:
    """Runs of the same variant, which are in folders VARIANT/seed-N, are shown as one.

    Raises ConfigError when a folder holds no run with a step.
    """
    found: dict[Path, list[Path]] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for run in [folder] if (folder / "metrics.jsonl").exists() else runs_inside(folder) or [folder]:
            of_variant = found.setdefault(run.parent if SEED.fullmatch(run.name) else run, [])
            of_variant += [run] if run not in of_variant else []
    variants: dict[Path, Variant] = {}
    notes = []
    for path, runs in found.items():
        try:
            variants[path] = load_variant(sorted(runs, key=lambda run: [int(n) for n in SEED.findall(run.name)]))
        except ConfigError as error:
            if len(folders) == len(found):
                raise
            notes.append(str(error))
    if not variants:
        raise ConfigError(notes[0])
    called = dict(zip(names(list(variants)), variants.items(), strict=True))
    order, baseline = _comparison(folders[0]) if len(folders) == 1 else ([], None)
    known = {name: called[name][1] for name in order if name in called}
    known |= {name: variant for name, (_, variant) in called.items()}
    return Shown(known, baseline if baseline in known else None, notes)


def load_variant(folders: Sequence[Path]) -> Variant:
    """Runs of several seeds; one that is not finished is left out where another is. Raises ConfigError of none."""
    if len(folders) == 1:
        run = load_trace(folders[0])
        return Variant((run,), run.notes)
    runs, notes = [], []
    for folder in folders:
        try:
            runs.append(load_trace(folder))
        except ConfigError as error:
            notes.append(str(error))
    if not runs:
        raise ConfigError(notes[0])
    finished = [run for run in runs if run.summary]
    notes += [f"{run.folder.name}: {note}" for run in runs for note in run.notes]
    if finished and len(finished) < len(runs):
        notes.append("shown are the seeds that are finished")
    chosen = finished or runs
    differing = _differing({str(run.folder): _flat(run.config) for run in chosen}) if len(chosen) > 1 else {}
    differing.pop("seed", None)
    if differing:
        notes.append(f"its seeds ran with different configurations: {', '.join(differing)}")
    return Variant(tuple(chosen), tuple(notes))


def _comparison(folder: Path) -> tuple[list[str], str | None]:
    """The order of a comparison's variants, and the one that others are compared with; nothing if none is finished."""
    try:
        told = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
        return [result["variant"] for result in told["results"]], told["baseline"]
    except (OSError, ValueError, LookupError, TypeError):
        return [], None


def names(folders: Sequence[Path]) -> list[str]:
    """What tells runs apart: of each path what follows what all have in common, without what all end in."""
    parts = [list(folder.parts) for folder in folders]
    while len(parts) > 1 and all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    while len(parts) > 1 and all(len(p) > 1 for p in parts) and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]
    return ["/".join(p) if len(parts) > 1 else p[-1] for p in parts]


def page(shown: Shown, plots: Sequence[Plot]) -> str:
    """The whole page."""
    templates = Environment(
        loader=PackageLoader("hvdcomp.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    variants = shown.variants
    firsts = {name: variant.first for name, variant in variants.items()}
    differing = _differing({name: _flat(run.config) for name, run in firsts.items()})
    if any(len(variant.runs) > 1 for variant in variants.values()):
        differing.pop("seed", None)
    return templates.get_template("page.html").render(
        variants=variants,
        headline=_headline(variants),
        notes=shown.notes,
        caption=_caption(variants),
        decisions={
            _of_seed(name, variant, run): changes
            for name, variant in variants.items()
            for run in variant.runs
            if (changes := _changes(run))
        },
        most_changes=MOST_CHANGES,
        table=table(variants, shown.baseline),
        keys={name: Markup(key(slot)) for slot, name in enumerate(variants)},
        sections=_sections(plots),
        differing=differing,
        configurations={name: yaml.safe_dump(dict(run.config), sort_keys=False) for name, run in firsts.items()},
        environments={name: run.job.get("environment", {}) for name, run in firsts.items()},
    )


def _headline(variants: Mapping[str, Variant]) -> str:
    """ "3 runs", "5 variants with 2 seeds each"."""
    counts = [len(variant.runs) for variant in variants.values()]
    if max(counts) == 1:
        return "A run" if len(counts) == 1 else f"{len(counts)} runs"
    what = "A variant" if len(counts) == 1 else f"{len(counts)} variants"
    seeds = f"{counts[0]}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{what} with {seeds} seeds{' each' if len(counts) > 1 else ''}"


def _caption(variants: Mapping[str, Variant]) -> str:
    """Of the table: how its times came about, and what its numbers are."""
    clock = clock_of(variants.values())
    several = any(len(variant.runs) > 1 for variant in variants.values())
    parts = [f"Times are {clock}."] if clock else []
    return " ".join([*parts, *(["Mean ± standard deviation over the seeds."] if several else [])])


def _of_seed(name: str, variant: Variant, run: Trace) -> str:
    return f"{name}, seed {run.seed}" if len(variant.runs) > 1 else name


def _changes(run: Trace) -> list[tuple[int, dict[str, list[str]]]]:
    """After which step a schedule changed layers' settings: by the new setting, as text, the layers that got it."""
    changes = []
    for step, switched in run.metrics.assigned:
        layers: dict[str, list[str]] = {}
        for layer, setting in switched.items():
            text = ", ".join(str(value) if name == "name" else f"{name}={value}" for name, value in setting.items())
            layers.setdefault(text or "the method's own", []).append(layer)
        changes.append((int(step), layers))
    return changes


def _sections(plots: Sequence[Plot]) -> dict[str, list[tuple[Plot, Markup]]]:
    found: dict[str, list[tuple[Plot, Markup]]] = {}
    for plot in plots:
        heading = next(heading for start, heading in SECTIONS.items() if plot.name.startswith(start))
        found.setdefault(heading, []).append((plot, _labelled(plot)))
    return found


def _labelled(plot: Plot) -> Markup:
    """The drawing as one image that a screen reader can tell of."""
    label = Markup('<svg role="img" aria-label="{}"').format(plot.description)
    return Markup(plot.svg().replace("<svg", str(label), 1))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"optimizer.lr": "0.1"}."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.dumps(value)
    return found


def _differing(configs: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """The fields in which the runs were configured differently, with each run's value."""
    fields = dict.fromkeys(name for config in configs.values() for name in config)
    values = {name: [config.get(name, "") for config in configs.values()] for name in fields if name != "run_dir"}
    return {name: given for name, given in values.items() if len(set(given)) > 1}
