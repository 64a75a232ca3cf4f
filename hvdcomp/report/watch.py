"""`hvdcomp watch`: a run in the terminal, as it goes."""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvdcomp.config import ConfigError
from hvdcomp.report.figures import time_split
from hvdcomp.report.plots import SERIES, Array, binned
from hvdcomp.report.table import mean, sent_gain
from hvdcomp.report.trace import Metrics, Trace, load_trace
from hvdcomp.training.progress import show_summary
from hvdcomp.training.units import duration, size

BLOCKS = "▁▂▃▄▅▆▇█"
SHADES = "█▓▒░▚▞"
"""Of the parts of a step, so that they are told apart without colours."""
RECENT = 50
"""Steps that the present speed and gain are the means of."""


def watch(folder: Path, console: Console, *, once: bool = False, every_s: float = 1.0) -> None:
    """Show a run until nobody works on it any more; ends with its summary, if it is finished.

    Args:
        once: show one frame of what is there, and return.

    Raises ConfigError when there is no run, or it ended without a step; KeyboardInterrupt on Ctrl-C.
    """
    if once:
        console.print(frame(load_trace(folder)))
        return
    metrics, pace = Metrics(folder / "metrics.jsonl"), Pace()
    with Live(console=console, auto_refresh=False) as live:
        while is_running(folder):
            try:
                run = load_trace(folder, metrics)
                live.update(frame(run, pace.step_s(len(run.metrics))), refresh=True)
            except ConfigError:  # it has just begun
                live.update(Text(f"{folder}: no step yet"), refresh=True)
            time.sleep(every_s)
        run = load_trace(folder, metrics)
        live.update(frame(run), refresh=True)
    if not console.is_terminal:
        console.print()  # the last frame has no end of a line there
    if run.summary is not None:
        try:
            show_summary(run.summary, console)
        except KeyError as error:
            console.print(f"{folder}: finished; its summary.json, of another version of hvdcomp, has no {error}")
    else:
        console.print(f"{folder}: nobody works on this run, and it is not finished", highlight=False)


class Pace:
    """Seconds of a step as the clock on the wall sees it, with evaluations and all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def step_s(self, steps: int) -> float | None:
        """Given how many steps are done; None until some were seen to be."""
        now = self._clock()
        if self._first is None or steps < self._first[1]:
            self._first = now, steps
        began, before = self._first
        return (now - began) / (steps - before) if steps > before else None


def is_running(folder: Path) -> bool:
    """Whether a job holds the run's folder; where a file system has no locks, a run without a summary counts as one."""
    try:
        with (folder / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return not (folder / "summary.json").exists()
    return False


def frame(run: Trace, step_s: float | None = None) -> RenderableType:
    """What is known of a run at a moment.

    Args:
        step_s: seconds of a step, to tell when it ends; None: as its metrics say.
    """
    metrics = run.metrics
    figures = Table.grid(padding=(0, 2))
    for label, figure, curve in _rows(run):
        figures.add_row(Text(label, style="bold"), figure, Text(curve, style="cyan"))
    parts: list[RenderableType] = [
        Text.assemble((str(run.folder), "bold"), f"  {run.method}"),
        _progress(run, step_s or mean(metrics.column("iteration_s")[-RECENT:])),
        figures,
    ]
    split = time_split(run)
    if split:
        parts += [_split_bar(split), _split_legend(split)]
    return Group(*parts, *(Text(note, style="yellow") for note in run.notes if not note.startswith("not finished")))


def _rows(run: Trace) -> list[tuple[str, str, str]]:
    """Label, latest figure, and how it went so far."""
    metrics = run.metrics
    sent, dense = (float(np.nansum(metrics.column(name))) for name in ("bytes_sent", "bytes_dense"))
    cf, loss, gain, score = metrics.column("cf"), metrics.column("loss"), sent_gain(run), metrics.column(run.score)
    rows = [("loss", f"{metrics.last('loss'):.4g}", sparkline(np.log(np.where(loss > 0, loss, np.nan))))]
    if np.isfinite(score).any():
        last = metrics.last(run.score)
        rows.append((run.score, f"{last:.2%}" if run.score == "accuracy" else f"{last:.2f}", sparkline(score)))
    rows.append(("CF", f"{max(1.0, metrics.last('cf')):.4g}", sparkline(np.log(np.maximum(cf, 1.0)))))
    if np.isfinite(gain).any():
        rows.append(("gain", f"{mean(gain[-RECENT:]):.2f}", sparkline(gain)))
    rows.append(("bytes", f"{size(sent)} of {size(dense)} dense", f"{1 - sent / dense:.0%} saved" if dense else ""))
    return rows


def sparkline(values: Array, width: int = 40) -> str:
    """A curve in one line of text, scaled to its range; without what is not finite."""
    _, means, _, _ = binned(np.arange(len(values), dtype=float), values, width)
    if not len(means):
        return ""
    low, high = float(means.min()), float(means.max())
    heights = (means - low) / (high - low) if high > low else np.zeros(len(means))
    return "".join(BLOCKS[round(float(height) * (len(BLOCKS) - 1))] for height in heights)


def _progress(run: Trace, step_s: float) -> RenderableType:
    step, total = run.metrics.last("step"), run.job.get("steps")
    speed = f"{1 / step_s:.3g} steps/s" if step_s > 0 else ""
    if not isinstance(total, int):
        return Text(f"step {step:.0f}  {speed}")
    left = f"{duration((total - step) * step_s)} left" if step < total and math.isfinite(step_s) else ""
    line = Table.grid(padding=(0, 2))
    line.add_row(ProgressBar(total, step, width=40), f"{step:.0f}/{total}", speed, left)
    return line


def _split_bar(split: Mapping[str, float], width: int = 60) -> Text:
    whole, bar, edge = sum(split.values()) or 1.0, Text(), 0.0
    for number, seconds in enumerate(split.values()):
        start, edge = edge, edge + seconds
        bar.append(SHADES[number] * (round(width * edge / whole) - round(width * start / whole)), style=SERIES[number])
    return bar


def _split_legend(split: Mapping[str, float]) -> Text:
    legend = Text()
    for number, (part, seconds) in enumerate(split.items()):
        legend.append(f"{SHADES[number]} ", style=SERIES[number])
        legend.append(f"{part} {1e3 * seconds:.3g} ms  ")
    return legend
