"""Sweeps, solved crossovers, the compression that is needed, and their files."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hvdcomp.cli import app
from hvdcomp.config import ConfigError
from hvdcomp.costmodel import whatif
from hvdcomp.costmodel.model import Method
from hvdcomp.costmodel.question import Options, Question, ask
from hvdcomp.costmodel.whatif import SWEEPS, crossover, needed_ratio, step_s, with_bandwidth

POWERSGD = Method.of("powersgd", {"rank": 4})
PAPERS = Options(model="resnet50", bandwidth="10gbit", latency=8e-6, workers=64)
COMMAND = ["--model", "resnet50", "--bandwidth", "10gbit", "--latency", "8e-6", "-np", "64"]


@pytest.fixture(scope="module")
def question() -> Question:
    return ask(PAPERS)


def test_the_papers_crossover_is_solved_for(question):
    bits_per_s = crossover(question, POWERSGD, "paper")
    assert bits_per_s / 1e9 == pytest.approx(9.63, abs=0.005)
    there = with_bandwidth(question, bits_per_s)
    assert step_s(there, POWERSGD, "paper") == pytest.approx(step_s(there, Method.of("dense"), "paper"), rel=1e-9)


def test_ours_is_near_and_a_cheaper_method_pays_longer(question):
    ours = crossover(question, POWERSGD)
    assert ours / 1e9 == pytest.approx(9.63, rel=0.05)
    faster = SWEEPS["encoding"].apply(question, 2)
    assert crossover(faster, POWERSGD) > ours


def test_a_method_that_never_pays_has_no_crossover(question):
    hopeless = SWEEPS["encoding"].apply(question, 1e-9)
    assert crossover(hopeless, POWERSGD) is None
    assert whatif.crossovers(hopeless, [POWERSGD], "ours") == ["powersgd (rank=4) does not pay at every bandwidth"]


@pytest.mark.parametrize(("tolerance", "ratio"), [(0.05, 6.97), (0.1, 3.19), (0.2, 1.53)])
def test_the_compression_that_linear_scaling_needs_is_small(question, tolerance, ratio):
    assert math.ceil(100 * needed_ratio(question, tolerance)) / 100 == ratio


def test_nothing_is_needed_on_a_fast_network_and_nothing_helps_against_latency(question):
    assert needed_ratio(with_bandwidth(question, 1e12)) == 1
    late = replace(question.cluster.network, latency=0.1)
    assert needed_ratio(replace(question, cluster=replace(question.cluster, network=late))) == math.inf


@pytest.mark.parametrize(
    ("sweep", "column", "rises"),
    [
        ("bandwidth", "dense ms", False),
        ("workers", "dense ms", True),
        ("batch", "dense ms", True),
        ("compute", "powersgd (rank=4) speedup", True),
        ("encoding", "powersgd (rank=4) speedup", True),
    ],
)
def test_sweeps_go_the_way_they_must(question, sweep, column, rises):
    figures = [row[column] for row in whatif.sweep(question, sweep, [POWERSGD])]
    assert sorted(figures, reverse=not rises) == pytest.approx(figures, rel=1e-3)
    assert figures[0] != figures[-1]


def test_small_batches_gain_more(question):
    rows = whatif.sweep(question, "batch", [POWERSGD], values=(0.125, 0.25, 0.5, 1))
    speedups = [row["powersgd (rank=4) speedup"] for row in rows]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 2 > 1 > speedups[-1] > 0


def test_workers_go_to_4096(question):
    assert [row["workers"] for row in whatif.sweep(question, "workers", [POWERSGD])][-1] == 4096


def test_nodes_help_an_allgather(question):
    inside = ask(replace(PAPERS, inside="300gbit", bandwidth="1gbit"))
    flat, nodes = (Method.of("signsgd", {}, hierarchical) for hierarchical in (False, True))
    rows = whatif.sweep(inside, "nodes", [flat, nodes])
    assert rows[0][f"{flat} ms"] == rows[0][f"{nodes} ms"]
    assert rows[-1][f"{nodes} ms"] < 0.5 * rows[-1][f"{flat} ms"]


def test_faster_encoding_pays_though_more_bytes_travel(question):
    rows = whatif.tradeoffs(question, POWERSGD, "paper")
    assert rows[0]["step ms, 1 k times the bytes"] == pytest.approx(rows[0]["now ms"])
    for more in (1, 2, 3):
        column = f"step ms, {more} k times the bytes"
        assert rows[3][column] < rows[0][column]


def test_few_set_ups_of_a_data_centre_gain():
    rows = whatif.grid(lambda name, compute_s: ask(replace(PAPERS, model=name, compute=compute_s)), "paper")
    assert len(rows) > 200
    gaining = [row for row in rows if row["speedup"] > 1]
    assert 1 <= len(gaining) < 0.1 * len(rows)
    assert gaining == rows[: len(gaining)]


# -- the command


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["whatif", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_a_sweep_is_shown_and_written(tmp_path):
    files = [tmp_path / f"sweep.{suffix}" for suffix in ("csv", "png", "svg")]
    output = run("bandwidth", *COMMAND, "--values", "1,10", *(w for file in files for w in ("-o", str(file))))
    assert "powersgd (rank=4) pays below" in output
    with files[0].open() as lines:
        assert [float(row["Gbit/s"]) for row in csv.DictReader(lines)] == [1, 10]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "What if: bandwidth" in files[2].read_text()


@pytest.mark.parametrize("sweep", ["ratio", "tradeoff"])
def test_the_other_questions_can_be_drawn(sweep, tmp_path):
    file = tmp_path / "figure.svg"
    run(sweep, *COMMAND, "-o", str(file))
    assert f"What if: {sweep}" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["weather", *COMMAND], "unknown sweep 'weather'"),
        (["bandwidth", *COMMAND, "--values", "fast"], "--values must be numbers"),
        (["bandwidth", *COMMAND, "--methods", "topc:cf=10"], "method 'topc'"),
        (["bandwidth", *COMMAND, "--methods", "topk:cf=10"], "what topk costs on this device is not known"),
        (["bandwidth", *COMMAND, "-o", "figure.pdf"], "must end in .csv, .png or .svg"),
        (["nodes", *COMMAND, "--values", "7"], "64 workers cannot be 7 on every node"),
        (["compute", *COMMAND, "--values", "1,0"], "--values of compute must be numbers above 0, got 0"),
        (["batch", *COMMAND, "--values", "nan"], "--values of batch must be numbers above 0, got nan"),
        (["workers", *COMMAND, "--values", "2,inf"], "--values of workers must be whole numbers above 0, got inf"),
        (["workers", *COMMAND, "--values", "2.5"], "--values of workers must be whole numbers above 0, got 2.5"),
        (["ratio", *COMMAND, "--values", "2"], "--values is for bandwidth, workers,"),
        (["nodes", *COMMAND, "--methods", "powersgd:hierarchical=3"], "hierarchical must be True or False, got 3"),
    ],
)
def test_what_is_not_allowed_is_said_in_a_line(arguments, said):
    assert said in " ".join(run(*arguments, code=2).split())


def test_nodes_without_a_hierarchical_method_say_what_is_missing():
    assert "nodes matter to hierarchical exchanges" in run("nodes", *COMMAND)
    assert "workers of a node" in run("nodes", *COMMAND, "-np", "6")  # of the usual values those that fit
    assert "nodes matter" not in run("nodes", *COMMAND, "--methods", "powersgd:rank=4:hierarchical=true")


def test_values_and_methods_are_read():
    assert whatif.parse_values("1,2.5") == [1, 2.5]
    assert whatif.parse_methods("signsgd:hierarchical=true") == [Method.of("signsgd", {}, True)]
    with pytest.raises(ConfigError, match="parameter"):
        whatif.parse_methods("topk:rank=3")
