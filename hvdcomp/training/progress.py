"""What rank 0 shows: a progress bar on a terminal, a plain line every few percent elsewhere; a table at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from hvdcomp.training.metrics import PARTS, Row, Totals, score_text
from hvdcomp.training.units import size

PLAIN_LINES = 20
"""Lines that a run shows where there is no terminal."""


class Display(Protocol):
    """Shows how far a run has come, of `total` steps as far as is known."""

    def update(self, row: Row, totals: Totals, total: int) -> None: ...

    def close(self) -> None: ...


class Silent:
    """For every rank but 0."""

    def update(self, row: Row, totals: Totals, total: int) -> None:
        pass

    def close(self) -> None:
        pass


class Bar:
    """A live progress bar with the figures beside it."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        columns = (BarColumn(bar_width=None), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.description}"), console=console, expand=True)
        self._task: TaskID = self._progress.add_task("", total=total, completed=done)
        self._score: str | None = None
        self._progress.start()

    def update(self, row: Row, totals: Totals, total: int) -> None:
        self._score = score_text(row) if "accuracy" in row else self._score
        self._progress.update(
            self._task, completed=row["step"], total=total, description=figures(row, totals, self._score)
        )

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """A plain line every few percent of the run."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._console = console
        self._every = max(1, total // PLAIN_LINES)
        self._score: str | None = None
        self._last = (done, time.perf_counter())

    def update(self, row: Row, totals: Totals, total: int) -> None:
        self._score = score_text(row) if "accuracy" in row else self._score
        step, (last_step, last_s) = row["step"], self._last
        if step % self._every and step != total:
            return
        now = time.perf_counter()
        speed = (step - last_step) / max(1e-9, now - last_s)
        self._last = (step, now)
        text = f"step {step}/{total}  {figures(row, totals, self._score)}  {speed:.0f} steps/s"
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


def make_display(worker: int, total: int, done: int, console: Console) -> Display:
    """The display of this rank; HVDCOMP_PROGRESS ("bar", "lines") overrules what the terminal suggests."""
    if worker != 0:
        return Silent()
    return Bar(total, done, console) if progress_style() == "bar" else Lines(total, done, console)


def progress_style() -> str:
    """ "bar" or "lines".

    A rank cannot see whether it writes to a terminal: Open MPI gives each rank a pseudo-terminal, whatever mpirun's
    output is. So `hvdcomp train -np N` looks before it starts the ranks, and tells them.
    """
    told = os.environ.get("HVDCOMP_PROGRESS")
    if told in ("bar", "lines"):
        return told
    under_launcher = any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    return "bar" if sys.stdout.isatty() and not under_launcher else "lines"


def make_console() -> Console:
    """Standard output; colours and a live bar only in `bar` style."""
    style = progress_style()
    width = None if style == "bar" else int(os.environ.get("COLUMNS", 100))
    return Console(force_terminal=style == "bar", width=width)


def figures(row: Row, totals: Totals, score: str | None) -> str:
    """Loss, the latest evaluation, CF, gain and bytes saved, in one line."""
    parts = [f"loss {row['loss']:.3f}", *([] if score is None else [score])]
    parts.append("dense" if row["cf"] == 1 else f"CF {row['cf']:g}")
    if row["gains"] is not None:
        parts.append(f"gain {row['gains'][max(0, row['decision'])]:.2f}")
    saved = 1 - totals.bytes_sent / totals.bytes_dense if totals.bytes_dense else 0.0
    return "  ".join([*parts, f"bytes saved {saved:.0%}"])


def show_summary(summary: Mapping[str, Any], console: Console) -> None:
    """The table at the end of a run, and the sentence."""
    who = "1 worker" if summary["workers"] == 1 else f"{summary['workers']} workers"
    table = Table(title=f"{summary['run_dir']}: {who}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in summary_rows(summary):
        table.add_row(label, text)
    console.print(table)
    console.print(summary["paid"], soft_wrap=True, highlight=False)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each row of the table."""
    sent, dense = summary["bytes_sent"], summary["bytes_dense"]
    metric, _, score = score_text(summary).partition(" ")
    units = "words" if metric == "perplexity" else "samples"
    rows = [
        (metric, f"{score} on {summary['test_samples']} held-out {units}"),
        ("average CF", f"{summary['cf_mean']:.1f}"),
        ("bytes sent", f"{size(sent)} of {size(dense)} dense per worker ({sent / dense:.1%})" if dense else "none"),
        ("steps", f"{summary['steps']} in {summary['seconds']:.1f} s"),
        ("time split", _time_split(summary)),
        ("sent at CF", ", ".join(f"{_cf(cf)}: {n} steps" for cf, n in summary["cf_steps"].items())),
    ]
    if summary["expected_step_s"] is not None:
        rows.append(("predicted", _prediction(summary["expected_step_s"], summary["iteration_s"] / summary["steps"])))
    if summary["residual_nbytes"]:
        rows.append(("memory", f"{size(summary['residual_nbytes'])} of residuals per worker"))
    if summary["skipped"]:
        rows.append(("skipped", f"{summary['skipped']} steps with a gradient that is not finite"))
    equal = f"yes, bitwise (sha256 {summary['parameters_sha256'][:12]})" if summary["parameters_equal"] else "NO"
    return [*rows, ("replicas equal", equal)]


def _prediction(expected_s: float, measured_s: float) -> str:
    return f"{1e3 * expected_s:.3g} ms a step, measured {1e3 * measured_s:.3g} ms ({expected_s / measured_s - 1:+.0%})"


def _time_split(summary: Mapping[str, Any]) -> str:
    whole = sum(summary[name] for name in PARTS)
    if not whole:
        return "not known of a stock optimizer"
    return ", ".join(f"{name.removesuffix('_s')} {summary[name] / whole:.0%}" for name in PARTS)


def _cf(cf: str) -> str:
    return "dense" if cf == "1" else cf
