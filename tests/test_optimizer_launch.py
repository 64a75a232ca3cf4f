"""How jobs start and end: without a launcher, with a wrong one, and when one rank fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import checks_of, job
from ranks.launch import TESTS, run

pytestmark = pytest.mark.ranks


def test_horovod_is_not_initialised() -> None:
    job("start", 1, "none", ("check_horovod_is_not_initialised",)).verify("check_horovod_is_not_initialised")


def test_gloo_controller_under_mpirun_is_an_error() -> None:
    """Without HOROVOD_CPU_OPERATIONS Horovod's own start ends the job; with it, nobody would say anything."""
    checks = ("check_gloo_under_mpirun",)
    job("start", 2, "mpirun", checks, HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo").verify(checks[0])


def test_shutdown_and_init_again() -> None:
    """Over Gloo: MPI cannot be started again after Horovod has ended it."""
    checks = ("check_after_shutdown_and_init",)
    job("start", 2, "horovodrun", checks).verify(checks[0])


@pytest.mark.parametrize("check", checks_of("ending"))
def test_a_fault_of_one_rank_ends_the_job(check: str) -> None:
    """With an exit code, within the stall limit, on every rank; nothing hangs."""
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
    ended = job("ending", 2, "mpirun", (check,), 60.0, again=False, **stall)
    assert ended.code is not None, f"still running after {ended.seconds:.0f} s\n{ended.output[-3000:]}"
    assert ended.code != 0 or any(rank[check]["status"] == "failed" for rank in ended.results)
    assert all(rank[check]["status"] in ("started", "failed") for rank in ended.results), ended.results


def test_importing_does_not_start_mpi_or_horovod() -> None:
    """Commands that need no workers must not need MPI either."""
    code = (
        "import sys, hvdcomp, hvdcomp.simulation, hvdcomp.coordinator; "
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'horovod')], sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TESTS.parent)


def test_a_hanging_job_is_killed_with_its_ranks() -> None:
    """The tests' own safety net."""
    script = "import os, time; pid = os.fork(); pid or os.setsid(); print(pid or os.getpid()); time.sleep(60)"
    code, output, seconds = run([sys.executable, "-u", "-c", script], {}, 1.0)
    assert code is None
    assert seconds < 10
    (child,) = {int(line) for line in output.split()}
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
