"""Several configurations, each with several seeds: trains what is not finished yet, one run at a time.

RUN_DIR/VARIANT/seed-0        the run's folder, as `hvdcomp train` leaves it
RUN_DIR/VARIANT/seed-0.yaml   what it was started with
RUN_DIR/VARIANT/seed-0.log    what it printed
RUN_DIR/comparison.json, .md  what came out (`hvdcomp.training.comparison_report`)
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hvdcomp.config import ComparisonConfig, ConfigError, RunConfig, did_you_mean, parse
from hvdcomp.training import launcher
from hvdcomp.training.checkpoint import CheckpointError, find_latest, write_atomically
from hvdcomp.training.comparison_report import Ended, report
from hvdcomp.training.launcher import Job
from hvdcomp.training.metrics import score_text
from hvdcomp.training.parts import resolve
from hvdcomp.training.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    config: RunConfig
    """Resolved."""
    workers: int

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(str(self.config.run_dir)).expanduser())

    def beside(self, suffix: str) -> Path:
        """The file beside the run's folder that has its name."""
        path = self.folder.path
        return path.with_name(path.name + suffix)

    def summary(self) -> dict[str, Any] | None:
        """What the run found; None where it is not finished, made with another configuration, or cannot be read."""
        folder = self.folder
        if not (folder.summary.exists() and self._is_of(folder)):
            return None
        try:
            summary: dict[str, Any] = json.loads(folder.summary.read_text(encoding="utf-8"))
            return summary if summary["workers"] == self.workers else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def can_go_on(self) -> bool:
        """Whether there is a checkpoint of this very run."""
        try:
            latest = find_latest(self.folder.checkpoints)
        except CheckpointError:
            return False
        return latest is not None and latest.workers == self.workers and self._is_of(self.folder)

    def _is_of(self, folder: RunFolder) -> bool:
        """Whether the folder holds a run of this configuration, wherever it was made."""
        try:
            made_with = parse(yaml.safe_load(folder.config.read_text(encoding="utf-8")), str(folder.config))
        except (OSError, yaml.YAMLError, ConfigError):  # another version's, or half a file
            return False
        return made_with.model_dump(exclude={"run_dir"}) == self.config.model_dump(exclude={"run_dir"})


def plan(comparison: ComparisonConfig, workers: int) -> list[Run]:
    """Every run: all variants with the first seed, then with the second, ...

    Raises ConfigError when one of them cannot run; nothing has been started then.
    """
    resolved = {name: _resolve(comparison, name, workers) for name in comparison.variants}
    return [
        Run(name, config.model_copy(update={"seed": seed, "run_dir": _run_dir(comparison, name, seed)}), workers)
        for seed in comparison.seeds
        for name, config in resolved.items()
    ]


def _resolve(comparison: ComparisonConfig, name: str, workers: int) -> RunConfig:
    try:
        return resolve(comparison.variant(name), workers)
    except ConfigError as error:
        raise ConfigError(f"variants.{name}: {error}") from error


def _run_dir(comparison: ComparisonConfig, name: str, seed: int) -> str:
    return str(Path(str(comparison.run_dir)) / name / f"seed-{seed}")


def compare(
    comparison: ComparisonConfig, job: Job, console: Console, only: Sequence[str] = (), seeds: int | None = None
) -> int:
    """Train what is not finished yet, and report on all that is.

    Args:
        job: where the workers run, and how many; its command is not used.
        only: variants to train; none: all. The baseline takes part always.
        seeds: train with the first so many seeds; None: with all.

    Returns 0; 1 when a run failed; 128 + the signal's number when a signal ended it.

    Raises ConfigError before anything is started.
    """
    chosen = _chosen(comparison, only, seeds)
    runs = plan(comparison, job.workers)
    to_do = [run for run in runs if (run.variant, run.config.seed) in chosen and run.summary() is None]
    done = len(chosen) - len(to_do)
    if done:
        console.print(f"{done} of {len(chosen)} runs are finished already", highlight=False)
    code = _train_all(to_do, job, console)
    ended = [Ended(run.variant, run.config, run.summary()) for run in runs]
    report(comparison, [run for run in ended if run.summary or (run.variant, run.seed) in chosen], console)
    return code


def _chosen(comparison: ComparisonConfig, only: Sequence[str], seeds: int | None) -> set[tuple[str, int]]:
    for name in only:
        if name not in comparison.variants:
            hint = did_you_mean(name, comparison.variants)
            raise ConfigError(f"--only {name}: no such variant{hint}; there are: {', '.join(comparison.variants)}")
    if seeds is not None and seeds > len(comparison.seeds):
        raise ConfigError(f"--seeds {seeds}: the file has {comparison.seeds}; name more, for example seeds=[0,1,2,3]")
    names = {*only, comparison.baseline} if only else set(comparison.variants)
    return {(name, seed) for name in names for seed in comparison.seeds[:seeds]}


def _train_all(runs: Sequence[Run], job: Job, console: Console) -> int:
    """Train one after the other. A run that fails is reported, and the next one starts; a signal ends it all."""
    code = 0
    columns = (BarColumn(bar_width=None), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    said = TextColumn("{task.description}")
    with Progress(*columns, said, console=console, expand=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=len(runs))
        for number, run in enumerate(runs, 1):
            shown.update(task, description=f"{run.variant}, seed {run.config.seed}")
            start = time.perf_counter()
            ended = _train(run, job)
            if ended in launcher.INTERRUPTED:
                log.error("interrupted; the same command goes on from here")
                return ended
            outcome = _outcome(run, ended)
            code = code or int(outcome.failed)
            who = f"{number}/{len(runs)}  {run.variant}  seed {run.config.seed}"
            console.print(
                f"{who}  {outcome.text}  {time.perf_counter() - start:.0f} s", highlight=False, soft_wrap=True
            )
            shown.advance(task)
    return code


def _train(run: Run, job: Job) -> int:
    settings, again = run.beside(".yaml"), ["--resume"] if run.can_go_on() else []
    settings.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(settings, run.config.to_yaml().encode())
    command = [sys.executable, "-m", "hvdcomp", "train", str(settings), *again]
    with run.beside(".log").open("wb") as output:
        return launcher.run(replace(job, command=command), "lines", output)


@dataclass(frozen=True)
class _Outcome:
    failed: bool
    text: str


def _outcome(run: Run, code: int) -> _Outcome:
    summary = run.summary()
    if code == 0 and summary is not None:
        return _Outcome(False, score_text(summary))
    path = run.beside(".log")
    return _Outcome(True, f"FAILED with exit code {code}: {last_words(path)} (all of it: {path})")


def last_words(path: Path) -> str:
    """The last line of a job's output that hvdcomp wrote, else the last at all: a launcher adds its own below."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    told = [line.partition("hvdcomp: ")[2] for line in lines if "hvdcomp: " in line]
    spoken = told or [line for line in lines if line.strip("-")]
    return spoken[-1] if spoken else "it printed nothing"
