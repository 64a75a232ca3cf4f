"""Starts the workers of a job: mpirun or horovodrun as a child, signals passed on, nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from hvdcomp.training.worker import LaunchError

log = logging.getLogger(__name__)

GRACE_S = 15.0
"""Seconds between asking a launcher to end its workers and killing it; horovodrun alone takes 5."""

INTERRUPTED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
"""Exit codes of jobs that a signal to this process has ended."""

_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that share cores must not spin
    "PYTHONUNBUFFERED": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",  # a rank that waits for another for ever ends the job
}
_PASSED_ON = (
    "HVDCOMP_",
    "HOROVOD_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "PYTHON",
    "PATH",
    "LD_LIBRARY_PATH",
    "OPAL_PREFIX",
)


class Interrupted(Exception):
    """A signal to this process has ended a job; its argument is the exit code."""


@dataclass(frozen=True)
class Job:
    """A command for every worker, and where they run."""

    command: Sequence[str]
    workers: int
    launcher: str = "mpirun"
    hosts: str | None = None
    """Host names with slots, "node1:4,node2:4"; None: this machine."""
    hostfile: str | None = None
    options: Sequence[str] = ()
    """More options for Open MPI's mpirun."""
    within: Sequence[str] = ()
    """A command that runs the launcher, such as ("ip", "netns", "exec", "namespace")."""

    def command_line(self, environment: Mapping[str, str]) -> list[str]:
        """What to execute. Raises LaunchError when the launcher is not installed."""
        program = find_program(self.launcher)
        if self.launcher == "horovodrun":
            return [
                *self.within,
                program,
                "--gloo",
                "-np",
                str(self.workers),
                *self._places("-H", "--hostfile"),
                *self.command,
            ]
        if "Open MPI" not in _version(program) and "OpenRTE" not in _version(program):
            return [*self.within, program, "-np", str(self.workers), *self._places("-hosts", "-f"), *self.command]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        placed = ["--oversubscribe", "--bind-to", "none", *self._places("-H", "--hostfile")]
        passed = [word for name in sorted(environment) if name.startswith(_PASSED_ON) for word in ("-x", name)]
        installed = str(Path(program).resolve())  # Open MPI looks for its daemon beside what was called
        started = [installed, *root, *self.options, "-np", str(self.workers), *placed, *passed]
        return [*self.within, *started, *self.command]

    def _places(self, hosts_option: str, hostfile_option: str) -> list[str]:
        hosts = [hosts_option, self.hosts] if self.hosts else []
        return hosts + ([hostfile_option, self.hostfile] if self.hostfile else [])


def run(job: Job, progress: str, output: IO[bytes] | None = None) -> int:
    """Run a job to its end.

    SIGINT, SIGTERM and SIGHUP are passed on once; a launcher that does not end within `GRACE_S` is killed, and with it
    its workers.

    Args:
        progress: how worker 0 shows its progress, "bar" or "lines" (horovodrun puts a prefix before each line).
        output: file that takes what the job writes; None: what this process writes to.

    Returns the launcher's exit code; 128 + the signal's number if one ended the job.
    """
    environment = _DEFAULTS | dict(os.environ)
    environment["HVDCOMP_PROGRESS"] = "lines" if job.launcher == "horovodrun" else progress
    environment.setdefault("COLUMNS", str(shutil.get_terminal_size((100, 24)).columns))
    command_line = job.command_line(environment)
    log.info("starting: %s", shlex.join(command_line))
    with _Signals() as signals:
        child = subprocess.Popen(
            command_line,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_become_launcher,
        )
        signals.pass_on_to(child)
        code = _wait(child, signals)
    return 128 + signals.received if signals.received else code if code >= 0 else 128 - code


def find_program(name: str) -> str:
    """The launcher beside this Python, else the one on PATH. Raises LaunchError when there is none."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise LaunchError(
            f"{name} is neither beside {sys.executable} nor on PATH: run launch/setup.sh, which installs it, or take "
            f"--launcher {'horovodrun' if name == 'mpirun' else 'mpirun'}"
        )
    return found


class _Signals:
    """Within it, signals that would end this process are passed on to a child."""

    def __init__(self) -> None:
        self.received = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def pass_on_to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if self.received:
            child.terminate()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.received = bool(self.received), number
        if self._child is not None and self._child.poll() is None:
            if again:  # the user insists
                _kill_group(self._child)
            else:
                self._child.terminate()  # mpirun and horovodrun then end their workers


def _wait(child: subprocess.Popen[bytes], signals: _Signals) -> int:
    """Wait for the child; after a signal only so long."""
    left_s = GRACE_S
    while True:
        try:
            return child.wait(timeout=0.25)
        except subprocess.TimeoutExpired:
            left_s -= 0.25 if signals.received else 0.0
        if left_s <= 0:
            log.error("the launcher did not end within %.0f s and is killed", GRACE_S)
            _kill_group(child)
            left_s = GRACE_S


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _become_launcher() -> None:
    """In the child: a process group of its own, since a terminal's Ctrl-C is ours to pass on.

    If this process is killed outright, the launcher is asked to end as well (Linux).
    """
    os.setpgid(0, 0)
    pr_set_pdeathsig = 1
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
