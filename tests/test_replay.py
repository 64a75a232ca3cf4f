"""What a schedule would have decided on a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hvdcomp.cli import app
from hvdcomp.config import ConfigError
from hvdcomp.schedules import Accordion, Auto, GraVAC, ScaDLES, Schedule, Static, Warmup
from hvdcomp.schedules.base import Statistics
from hvdcomp.training.replay import Replayed, differences, make_schedule, read_trace, replay


def decided(schedule: Schedule, steps: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """A trace as a run under this schedule would record it."""
    generator = torch.Generator().manual_seed(seed)
    schedule.prepare(100)  # so many that a gain is its newest value
    rows = []
    for step in range(1, steps + 1):
        levels = schedule.levels
        shares = sorted(torch.rand(2, generator=generator, dtype=torch.float64).tolist(), reverse=True)
        kept = (shares[0], shares[0] if levels[0] == levels[1] else shares[1])
        statistics = Statistics(1.0, kept, 1.0, kept, finite=True)
        decision = schedule.decide(statistics)
        seconds = 0.1 + 0.01 * step
        schedule.observe(seconds, 0.01)
        rows.append(
            {"step": step, "cf": decision.cf, "skipped": False, "levels": list(levels), "iteration_s": seconds,
             "compress_s": 0.01, "statistics": list(statistics.to_vector()), "lr": 0.1}
        )  # fmt: skip
    return rows


def gravac(**given: Any) -> GraVAC:
    return GraVAC(**{"cf_min": 2, "cf_max": 64, "window": 2, "epsilon": 0.5, **given})


def test_the_same_schedule_decides_the_same() -> None:
    rows = decided(gravac(), 40)
    assert len({row["cf"] for row in rows}) > 2
    steps, why = replay(rows, gravac(), 100)
    assert why == ""
    assert [step.would for step in steps] == [step.was for step in steps]
    assert len(steps) == 40
    assert differences(steps) == []


def test_another_threshold_decides_otherwise() -> None:
    rows = decided(gravac(cf_max=2), 30)
    steps, why = replay(rows, gravac(cf_max=2, epsilon=1.0), 100)
    assert why == ""
    assert {step.would for step in steps} == {"dense"}
    assert {step.was for step in steps} == {"dense", "CF 2"}
    lenient, _ = replay(rows, gravac(cf_max=2, epsilon=0.0), 100)
    assert {step.would for step in lenient} == {"CF 2"}


def test_a_factor_that_was_never_evaluated_ends_the_replay() -> None:
    steps, why = replay(decided(gravac(cf_max=2), 10), gravac(), 100)
    assert len(steps) == 2  # the first window knows cf_min alone
    assert "at step 3 it wants the gain at CF 4, which the trace does not hold (but 2)" in why


def test_a_trace_of_a_static_run_has_no_gains() -> None:
    rows = [{"step": 1, "cf": 10.0, "skipped": False}]
    assert "no statistics" in replay(rows, ScaDLES(), 100)[1]
    assert "no phases" in replay(rows, Accordion({}, {"cf": 2}, 1), 100)[1]
    assert "no trace of other steps can tell" in replay(rows, Auto(), 100)[1]
    assert replay(rows, Static(cf=10), 100)[0] == [Replayed(1, "CF 10", "CF 10")]
    assert differences(replay(rows * 2, Warmup(1, cfs=[4]), 100)[0]) == [
        {"steps": "1", "was": "CF 10", "would be": "CF 4"}
    ]


def phases(norms: list[float]) -> list[dict[str, Any]]:
    now, rows = False, []
    for step, norm in enumerate(norms, 1):
        settled = step > 1 and abs(norms[step - 2] - norm) < 0.5 * norms[step - 2]
        switched = {"w": {"rank": 1} if settled else {"rank": 2}} if settled != now else {}
        now = settled
        phase = {"steps": 1, "units": {"w": [4, 4]}, "sums": [[0.0, norm**2]], "overlaps": []}
        rows.append(
            {"step": step, "cf": 2.0, "skipped": False, "lr": 0.1, "phase": phase, "switched": switched, "loss": 1.0}
        )
    return rows


def test_accordions_trace_is_replayed_with_its_own_and_another_eta() -> None:
    rows = phases([1.0, 0.9, 0.3, 0.29, 0.28])
    own = {"low": {"rank": 2}, "high": {"rank": 1}, "steps_per_epoch": 1, "interval": 1}
    steps, why = replay(rows, Accordion(**own), 100)
    assert why == ""
    assert [step.was for step in steps] == [step.would for step in steps]
    assert steps[1].was == "rank=1: w"
    assert steps[2].was == "rank=2: w"
    strict, _ = replay(rows, Accordion(**own, eta=0.01), 100)
    assert {step.would for step in strict} == {"no change"}
    longer, why = replay(rows, Accordion(**{**own, "steps_per_epoch": 7}), 100)
    assert (len(longer), why) == (5, "")
    rows[2].pop("phase")
    assert "no phase of the trace ends there" in replay(rows, Accordion(**own), 100)[1]


def test_a_skipped_step_is_left_out() -> None:
    rows = decided(gravac(), 10)
    rows.insert(4, {"step": 99, "cf": 1.0, "skipped": True})
    assert [step.step for step in replay(rows, gravac(), 100)[0]] == list(range(1, 11))


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("gravac", ["epsilon=0.9"], {"name": "gravac", "epsilon": 0.9}),
        ("{name: accordion, low: {rank: 2}, high: {rank: 1}}", ["steps_per_epoch=5"], {"low": {"rank": 2}}),
        ("warmup", ["cfs=[2, 4]", "steps_each=3"], {"cfs": [2, 4]}),
    ],
)
def test_a_schedule_is_named_or_written_down(text: str, overrides: list[str], expected: dict[str, Any]) -> None:
    assert expected.items() <= make_schedule(text, overrides).describe().items()


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("gravec", [], "did you mean 'gravac'"),
        ("gravac", ["epsilon"], "'epsilon' is no parameter: write name=value"),
        ("gravac", ["epsilon=7"], "epsilon must be between 0 and 1, got 7"),
        ("[1]", [], "must be a name"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(text, overrides)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in decided(gravac(cf_max=2), 10)))
    (tmp_path / "summary.json").write_text('{"workers": 100}')
    command = ["schedule", "replay", str(file), "--schedule", "{name: gravac, cf_min: 2, cf_max: 2, window: 2}"]
    done = CliRunner().invoke(app, [*command, "epsilon=0.5"])
    assert (done.exit_code, done.output.strip()) == (0, "10 steps replayed, all as they were")
    done = CliRunner().invoke(app, [*command, "epsilon=0.0"])
    assert "10 steps replayed, otherwise in the above" in done.output
    assert "would be" in done.output
    with pytest.raises(ConfigError, match="holds no steps"):
        read_trace(_written(tmp_path / "other.jsonl", "[1]\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
