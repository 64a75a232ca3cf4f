"""The command: what it prints, what it refuses, and how it starts workers."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_runs import CONFIG, ROOT, command, environment, hvdcomp
from typer.testing import CliRunner

from hvdcomp import compressors
from hvdcomp.cli import _print_table, app
from hvdcomp.config import load
from hvdcomp.training import launcher
from hvdcomp.training.launcher import Job, find_program
from hvdcomp.training.parts import resolve
from hvdcomp.training.worker import LaunchError, is_launched, launched_rank, launched_size


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


# -- what it prints


def test_show_prints_the_resolved_file(config: Path, tmp_path: Path) -> None:
    done = run("train", "--show", str(config), "-np", "2", "optimizer.lr=1e-3")
    assert done.exit_code == 0
    again = tmp_path / "again.yaml"
    again.write_text(done.stdout)
    assert load(again) == resolve(load(config, ["optimizer.lr=1e-3"]))
    assert yaml.safe_load(done.stdout)["optimizer"]["lr"] == 0.001
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["compressors", "schedules", "models", "datasets", "fields"])
def test_lists(kind: str) -> None:
    listed = json.loads(run("list", kind, "--json").stdout)
    table = run("list", kind).stdout
    assert listed
    for row in listed:
        assert row.get("name", row.get("field")) in table
        assert all(value != "" for value in row.values())


def test_lists_tell_what_is_there() -> None:
    listed = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    assert set(listed) == set(compressors.available())
    assert listed["topk"]["collective"] == "allgather"
    assert listed["topk"]["parameters"]["cf"] == 100
    models = json.loads(run("list", "models", "--json").stdout)
    assert {(row["name"], row["dataset"], row["parameters"]) for row in models} >= {("cnn", "digits", 151_306)}
    assert "gravac" in {row["name"] for row in json.loads(run("list", "schedules", "--json").stdout)}


# -- what it refuses


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "{config}", "-np", "2", "optimizer.momentom=1"], "did you mean 'momentum'"),
        (["train", "{config}", "-np", "2", "schedule=gravac", "compression=qsgd"], "qsgd has none"),
        (["train", "{config}x", "-np", "2"], "there is no file"),
        (["train", "--show", "{config}", "seed=-1"], "seed must be greater than or equal to 0"),
        (["train", "{config}", "-np", "100"], "59 training samples are too few for 100 workers"),
        (["list", "compresors"], "did you mean 'compressors'"),
        (["train", "{config}", "-np", "0"], "Invalid value for '-np'"),
        (["train", "{config}", "-np", "2", "--launcher", "srun"], "srun"),
    ],
)
def test_one_error_before_any_process_starts(
    config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(launcher, "run", lambda *arguments: pytest.fail("a process was started"))
    done = run(*(argument.format(config=config) for argument in arguments))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_missing_launcher_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"mpirun is neither beside .* nor on PATH: run launch/setup\.sh"):
        find_program("mpirun")
    program(tmp_path / "mpirun", "")
    assert find_program("mpirun") == str(tmp_path / "mpirun")


# -- how it starts workers

OPEN_MPI = 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.8"; exit; fi\n'


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for mpirun and horovodrun."""
    path = program(tmp_path / "fake", OPEN_MPI)
    monkeypatch.setattr(launcher, "find_program", lambda name: str(path))
    return path


