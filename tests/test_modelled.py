"""A modelled network: what steps take on it, and that a run's clock, records and decisions follow it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_runs import CONFIG, rows, summary, train

from hvdcomp.compressors import available
from hvdcomp.config import NetworkConfig
from hvdcomp.exchange import StepRecord
from hvdcomp.schedules.auto import FACTORS
from hvdcomp.training.modelled import CODEC_NS, ModelledClock, step_times

NETWORK = NetworkConfig(bandwidth_mbit=100, latency_us=50, compute_ms=20)
TOPK = {"messages": 3, "elements": {"topk": 1_000_000}, "bytes_dense": 4_000_000, "bytes_received": 125_000}
DENSE = {"messages": 6, "elements": {}, "bytes_dense": 4_000_000, "bytes_received": 6_000_000}


def test_a_compressed_step_computes_compresses_and_waits() -> None:
    times = step_times(TOPK, NETWORK, workers=4, bucket_mb=25)
    assert times.compute_s == pytest.approx(0.020)
    assert times.compress_s == pytest.approx(1e-9 * CODEC_NS["topk"] * 1_000_000)
    assert times.wait_s == pytest.approx(3 * 50e-6 + 0.010)
    assert times.total_s == pytest.approx(times.compute_s + times.compress_s + times.wait_s)


def test_a_dense_step_hides_all_buckets_but_the_last_behind_the_backward_pass() -> None:
    ring = 6 * 50e-6 + 8 * 6_000_000 / 1e8
    assert step_times(DENSE, NETWORK, 4, bucket_mb=25).total_s == pytest.approx(1.04 * 0.020 + ring)
    half = 6 * 50e-6 + ring / 2 - 3 * 50e-6
    two = step_times(DENSE, NETWORK, 4, bucket_mb=2_000_000 / 2**20)
    assert two.total_s == pytest.approx(2 * half)  # the first is longer than the backward pass
    slow = NetworkConfig(bandwidth_mbit=100, latency_us=50, compute_ms=1000)
    assert step_times(DENSE, slow, 4, 2_000_000 / 2**20).total_s == pytest.approx(1.04 + half)


def test_a_line_that_does_not_say_its_messages() -> None:
    with pytest.raises(ValueError, match="step 7 does not say its messages"):
        step_times({"step": 7, "messages": None, "elements": None}, NETWORK, 4, 25)
    with pytest.raises(ValueError, match="bandwidth_mbit is null"):
        step_times(TOPK, NetworkConfig(), 4, 25)


def test_every_method_has_its_cost() -> None:
    assert set(CODEC_NS) == set(available()) - {"none"}


def test_the_clock_moves_once_a_step_and_the_record_says_the_same() -> None:
    clock, optimizer = ModelledClock(NETWORK, 4, 25), SimpleNamespace(last_step=None)
    clock.watch(optimizer)
    assert clock() == 0.0
    first = StepRecord(0, encode_s=7.0, wait_s=7.0, decide_s=7.0, **TOPK)
    optimizer.last_step = first
    expected = step_times(TOPK, NETWORK, 4, 25)
    assert clock() == clock() == pytest.approx(expected.total_s)
    assert (first.compress_s, first.wait_s, first.decide_s) == (expected.compress_s, expected.wait_s, 0.0)
    optimizer.last_step = StepRecord(1, **DENSE)
    assert clock() == pytest.approx(expected.total_s + step_times(DENSE, NETWORK, 4, 25).total_s)


GRAVAC = "schedule={name: gravac, cf_min: 4, cf_max: 50, epsilon: 0.3, window: 2}"


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", [GRAVAC, "schedule=auto"])
def test_a_run_on_a_modelled_network(tmp_path: Path, schedule: str) -> None:
    """Two runs of one configuration agree in every time, though the schedule decides by them."""
    config = tmp_path / "small.yaml"
    config.write_text(CONFIG)
    network = ["network.bandwidth_mbit=1", "network.compute_ms=2"]
    runs: list[list[dict[str, Any]]] = []
    for name in ("a", "b"):
        folder = tmp_path / name
        train(config, "-np", "2", f"run_dir={folder}", schedule, "steps=16", *network)
        runs.append(rows(folder))
        whole = sum(row["iteration_s"] for row in runs[-1])
        assert summary(folder)["iteration_s"] == pytest.approx(whole)
        assert summary(folder)["parameters_equal"]
    assert runs[0] == runs[1]
    for row in runs[0]:
        times = step_times(row, NetworkConfig(bandwidth_mbit=1, compute_ms=2), 2, 25)
        assert row["iteration_s"] == pytest.approx(times.total_s)
        assert (row["wait_s"], row["compress_s"]) == pytest.approx((times.wait_s, times.compress_s))
    assert len({row["cf"] for row in runs[0]}) > 1
    if schedule == "schedule=auto":
        assert {row["cf"] for row in runs[0]} <= {1.0, *FACTORS}
