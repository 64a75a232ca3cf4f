"""`hvdcomp probe`: starts the workers that measure, and shows how far they are and what they found."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hvdcomp.bench.methods import check_writable
from hvdcomp.config import ConfigError, load
from hvdcomp.costmodel import probe as probe_file
from hvdcomp.costmodel.probe import Probe
from hvdcomp.training.launcher import INTERRUPTED, Interrupted, Job, run
from hvdcomp.training.parts import resolve

MARK = "hvdcomp-probe "
"""Begins a worker's line of progress."""


def measure(
    job: Job,
    methods: Sequence[tuple[str, dict[str, Any]]] | None,
    config: tuple[Path, Sequence[str]] | None,
    output: Path | None,
) -> Probe:
    """Probe a cluster.

    Args:
        job: where the workers run; its command is replaced.
        methods: names and parameters of those whose costs are measured; None is all.
        config: a training configuration and overrides, whose model is measured, too.
        output: where the probe is to be kept.

    Raises:
        ConfigError: an argument is not allowed, or a worker failed.
        Interrupted: a signal has ended the probe.
    """
    if config is not None:
        resolve(load(config[0], config[1]), job.workers)
    if output is not None:
        check_writable(output, "-o")
    resolved = None if config is None else (str(config[0].resolve()), list(config[1]))
    plan = json.dumps({"methods": methods, "config": resolved})
    with tempfile.TemporaryDirectory(prefix="hvdcomp-") as folder:
        written = Path(folder) / "probe.json" if output is None else output.resolve()
        command = [sys.executable, "-m", "hvdcomp.costmodel.probe_worker", plan, str(written)]
        code, said = _run(replace(job, command=command), Path(folder) / "output")
        if code in INTERRUPTED:
            raise Interrupted(code)
        if code != 0:
            raise ConfigError(f"probing ended with exit code {code}; the workers said:\n{said[-3000:]}")
        return probe_file.load(written)


def summary(probe: Probe) -> list[dict[str, str]]:
    """What was found, as rows of a table."""
    rows = []
    for kind, line in probe.collectives.items():
        rows.append(_row(f"{kind}: bandwidth", "Gbit/s", *(1e-9 * v for v in _figures(line.bandwidth))))
        rows.append(_row(f"{kind}: latency of a message", "us", *(1e6 * v for v in _figures(line.latency))))
    if probe.slowest_pair is not None:
        first, second = probe.slowest_pair.workers
        rows.append(_row(f"slowest pair: workers {first} and {second}", "Gbit/s", 1e-9 * probe.slowest_pair.bandwidth))
    rows.append(_row("Horovod's cycle", "ms", 1e3 * probe.cycle_s))
    rows.append(_row("hook of a tensor", "us", 1e6 * probe.tensor_s))
    rows.append(_row("slow-down of an allreduce by computation", "", probe.busy_factor))
    rows.append(_row("memory copy", "GB/s", 1e-9 * probe.memory_bandwidth))
    if probe.model is not None:
        rows.append(_row(f"{probe.model.name}: backward pass", "ms", 1e3 * probe.model.backward_s))
        rows.append(_row(f"{probe.model.name}: rest of a step", "ms", 1e3 * probe.model.rest_s))
        rows.append(_row("slow-down by communication (gamma)", "", probe.model.gamma))
    return rows


def _figures(measured: probe_file.Measured) -> tuple[float, float, float]:
    return measured.value, measured.low, measured.high


def _row(what: str, unit: str, value: float, low: float | None = None, high: float | None = None) -> dict[str, str]:
    interval = "" if low is None or high is None else f"{low:.3g}..{high:.3g}"
    return {"measured": what, "value": f"{value:.3g}", "95 % interval": interval, "unit": unit}


def _run(job: Job, output: Path) -> tuple[int, str]:
    """Run it while a bar follows what rank 0 says. Returns the exit code and what was said beside."""
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, output.open("w+b") as said:
        task = progress.add_task("starting workers", total=None)
        ended = Event()
        with output.open("rb") as following:
            watcher = Thread(target=_follow, args=(following, progress, task, ended), daemon=True)
            watcher.start()
            try:
                code = run(job, "lines", said)
            finally:
                ended.set()
                watcher.join()
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    return code, "\n".join(line for line in lines if MARK not in line)


def _follow(lines: IO[bytes], progress: Progress, task: TaskID, ended: Event) -> None:
    while not ended.is_set():
        line = lines.readline().decode(errors="replace")
        if MARK in line:
            count, _, what = line.partition(MARK)[2].partition(" ")
            completed, _, total = count.partition("/")
            progress.update(task, completed=int(completed) - 1, total=int(total), description=what.strip())
        elif not line:
            ended.wait(0.1)
