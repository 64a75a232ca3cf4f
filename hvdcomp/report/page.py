"""`hvdcomp report`: one page in HTML that needs nothing beside itself, and the figures as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hvdcomp.config import ConfigError
from hvdcomp.report.figures import figures
from hvdcomp.report.plots import Plot, key
from hvdcomp.report.table import table
from hvdcomp.report.trace import Trace, load_trace, runs_inside

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
        folders: of runs, or of a comparison, whose runs take part then, of each variant the first seed's.

    Returns what to tell the user: what was written, and what is missing from it.

    Raises ConfigError when a folder holds no run with a step, or a file cannot be written.
    """
    runs, said = load(folders)
    plots = figures(runs)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(runs, plots), encoding="utf-8")
        if figures_folder is not None:
            files = [path for plot in plots for path in plot.save(figures_folder)]
            said.append(f"{len(files)} figures are in {figures_folder}")
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from error
    said += [f"{name}: {note}" for name, run in runs.items() for note in run.notes]
    return [*said, f"the report is {output}"]


def load(folders: Sequence[Path]) -> tuple[dict[str, Trace], list[str]]:
    """The runs by the names that they are shown under, and what to tell the user of the choice."""
    chosen: list[Path] = []
    said = []
    for folder in folders:
        inside = [] if (folder / "metrics.jsonl").exists() else runs_inside(folder)
        firsts = [next(group) for _, group in groupby(inside, key=lambda run: run.parent)]
        if len(firsts) < len(inside):
            said.append(f"{folder}: {len(inside)} runs, of which the first of each folder is shown")
        chosen += firsts or [folder]
    chosen = list(dict.fromkeys(path.resolve() for path in chosen))
    return {name: load_trace(path) for name, path in zip(names(chosen), chosen, strict=True)}, said


def names(folders: Sequence[Path]) -> list[str]:
    """What tells runs apart: of each path what follows what all have in common, without what all end in."""
    parts = [list(folder.parts) for folder in folders]
    while len(parts) > 1 and all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    while len(parts) > 1 and all(len(p) > 1 for p in parts) and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]
    return ["/".join(p) if len(parts) > 1 else p[-1] for p in parts]


def page(runs: Mapping[str, Trace], plots: Sequence[Plot]) -> str:
    """The whole page."""
    templates = Environment(
        loader=PackageLoader("hvdcomp.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html").render(
        runs=runs,
        table=table(runs),
        keys={name: Markup(key(slot)) for slot, name in enumerate(runs)},
        sections=_sections(plots),
        differing=_differing({name: _flat(run.config) for name, run in runs.items()}),
        configurations={name: yaml.safe_dump(dict(run.config), sort_keys=False) for name, run in runs.items()},
        environments={name: run.job.get("environment", {}) for name, run in runs.items()},
    )


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
