"""setup.py, environment.yml and the scripts in launch/ agree with each other."""

import importlib.metadata
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run"]


@pytest.fixture
def setup_arguments(monkeypatch):
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


@pytest.fixture
def conda_file():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def specifiers(requirements):
    parsed = [Requirement(line) for line in requirements]
    return {requirement.name.lower(): requirement.specifier for requirement in parsed}


def conda_specifier(conda_file, name):
    lines = [line for line in conda_file["dependencies"] if isinstance(line, str)]
    return next(line[len(name) :] for line in lines if re.split(r"[<>=]", line)[0] == name)


def pip_requirements(conda_file):
    return next(entry["pip"] for entry in conda_file["dependencies"] if isinstance(entry, dict))


def pinned(name):
    script = (ROOT / "launch" / "setup.sh").read_text()
    return re.search(rf"^readonly {name}=(\S+)$", script, re.MULTILINE)[1]


def test_conda_installs_what_setup_py_requires(setup_arguments, conda_file):
    required = setup_arguments["install_requires"] + setup_arguments["extras_require"]["dev"]
    assert specifiers(pip_requirements(conda_file)) == specifiers(required)


def test_conda_takes_a_python_that_setup_py_accepts(setup_arguments, conda_file):
    oldest = setup_arguments["python_requires"]
    assert conda_specifier(conda_file, "python").startswith(oldest)


def test_conda_brings_what_the_build_of_horovod_asks_of_the_machine(conda_file):
    for name in ("cxx-compiler", "openmpi"):
        conda_specifier(conda_file, name)


def test_horovod_is_left_to_the_setup_script(setup_arguments, conda_file):
    assert "horovod" not in specifiers(setup_arguments["install_requires"] + setup_arguments["extras_require"]["dev"])
    assert "horovod" not in specifiers(pip_requirements(conda_file))
    assert pinned("HOROVOD_VERSION") == "0.28.1"


def test_horovods_own_requirements_are_met(setup_arguments):
    required = specifiers(setup_arguments["install_requires"])
    horovods = [Requirement(line) for line in importlib.metadata.requires("horovod")]
    assert {r.name.lower() for r in horovods if r.marker is None or r.marker.evaluate({"extra": ""})} <= set(required)


def test_setup_script_pins_a_torch_that_setup_py_accepts(setup_arguments):
    assert pinned("TORCH_VERSION") in specifiers(setup_arguments["install_requires"])["torch"]


def test_torch_was_not_replaced():
    assert importlib.metadata.version("torch").split("+")[0] == pinned("TORCH_VERSION")


def test_versions_are_bounded_below_only(setup_arguments):
    for name, specifier in specifiers(setup_arguments["install_requires"]).items():
        assert [bound.operator for bound in specifier] == [">="], name


def test_command_can_be_loaded(setup_arguments):
    (line,) = setup_arguments["entry_points"]["console_scripts"]
    name, target = (part.strip() for part in line.split("="))
    entry_point = importlib.metadata.EntryPoint(name=name, value=target, group="console_scripts")
    assert callable(entry_point.load())


def test_every_package_is_installed(setup_arguments):
    folders = {path.parent for path in (ROOT / "hvdcomp").rglob("*.py")}
    assert {".".join(folder.relative_to(ROOT).parts) for folder in folders} == set(setup_arguments["packages"])


def test_types_are_declared(setup_arguments):
    for package, files in setup_arguments["package_data"].items():
        for name in files:
            assert (ROOT / package.replace(".", "/") / name).is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_stops_at_errors(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.search(r"^set -euo pipefail$", script.read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_passes_shellcheck(script):
    result = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def run_setup(**environment):
    """launch/setup.sh in an environment in which it stops before it touches anything."""
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "setup.sh")],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
    )


def test_setup_names_a_missing_python():
    result = run_setup(PYTHON="no-such-python")
    assert result.returncode == 1
    assert result.stderr.startswith("setup: no-such-python is missing. Debian: apt install python3-venv python3-dev;")


def test_setup_names_an_old_python(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\nif [ "$1" = -V ]; then echo Python 3.8.1; fi\n[ "$1" = -V ]\n')
    old.chmod(0o755)
    result = run_setup(PYTHON=str(old))
    assert result.returncode == 1
    assert "Python 3.8.1, but 3.10 or newer is needed" in result.stderr


@pytest.mark.parametrize("script", ["mpirun-cpu.sh", "horovodrun-gpu.sh"])
def test_launchers_print_their_usage(script):
    result = subprocess.run(["bash", str(ROOT / "launch" / script)], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"launch/{script}" in result.stderr


@pytest.fixture
def stub_project(tmp_path):
    """A project whose launchers print their arguments."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("mpirun", "horovodrun"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text('#!/bin/sh\necho "$@"\n')
        program.chmod(0o755)
    return tmp_path


def launched(project, script, *arguments):
    command = ["bash", str(project / "launch" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_mpirun_starts_the_trainer_with_its_arguments(stub_project):
    words = launched(stub_project, "mpirun-cpu.sh", "4", "job.yaml", "epochs=1")
    python = str(stub_project / ".venv" / "bin" / "python")
    assert words[:2] == ["-np", "4"]
    assert words[words.index(python) :] == [python, "-m", "hvdcomp", "train", "job.yaml", "epochs=1"]


def test_horovodrun_starts_a_process_for_each_slot_of_the_host_file(stub_project):
    hostfile = stub_project / "hosts"
    hostfile.write_text("# the cluster\n\nnode1 slots=8\n  node2   slots=4\n# node3 slots=8\n")
    words = launched(stub_project, "horovodrun-gpu.sh", str(hostfile), "job.yaml", "epochs=1")
    python = str(stub_project / ".venv" / "bin" / "python")
    assert words == [
        *("-np", "12", "-H", "node1:8,node2:4", "--gloo"),
        *(python, "-m", "hvdcomp", "train", "job.yaml", "epochs=1"),
    ]


def test_kubernetes_job_starts_as_many_processes_as_it_has_workers():
    job = yaml.safe_load((ROOT / "launch" / "kubernetes-mpijob.yaml").read_text())
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    processes = int(launcher["command"][launcher["command"].index("-np") + 1])
    assert processes == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert (ROOT / launcher["command"][-1]).is_file()
