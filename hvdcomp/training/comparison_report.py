"""What a comparison found: a row a variant, on the terminal, as JSON and as a Markdown table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hvdcomp import compressors
from hvdcomp.config import ComparisonConfig, RunConfig
from hvdcomp.training import comparison_times
from hvdcomp.training.checkpoint import write_atomically
from hvdcomp.training.metrics import known_by
from hvdcomp.training.units import bandwidth

_NOTES = (
    "{metric}: on the held-out samples after the last step, mean and standard deviation over the seeds; difference: of "
    "the means, to {baseline}; bytes sent: of what plain Horovod would have sent, headers and indices included; CF: "
    "the factor that was asked for, original floats / sent floats, where the method has one."
)


@dataclass(frozen=True)
class Result:
    """What all finished runs of a variant found together.

    Attributes:
        setting: what differs from the base.
        metric: "accuracy" (share in [0, 1]) or "perplexity" (lower is better).
        scores: what the run of each seed reached.
        score: their mean.
        score_sd: their standard deviation (n - 1); None of one.
        difference: score minus the baseline's, over the seeds that both have; None where there is none.
        bytes_ratio: bytes sent / bytes that plain Horovod would have sent; None where that is nothing.
        cf: that was asked for, by the papers' definition, the mean over steps; None of a method without such a factor.
        runs: folder of each seed's run.
    """

    variant: str
    setting: str
    metric: str
    scores: dict[int, float]
    score: float
    score_sd: float | None
    difference: float | None
    bytes_ratio: float | None
    cf: float | None
    runs: dict[int, str]


@dataclass(frozen=True)
class Ended:
    """A run of a comparison: its resolved configuration and its summary, None where it is not finished."""

    variant: str
    config: RunConfig
    summary: Mapping[str, Any] | None

    @property
    def seed(self) -> int:
        return self.config.seed


def report(comparison: ComparisonConfig, runs: Sequence[Ended], console: Console) -> None:
    """Write comparison.json and comparison.md, and show the table."""
    found = results(comparison, runs)
    if not found:
        console.print("no run is finished, so there is nothing to compare")
        return
    facts, missing = _facts(comparison, runs), _missing(runs)
    notes = [_NOTES.format(metric=found[0].metric, baseline=comparison.baseline)]
    if missing:
        seeds = (f"{variant}, seed {', '.join(map(str, of_variant))}" for variant, of_variant in missing.items())
        notes.append(f"Not finished: {'; '.join(seeds)}.")
    folder = Path(str(comparison.run_dir)).expanduser()
    courses = comparison_times.courses(comparison, runs)
    arrivals = comparison_times.arrivals(comparison, courses)
    whole: dict[str, Any] = {"facts": facts, "baseline": comparison.baseline, "missing": missing}
    whole["results"] = [asdict(r) for r in found]
    whole["arrivals"] = [asdict(row) for rows in arrivals.values() for row in rows]
    texts = [facts, markdown(found), *notes]
    if arrivals:
        texts.append(comparison_times.markdown(arrivals, comparison))
    for plot in comparison_times.figures(comparison, runs, courses) if arrivals else ():
        texts += [f"![{plot.title}]({plot.save(folder)[-1].name})", *([plot.note] if plot.note else [])]
    write_atomically(folder / "comparison.json", (json.dumps(whole, indent=2) + "\n").encode())
    write_atomically(folder / "comparison.md", "\n\n".join([*texts, ""]).encode())
    _show(found, [facts, *notes], console)
    for mbit, rows in arrivals.items():
        title = f"at {bandwidth(mbit)}"
        _show_table(comparison_times.HEAD, [comparison_times.cells(row) for row in rows], console, title=title)
    console.print(f"written to {folder / 'comparison.md'} and comparison.json", soft_wrap=True, highlight=False)


def results(comparison: ComparisonConfig, runs: Sequence[Ended]) -> list[Result]:
    """A result for each variant of which a run is finished, in the file's order."""
    baseline = {run.seed: _score(run.summary) for run in runs if run.variant == comparison.baseline and run.summary}
    found = []
    for variant, changed in comparison.variants.items():
        finished = [run for run in runs if run.variant == variant and run.summary]
        if finished:
            found.append(_result(variant, setting(changed), finished, baseline))
    return found


