"""The README's code runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from hvdcomp.cli import app
from hvdcomp.config import load, load_comparison

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sent, dense = re.search(r"(\d+) bytes sent, (\d+) dense", done.stdout).groups()
    assert 0 < int(sent) < int(dense)


def test_the_diff_is_one_changed_line() -> None:
    (diff,) = blocks("diff")
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(removed) == 1
    assert added[0] == "import hvdcomp"
    assert len(added) == 2
    script = (
        "import torch, horovod.torch as hvd, hvdcomp\nhvd.init()\nmodel = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"{added[1]}\nmodel(torch.ones(1, 3)).sum().backward()\noptimizer.step()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#]+)\)|`((?:launch|configs|hvdcomp|docs)/[\w./-]+)`", README))
def test_files_that_it_names_exist(path: tuple[str, str]) -> None:
    assert (ROOT / "".join(path)).exists()


def test_commands_of_the_command_line_exist() -> None:
    known = subprocess.run(
        [sys.executable, "-m", "hvdcomp", "--help"], capture_output=True, text=True, timeout=120
    ).stdout
    named = set(re.findall(r"^hvdcomp (\w+)", "\n".join(blocks("bash")), flags=re.MULTILINE))
    assert named
    for command in named:
        assert command in known


def documented_commands() -> list[str]:
    """Calls of `hvdcomp` in the bash blocks of the README and docs/, without those that a shell must fill in."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            found += re.findall(r"^hvdcomp .*", block.replace("\\\n", " "), flags=re.MULTILINE)
    return sorted({line for line in found if "$" not in line})


@pytest.mark.parametrize("line", documented_commands())
def test_a_documented_command_has_these_options_and_its_configuration_these_fields(line: str) -> None:
    name, arguments, command = "", shlex.split(line, comments=True)[1:], get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    given = command.make_context(name, arguments).params
    if name in ("train", "probe", "plan", "compare") and given["config"] is not None:
        (load_comparison if name == "compare" else load)(ROOT / given["config"], given["overrides"] or [])


def test_python_blocks_run_under_stock_horovod_too(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")).replace("optimizer.last_step.bytes_", "hvd.size() or "))
    subprocess.run([sys.executable, script], check=True, timeout=120, env=os.environ | {"HVDCOMP_DISABLE": "1"})


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"^[A-Z]+-[A-Z]+$|TODO|TBD", README, flags=re.MULTILINE)
