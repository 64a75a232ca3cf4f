"""`hvdcomp watch`: a frame of a run, following one that goes on, and how it ends."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_report import row, write_run
from training_runs import command, environment
from typer.testing import CliRunner

from hvdcomp.cli import app
from hvdcomp.config import ConfigError
from hvdcomp.report.trace import load_trace
from hvdcomp.report.watch import Pace, frame, is_running, sparkline, watch
from hvdcomp.training.run_folder import RunFolder


def text(run: Path, step_s: float | None = None) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(frame(load_trace(run), step_s))
    return console.export_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [row(step, **({"accuracy": step / 50, "test_loss": 1.0} if step % 10 == 0 else {})) for step in range(1, 41)]
    return write_run(tmp_path / "run", rows)


def test_a_frame(run: Path) -> None:
    shown = text(run)
    assert re.search(r"40/50 +100 steps/s +0\.1 s left", shown)
    assert re.search(r"loss +0\.05 +█[▁▂▃▄▅▆▇█]+▁\n", shown)
    assert re.search(r"accuracy +80\.00% +▁", shown)
    assert re.search(r"CF +10 ", shown)
    assert re.search(r"gain +0\.80 ", shown)
    assert re.search(r"bytes +4\.4 kB of 40\.2 kB dense +89% saved", shown)
    assert "compute 2 ms" in shown
    assert "decide 2 ms" in shown
    assert "10 steps/s" in text(run, step_s=0.1)


def test_a_frame_of_little(tmp_path: Path) -> None:
    little = write_run(tmp_path / "little", [{"step": 1, "loss": None}])
    (little / "job.json").write_text("[]")
    shown = text(little)
    assert "step 1" in shown
    assert "job.json cannot be read" in shown


def test_once_for_pipes(run: Path, tmp_path: Path) -> None:
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 41')
    done = CliRunner().invoke(app, ["watch", str(run), "--once"])
    assert done.exit_code == 0, done.output
    assert "40/50" in done.output
    assert "\x1b" not in done.output
    missing = CliRunner().invoke(app, ["watch", str(tmp_path / "nowhere"), "--once"])
    assert missing.exit_code == 2
    assert "no such folder" in missing.stderr


def test_sparklines() -> None:
    assert sparkline(np.arange(8.0)) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([1.0, math.nan, 1.0])) == "▁▁"
    assert sparkline(np.array([math.nan])) == ""
    assert len(sparkline(np.random.default_rng(0).normal(size=10_000))) == 40


def test_pace_is_that_of_the_wall() -> None:
    times = iter([0.0, 10.0, 20.0, 30.0])
    pace = Pace(lambda: next(times))
    assert [pace.step_s(steps) for steps in (100, 105, 3, 8)] == [None, 2.0, None, 2.0]


def test_a_run_that_nobody_works_on_ends_the_view(run: Path) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    assert not is_running(run)
    watch(run, console)
    assert "nobody works on this run, and it is not finished" in console.export_text()


def test_it_follows_a_run_that_goes_on(run: Path) -> None:
    """A real job's lock, and a real terminal; ends with the job."""
    job = RunFolder(run)
    job._acquire()
    assert is_running(run)
    terminal, end = pty.openpty()
    watching = subprocess.Popen(
        command("watch", str(run)), stdout=end, stderr=end, env=environment(COLUMNS="120", TERM="xterm")
    )
    os.close(end)
    try:
        seen = read_until(terminal, "40/50")
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write("".join(json.dumps(row(step)) + "\n" for step in range(41, 46)) + '{"step":')
        seen = read_until(terminal, "45/50")
        assert watching.poll() is None
        job.close()
        seen = read_until(terminal, "not finished")
        assert watching.wait(timeout=30) == 0, seen
    finally:
        watching.kill()
        os.close(terminal)


def test_ctrl_c_is_clean(run: Path) -> None:
    job = RunFolder(run)
    job._acquire()
    terminal, end = pty.openpty()
    watching = subprocess.Popen(command("watch", str(run)), stdout=end, stderr=end, env=environment(TERM="xterm"))
    os.close(end)
    try:
        read_until(terminal, "40/50")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 130
        assert "Traceback" not in read_rest(terminal)
    finally:
        watching.kill()
        job.close()
        os.close(terminal)


def test_what_is_no_run_ends_it(run: Path) -> None:
    with pytest.raises(ConfigError, match="is no run: there is no such folder"):
        watch(run / "metrics.jsonl", Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match=f"holds 1: give one of them, such as {run}"):
        watch(run.parent, Console(file=io.StringIO()))


def test_a_summary_of_an_older_version_is_told(run: Path) -> None:
    (run / "summary.json").write_text('{"workers": 2, "run_dir": "runs/old"}')
    shown = io.StringIO()
    watch(run, Console(file=shown, width=200))
    assert "of another version of hvdcomp, has no 'bytes_sent'" in shown.getvalue()


def read_until(terminal: int, wanted: str, limit_s: float = 60.0) -> str:
    seen, end = "", time.monotonic() + limit_s
    while wanted not in seen:
        assert time.monotonic() < end, seen
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            pytest.fail(f"{wanted!r} was never shown: {seen}")
    return seen


def read_rest(terminal: int) -> str:
    seen = ""
    try:
        while part := os.read(terminal, 65536):
            seen += part.decode(errors="replace")
    except OSError:
        pass
    return seen
