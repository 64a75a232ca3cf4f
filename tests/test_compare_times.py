"""How soon runs arrive on modelled networks: priced from their metrics, each counted where it would have gone so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.config import ComparisonConfig, parse
from hvdcomp.training import comparison_times as times
from hvdcomp.training.comparison_report import Ended
from hvdcomp.training.modelled import step_times

COMPARISON = ComparisonConfig(
    variants={"dense": {}, "topk": {"compression": "topk"}, "late": {}, "gravac": {}},
    seeds=[0, 1],
    networks=[100.0, 1000.0],
    tolerance=0.01,
)
DENSE = {"messages": 2, "elements": {}, "bytes_sent": 4_000_000, "bytes_dense": 4_000_000, "bytes_received": 4_000_000}
SPARSE = DENSE | {"messages": 1, "elements": {"topk": 1_000_000}, "bytes_sent": 50_000, "bytes_received": 50_000}


def ended(folder: Path, variant: str, seed: int, kind: dict[str, Any], scores: list[float], **config: Any) -> Ended:
    """A finished run that evaluated at every second step."""
    run_dir = folder / variant / f"seed-{seed}"
    run_dir.mkdir(parents=True)
    lines = []
    for step in range(1, 2 * len(scores) + 1):
        row = {"step": step, "cf": 1.0 if kind is DENSE else 20.0, **kind}
        lines.append(json.dumps(row | ({"accuracy": scores[step // 2 - 1]} if step % 2 == 0 else {})))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"run_dir": str(run_dir), "seed": seed, "network": {"bandwidth_mbit": 100.0, "compute_ms": 5.0}}
    return Ended(variant, parse(settings | config), {"workers": 2, "accuracy": scores[-1]})


@pytest.fixture
def runs(tmp_path: Path) -> list[Ended]:
    gravac = {"compression": "topk", "schedule": "gravac"}
    return [
        ended(tmp_path, "dense", 0, DENSE, [0.5, 0.98, 0.97, 0.98]),
        ended(tmp_path, "dense", 1, DENSE, [0.5, 0.6, 0.97, 1.0]),
        ended(tmp_path, "topk", 0, SPARSE, [0.4, 0.5, 0.9703, 0.98], compression="topk"),
        ended(tmp_path, "topk", 1, SPARSE, [0.4, 0.5, 0.6, 0.99], compression="topk"),
        ended(tmp_path, "late", 0, SPARSE, [0.4, 0.5, 0.6, 0.9701], compression="topk"),
        ended(tmp_path, "gravac", 0, SPARSE, [0.98, 0.98], **gravac),
    ]


def test_a_run_arrives_at_the_first_evaluation_that_is_near_enough(runs: list[Ended]) -> None:
    tables = times.arrivals(COMPARISON, times.courses(COMPARISON, runs))
    rows = {row.variant: row for row in tables[100.0]}
    network = runs[0].config.network
    dense_s, sparse_s = (step_times(kind, network, 2, 25.0).total_s for kind in (DENSE, SPARSE))
    assert (rows["dense"].arrived, rows["dense"].seeds) == (2, 2)
    assert rows["dense"].seconds == pytest.approx((4 + 8) / 2 * dense_s)  # .9702 and .99 are near enough
    assert rows["topk"].seconds == pytest.approx((6 + 8) / 2 * sparse_s)
    assert rows["topk"].nbytes == 7 * 50_000
    assert rows["topk"].ratio == pytest.approx(7 * sparse_s / (6 * dense_s))
    assert (rows["late"].arrived, rows["late"].seconds) == (0, None)
    assert [row.variant for row in tables[100.0]] == ["gravac", "topk", "dense", "late"]


def test_what_decides_by_time_counts_on_its_own_network_only(runs: list[Ended]) -> None:
    found = times.courses(COMPARISON, runs)
    assert set(found[100.0]) == {"dense", "topk", "late", "gravac"}
    assert set(found[1000.0]) == {"dense", "topk", "late"}
    faster = found[100.0]["dense"][0].seconds / found[1000.0]["dense"][0].seconds
    assert np.all(faster > 5)
    switching = Ended("dense", runs[0].config.model_copy(update={"never_slower": True}), runs[0].summary)
    assert times.counts_on(switching, 100.0)
    assert not times.counts_on(switching, 1000.0)


def test_a_lower_perplexity_is_better() -> None:
    course = times.Course(*(np.arange(3.0),) * 3, np.array([90.0, 80.0, 70.0]), "perplexity")
    assert (course.arrival(85.0), course.arrival(60.0)) == (1, None)
    accuracy = times.Course(*(np.arange(3.0),) * 3, np.array([0.7, 0.8, 0.9]), "accuracy")
    assert (accuracy.arrival(0.85), accuracy.arrival(0.95)) == (2, None)


def test_tables_and_figures(runs: list[Ended], tmp_path: Path) -> None:
    found = times.courses(COMPARISON, runs)
    text = times.markdown(times.arrivals(COMPARISON, found), COMPARISON)
    assert "At 100 Mbit/s:" in text
    assert "At 1 Gbit/s:" in text
    assert "| late | never |  |  | 0 of 1 |" in text
    names = [plot.name for plot in times.figures(COMPARISON, runs, found)]
    assert names == [f"accuracy-{cost}-{mbit}mbit" for mbit in (100, 1000) for cost in ("time", "bytes")] + [
        "cf",
        "distribution",
    ]


def test_a_line_of_an_older_version(runs: list[Ended]) -> None:
    path = Path(str(runs[0].config.run_dir)) / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "bytes_sent": 1}) + "\n")
    with pytest.raises(ValueError, match="step 1 does not say its messages"):
        times.courses(COMPARISON, runs)