def _result(variant: str, changed: str, finished: Sequence[Ended], baseline: Mapping[int, float]) -> Result:
    summaries = [run.summary for run in finished if run.summary]
    scores = {run.seed: _score(run.summary) for run in finished if run.summary}
    differences = [score - baseline[seed] for seed, score in scores.items() if seed in baseline]
    dense = sum(summary["bytes_dense"] for summary in summaries)
    method = compressors.available()[finished[0].config.compression.name]
    return Result(
        variant=variant,
        setting=changed,
        metric=known_by(summaries[0]),
        scores=scores,
        score=statistics.mean(scores.values()),
        score_sd=statistics.stdev(scores.values()) if len(scores) > 1 else None,
        difference=statistics.mean(differences) if differences else None,
        bytes_ratio=sum(s["bytes_sent"] for s in summaries) / dense if dense else None,
        cf=statistics.mean(s["cf_mean"] for s in summaries) if method.has_levels else None,
        runs={run.seed: str(run.config.run_dir) for run in finished},
    )


def _score(summary: Mapping[str, Any]) -> float:
    return float(summary[known_by(summary)])


def setting(changed: Mapping[str, Any]) -> str:
    """ "topk(cf=10), optimizer(lr=0.02)": what a variant changes, in one line."""
    return ", ".join(_section(key, value).removeprefix("compression=") for key, value in changed.items())


def _section(key: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{key}={value}"
    name = f"={value['name']}" if "name" in value else ""
    parameters = ", ".join(f"{k}={v}" for k, v in value.items() if k != "name")
    return f"{key}{name}({parameters})" if parameters else f"{key}{name}"


def head(metric: str) -> tuple[str, ...]:
    """The titles of the table's columns."""
    score = ("accuracy, %", "difference, points") if metric == "accuracy" else (metric, "difference")
    return ("method", "setting", *score, "bytes sent, %", "CF")


def markdown(found: Sequence[Result]) -> str:
    """The table in Markdown."""
    titles = head(found[0].metric)
    lines = [titles, ("---", "---", *["---:"] * (len(titles) - 2)), *(cells(result) for result in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(result: Result) -> tuple[str, ...]:
    """A row's cells, under `head`."""
    unit = 100 if result.metric == "accuracy" else 1
    spread = "" if result.score_sd is None else f" ± {unit * result.score_sd:.2f}"
    return (
        result.variant,
        result.setting,
        f"{unit * result.score:.2f}{spread}",
        "" if result.difference is None else f"{unit * result.difference:+.2f}",
        "" if result.bytes_ratio is None else f"{100 * result.bytes_ratio:.3g}",
        "" if result.cf is None else f"{result.cf:.4g}",
    )


def _facts(comparison: ComparisonConfig, runs: Sequence[Ended]) -> str:
    summary = next(run.summary for run in runs if run.summary)
    samples = summary["test_samples"]
    seeds = ", ".join(map(str, sorted({run.seed for run in runs if run.summary})))
    held_out = f"{samples} held-out words"
    if known_by(summary) == "accuracy":
        held_out = f"{samples} held-out samples, so that one of them is {100 / samples:.2f} points"
    base = setting(comparison.base.model_dump(exclude_unset=True))
    return f"{summary['workers']} workers; seeds {seeds}; {held_out}. All: {base}."


def _missing(runs: Sequence[Ended]) -> dict[str, list[int]]:
    """The seeds of each variant of which the run is not finished."""
    missing: dict[str, list[int]] = {}
    for run in runs:
        if run.summary is None:
            missing.setdefault(run.variant, []).append(run.seed)
    return missing


def _show(found: Sequence[Result], notes: Sequence[str], console: Console) -> None:
    _show_table(head(found[0].metric), [cells(result) for result in found], console, left=2)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)


def _show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console, left: int = 1, title: str | None = None
) -> None:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
