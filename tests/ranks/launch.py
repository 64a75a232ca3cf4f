"""Starts a topic's ranks, waits with a hard time limit, and leaves no process behind."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
LIMIT_S = 150.0
FOLDER = "HVDCOMP_TEST_FOLDER"
"""Environment variable: where ranks write their results, and whatever they hand on."""
_MARK = "HVDCOMP_TEST_JOB"

_ENVIRONMENT = {
    # Longer than what compiling a kernel takes on one rank while the others wait.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "90",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    "HOROVOD_LOG_LEVEL": "error",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}
_CLEARED = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "HVDCOMP_")


@dataclass(frozen=True)
class Job:
    """What became of a launch."""

    command: str
    code: int | None
    """Exit code of the launcher, None if it ran out of time."""
    seconds: float
    output: str
    results: list[dict[str, dict[str, Any]]]
    """For each rank, by check: ``status`` ("ok", "failed" or "started"), ``traceback``, ``value``."""

    @property
    def died(self) -> bool:
        """It ended early, but not by a check that failed."""
        return self.code != 0 and all(r["status"] != "failed" for checks in self.results for r in checks.values())

    def verify(self, check: str) -> list[Any]:
        """What a check returned on each rank; fails the test where it did not end well on every rank."""
        faults = []
        for rank, checks in enumerate(self.results):
            result = checks.get(check, {"status": "not reached", "traceback": ""})
            if result["status"] != "ok":
                faults.append(f"rank {rank}: {result['status']}\n{result['traceback']}")
        if faults:
            shown = self.output[-4000:] if any("not reached" in f or "started" in f for f in faults) else ""
            pytest.fail(
                f"{self.command}: exit code {self.code} after {self.seconds:.0f} s\n" + "\n".join(faults) + shown,
                pytrace=False,
            )
        return [checks[check]["value"] for checks in self.results]


def checks_of(topic: str) -> list[str]:
    """The names of a topic's checks, in their order; nothing is imported."""
    tree = ast.parse((TESTS / "ranks" / f"check_{topic}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@functools.cache
def job(
    topic: str,
    ranks: int = 2,
    launcher: str = "mpirun",
    checks: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
    again: bool = True,
    **environment: str,
) -> Job:
    """Run a topic once a session with these ranks.

    Args:
        launcher: "mpirun", "horovodrun" (Gloo), or "none" (one process alone).
        checks: those to run, in this order; all by default.
        again: start a second time if ranks died although no check had failed, which a warning tells.
        environment: further variables; ``{folder}`` in them stands for the job's folder.
    """
    command = [*_launcher(launcher, ranks), sys.executable, "-m", "ranks.worker", topic, *checks]

    def once() -> Job:
        with tempfile.TemporaryDirectory(prefix=f"hvdcomp-{topic}-", ignore_cleanup_errors=True) as folder:
            variables = {name: value.replace("{folder}", folder) for name, value in environment.items()}
            code, output, seconds = run(command, variables | {FOLDER: folder}, limit_s)
            results = [read(Path(folder) / f"{rank}.jsonl") for rank in range(ranks)]
        return Job(f"{topic}, {launcher} -np {ranks}", code, seconds, output, results)

    ended = once()
    if again and ended.died:
        warnings.warn(f"{ended.command} died and is run again:\n{ended.output[-8000:]}", stacklevel=2)
        ended = once()
    return ended


def run(command: list[str], variables: dict[str, str], limit_s: float) -> tuple[int | None, str, float]:
    """(exit code or None, output, seconds) of a command, of which every process is dead afterwards."""
    mark = uuid.uuid4().hex
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command,
            env=environment_of(variables) | {_MARK: mark},
            cwd=TESTS,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()  # the launcher then ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(3)
        finally:
            _kill_all(mark)
            child.wait()
        output.seek(0)
        return code, output.read(), time.monotonic() - began


def environment_of(variables: dict[str, str]) -> dict[str, str]:
    """What a launch runs with: these variables beside the tests' own, and none that another launch has left."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_CLEARED)}
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return inherited | _ENVIRONMENT | variables | {"PYTHONPATH": path}


def _launcher(launcher: str, ranks: int) -> list[str]:
    program = str(Path(sys.executable).parent / launcher)
    if launcher == "mpirun":
        return [program, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    if launcher == "horovodrun":
        return [program, "--gloo", "-np", str(ranks)]
    return []


def _kill_all(mark: str) -> None:
    """Kill the processes that carry the mark of one launch: launchers put ranks into sessions of their own."""
    deadline = time.monotonic() + 5
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    needle = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # gone, or not ours
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def read(path: Path) -> dict[str, dict[str, Any]]:
    """A rank's results by check."""
    if not path.exists():
        return {}
    return {record["check"]: record for record in map(json.loads, path.read_text().splitlines())}
