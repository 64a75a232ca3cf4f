"""`hvdcomp bench exchange`: hosts in namespaces, shapes of known networks, rows, refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvdcomp.bench import exchange, network
from hvdcomp.bench.exchange_worker import interval
from hvdcomp.bench.shapes import MODELS
from hvdcomp.cli import app
from hvdcomp.config import ConfigError

WHY_NOT = network.missing()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces: {WHY_NOT}")


def namespaces() -> set[str]:
    return set(network._namespaces())


# -- shapes


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("resnet101", 314, 44_549_160),
        ("vgg16", 32, 138_357_544),
        ("lstm-ptb", 11, 66_034_000),
        ("bert-base", 199, 109_482_240),
    ],
)
def test_known_networks_have_their_published_size(model: str, tensors: int, parameters: int) -> None:
    shapes = MODELS[model]()
    assert (len(shapes), sum(shape.numel() for shape in shapes.values())) == (tensors, parameters)
    assert exchange.shapes_of(model) == {name: list(shape) for name, shape in shapes.items()}


def test_a_training_configuration_stands_for_its_model(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {name: cnn}\n")
    shapes = exchange.shapes_of(str(tmp_path / "run.yaml"))
    assert len(shapes) > 3
    assert all(isinstance(n, int) for shape in shapes.values() for n in shape)


# -- arguments


@pytest.mark.parametrize(
    ("text", "rate"), [("none", None), ("100mbit", 1e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), (" 64kbit", 64e3)]
)
def test_bandwidths(text: str, rate: float | None) -> None:
    assert exchange.bits_per_s(text) == rate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=resnet51"], "did you mean 'resnet50'"),
        (["--bandwidth=1gbps"], "bandwidth must be such as 100mbit"),
        (["--bandwidth=0mbit"], "bandwidth must be such as 100mbit"),
        (["--compression=topk:cf=0.5"], "cf must be >= 1"),
        (["--compression=topkk"], "did you mean"),
        (["--compression=topk:gravac=twice"], "valid: once, paper"),
        (["--compression=topk:cf"], "write NAME:KEY=VALUE"),
        (["--json=/nowhere/rows.json"], "cannot be written"),
        (["--compute=real"], "needs the file of a training configuration"),
        (["--compute=-1"], "must be seconds >= 0, or real"),
        (["--compute=soon"], "must be seconds >= 0, or real"),
        (["-np=3", "--per-host=2"], "must be a multiple of --per-host 2, got 3"),
    ],
)
def test_a_fault_is_told_before_anything_starts(arguments: list[str], message: str) -> None:
    before = namespaces() if WHY_NOT is None else set()
    result = CliRunner().invoke(app, ["bench", "exchange", *arguments])
    assert result.exit_code != 0
    assert message in str(result.output) + str(result.exception)
    assert WHY_NOT is not None or namespaces() == before


def test_the_interval_of_equal_things_holds_1_and_of_unequal_ones_does_not() -> None:
    a = [1.0, 1.1, 0.9, 1.05, 0.95] * 4
    low, high = interval(a, a[::-1])
    assert low <= 1 <= high
    low, high = interval(a, [2 * x for x in a])
    assert 1.7 < low <= 2 <= high < 2.3


# -- hosts


@needs_hosts
def test_hosts_are_made_shaped_and_removed() -> None:
    before = namespaces()
    with network.Hosts(3) as hosts:
        assert len(namespaces() - before) == 4  # and the switch
        hosts.shape(1e8)
        shown = subprocess.run(["tc", "-n", hosts._host(2), "qdisc"], capture_output=True, text=True, check=True).stdout
        assert "rate 100Mbit" in shown
        hosts.shape(None)
        shown = subprocess.run(["tc", "-n", hosts._host(2), "qdisc"], capture_output=True, text=True, check=True).stdout
        assert "tbf" not in shown
    assert namespaces() == before


@needs_hosts
def test_hosts_are_removed_after_a_fault_and_those_of_a_killed_process_by_the_next() -> None:
    before = namespaces()
    with pytest.raises(ZeroDivisionError), network.Hosts(2):
        raise ZeroDivisionError
    assert namespaces() == before
    script = "import os; from hvdcomp.bench.network import Hosts; Hosts(2).__enter__(); os._exit(1)"
    subprocess.run([sys.executable, "-c", script], check=False)
    assert len(namespaces() - before) == 3
    with network.Hosts(1):
        pass
    assert namespaces() == before


@needs_hosts
def test_what_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    monkeypatch.setattr(network.Hosts, "addresses", property(lambda self: ["10.99.0.999"]))
    with pytest.raises(network.NetworkError, match=r"10\.99\.0\.999"), network.Hosts(1):
        pass
    assert namespaces() == before


def test_without_hosts_limited_bandwidths_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange, "missing", lambda: "ip not found")
    monkeypatch.setattr(
        exchange,
        "_measure",
        lambda plan, workers, hosts, launcher: [{"bandwidth": plan["bandwidth"], "hosts": hosts}] * 4,
    )
    rows = exchange.run("resnet50", 2, "1gbit,none", "topk", compute_s=0.0, limit_s=1.0, json_file=None)
    assert rows == [{"bandwidth": "none", "hosts": None, "peak_mb": None}] * 4
    assert "ip not found" in caplog.text
    assert "left out: ['1gbit']" in caplog.text


# -- real exchanges

KEYS = {
    "method",
    "params",
    "bandwidth",
    "ranks",
    "nbytes",
    "encode_ms",
    "exchange_ms",
    "decode_ms",
    "step_ms",
    "speedup",
}


@pytest.mark.ranks
@pytest.mark.parametrize("hosts", [pytest.param(True, marks=needs_hosts), False])
def test_rows_of_a_real_exchange(hosts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hosts:
        monkeypatch.setattr(exchange, "missing", lambda: "a test says so")
    (tmp_path / "run.yaml").write_text("model: {name: cnn}\n")
    bandwidth = "200mbit" if hosts else "none"
    rows = exchange.run(
        str(tmp_path / "run.yaml"),
        2,
        bandwidth,
        "none,topk:cf=10,topk:cf=2:never_slower=true,auto,powersgd:rank=1,topk:gravac=once,topk:gravac=paper",
        compute_s=0.001,
        limit_s=1.0,
        memory=hosts,
        json_file=tmp_path / "rows.json",
    )
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
    assert [row["method"] for row in rows] == [
        *("horovod", "horovod", "horovod-fp16", "none", "topk", "topk", "auto", "powersgd", "topk", "topk")
    ]
    dense = 4 * sum(math.prod(shape) for shape in exchange.shapes_of(str(tmp_path / "run.yaml")).values())
    for row in rows:
        assert set(row) >= KEYS
        assert (row["ranks"], row["bandwidth"]) == (2, bandwidth)
        assert row["step_ms"] >= 1.0  # of which the backward pass takes one
        assert row["speedup"] == pytest.approx(rows[0]["step_ms"] / row["step_ms"])
        low, high = row["speedup_interval"]
        assert low <= row["speedup"] * 1.001
        assert row["speedup"] <= high * 1.001
    assert [rows[i]["nbytes"] for i in (0, 2, 3)] == [dense, dense // 2, dense]
    assert rows[4]["nbytes"] < dense / 4
    assert rows[4]["encode_ms"] > 0
    assert all((row["peak_mb"] is not None) == hosts for row in rows)
    assert len(exchange.table(rows)) == len(rows)


@needs_hosts
@pytest.mark.ranks
def test_several_workers_a_host_and_the_real_backward_pass(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{model: {name: mlp}, data: {name: digits, batch_size: 4}}\n")
    method = "topk:cf=10:hierarchical=true"
    model = str(tmp_path / "run.yaml")
    rows = exchange.run(model, 4, "none", method, per_host=2, compute_s=None, limit_s=1.0, json_file=None)
    assert [row["ranks"] for row in rows] == [4] * 4
    assert 0 < rows[-1]["nbytes"] < rows[0]["nbytes"] / 4  # rank 0 leads its host


@pytest.mark.ranks
def test_an_interrupt_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "missing", lambda: "a test says so")
    monkeypatch.setattr(exchange, "run_job", lambda job, progress: 130)
    result = CliRunner().invoke(app, ["bench", "exchange", "--bandwidth=none"])
    assert result.exit_code == 130


@pytest.mark.ranks
def test_a_failing_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "missing", lambda: "a test says so")
    monkeypatch.setattr(exchange, "_PLAIN", [("horovod", {}), ("no-such-method", {})])
    with pytest.raises(ConfigError, match="exit code"):
        exchange.run("resnet50", 2, "none", "topk", compute_s=0.0, limit_s=1.0, json_file=None)


# -- predictions beside rows


def test_a_prediction_stands_beside_what_it_can_predict() -> None:
    from test_probe import made

    from hvdcomp.bench import prediction

    shapes = {"layer.weight": [512, 512], "layer.bias": [512]}
    methods = [
        ("horovod", {}),
        ("topk", {"cf": 10}),
        ("horovod-fp16", {}),
        ("topk", {"cf": 10, "never_slower": True}),
        ("qsgd", {}),
    ]
    rows = [
        {"method": name, "params": params, "backward_ms": 5.0, "gamma": 1.0, "step_ms": 20.0}
        for name, params in methods
    ]
    beside = prediction.beside(rows, shapes, made(workers=2))
    dense_ms, topk_ms, *others = [row["predicted_ms"] for row in beside]
    assert dense_ms > topk_ms > 5
    assert others == [None, None, None]  # Horovod's own cast, an adaptive run, a method that was not measured
    median, worst = sorted(abs(ms / 20 - 1) for ms in (dense_ms, topk_ms))
    expected = f"2 predictions: median error {(median + worst) / 2:.1%}, worst {worst:.1%}"
    assert prediction.errors(beside) == expected