def test_mpirun_gets_what_shared_cores_need(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Job(["python"], 4, hosts="a:2,b:2").command_line({"OMP_NUM_THREADS": "1", "HOME": "/"})
    assert line[0] == str(fake)
    assert line[-5:] == ["-H", "a:2,b:2", "-x", "OMP_NUM_THREADS", "python"]
    assert "-np 4 --oversubscribe --bind-to none" in " ".join(line)
    assert ("--allow-run-as-root" in line) == (os.geteuid() == 0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in Job(["python"], 4).command_line({})


def test_other_launchers(fake: Path) -> None:
    horovodrun = Job(["python"], 2, "horovodrun", hostfile="hosts").command_line({})
    assert horovodrun[1:] == ["--gloo", "-np", "2", "--hostfile", "hosts", "python"]
    program(fake, "echo HYDRA build details")  # MPICH and Intel MPI know none of Open MPI's options
    assert Job(["python"], 2, hosts="a").command_line({})[1:] == ["-np", "2", "-hosts", "a", "python"]


@pytest.mark.parametrize(("told", "kept"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_workers_get_the_command_and_the_environment(
    config: Path, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], kept: str
) -> None:
    seen = tmp_path / "seen"
    program(
        fake, OPEN_MPI + f'echo "$OMP_NUM_THREADS $OMPI_MCA_mpi_yield_when_idle $HVDCOMP_PROGRESS $@" > {seen}; exit 7'
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    done = run("train", str(config), "-np", "2", "seed=3", "--resume", "compression=none")
    assert done.exit_code == 7
    text = seen.read_text()
    assert text.startswith(f"{kept} 1 lines ")
    assert text.endswith(f"-m hvdcomp train {config} --resume --on-world-change error seed=3 compression=none\n")


LAUNCHED = [
    ({}, False, 0, 1),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, True, 1, 2),
    ({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}, True, 3, 4),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True, 0, 1),
    ({"PMIX_RANK": "2", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, True, 2, 4),
    ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, True, 2, 4),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False, 0, 1),  # an sbatch script, which may start mpirun
]


@pytest.mark.parametrize(("variables", "launched", "rank", "size"), LAUNCHED)
def test_workers_know_that_they_were_launched(variables: dict[str, str], launched: bool, rank: int, size: int) -> None:
    assert is_launched(variables) == launched
    if launched:
        assert (launched_rank(variables), launched_size(variables)) == (rank, size)


def test_one_launcher_is_enough(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    done = run("train", str(config), "-np", "2")
    assert done.exit_code == 2
    assert "-np 2 was given, but a launcher has already started 3: leave out -np" in done.stderr


@pytest.mark.ranks
def test_a_gloo_controller_under_mpirun_is_refused(config: Path, tmp_path: Path) -> None:
    done = hvdcomp("train", str(config), "-np", "2", f"run_dir={tmp_path / 'run'}", HOROVOD_CONTROLLER="gloo")
    assert done.code == 1
    assert "HOROVOD_CONTROLLER=gloo is for horovodrun --gloo: unset it under mpirun" in done.err
    assert done.err.count("HOROVOD_CONTROLLER=gloo is") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
def test_a_bare_mpirun_is_enough(config: Path, tmp_path: Path) -> None:
    job = Job(command("train", str(config), f"run_dir={tmp_path / 'run'}", "steps=3"), 2)
    done = subprocess.run(
        job.command_line(environment()), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["workers"] == 2
    assert done.stdout.count("replicas equal") == 1


# -- signals, with a stand-in for mpirun

STAND_IN = """
import sys
from hvdcomp.training import launcher
launcher.find_program = lambda name: sys.argv[1]
launcher.GRACE_S = 1.0
sys.exit(launcher.run(launcher.Job(["x"], 2), "lines"))
"""


@pytest.mark.parametrize(
    ("on_term", "number", "code"),
    [
        ("touch obeyed; exit 3", signal.SIGTERM, 128 + signal.SIGTERM),
        ("touch obeyed; exit 3", signal.SIGINT, 128 + signal.SIGINT),
        ("touch obeyed; exit 3", signal.SIGHUP, 128 + signal.SIGHUP),
        (":", signal.SIGTERM, 128 + signal.SIGTERM),  # it does not obey, and is killed
        ("touch obeyed; exit 3", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signals_reach_the_launcher_and_nothing_is_left(tmp_path: Path, on_term: str, number: int, code: int) -> None:
    ready = tmp_path / "ready"
    stand_in = program(
        tmp_path / "stand-in", OPEN_MPI + f"trap '{on_term}' TERM; touch {ready}; while true; do sleep 0.1; done"
    )
    variables = environment(PYTHONPATH=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", STAND_IN, str(stand_in)], env=variables, cwd=tmp_path)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=120) == code
    for _ in range(50):
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        if str(stand_in) not in processes:
            break
        time.sleep(0.1)
    assert str(stand_in) not in processes
    assert (tmp_path / "obeyed").exists() == ("obeyed" in on_term)


def test_the_launchers_exit_code_is_ours(fake: Path) -> None:
    program(fake, OPEN_MPI + "kill -9 $$")
    assert launcher.run(Job(["x"], 2), "lines") == 128 + 9


def test_a_table_that_is_too_wide_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _print_table([{letter * 9: "0123456789" * 3 for letter in "abcdefghijkl"}])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert shown.count("9") == 3 * 12
