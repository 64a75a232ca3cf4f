"""The batch of a step as Accordion's batch-size mode chooses it: decisions, state, and a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_runs import rows, summary, train

from hvdcomp.config import ConfigError, parse
from hvdcomp.training.batch_size import BatchSizes
from hvdcomp.training.parts import resolve

CONFIG: dict[str, Any] = {
    "data": {"name": "digits", "batch_size": 4},
    "batch_schedule": {"name": "accordion", "low": 8, "high": 32, "interval": 2},
}


def told(sizes: BatchSizes, *gradients: tuple[list[float], int]) -> None:
    """Steps with these gradients of (this many) batches."""
    for values, passes in gradients:
        parameter = nn.Parameter(torch.zeros(len(values)))
        parameter.grad = torch.tensor(values)
        sizes.add([("p", parameter)], passes)


def test_the_batch_grows_when_the_gradients_sum_does_not_change_any_more() -> None:
    sizes = BatchSizes(parse(CONFIG), workers=2)
    assert (sizes.passes, sizes.factor) == (1, 1.0)
    told(sizes, ([3.0, 0.0], 1), ([0.0, 4.0], 1))  # a norm of 5, and nothing to compare it with
    sizes.end_epoch(0.1, 0.1)
    assert sizes.passes == 1
    told(sizes, ([100.0, 0.0], 1))  # not looked at
    sizes.end_epoch(0.1, 0.1)
    told(sizes, ([1.0, 0.0], 4))  # counts four times; 4 is near 5
    sizes.end_epoch(0.1, 0.1)
    assert (sizes.passes, sizes.factor) == (4, 4.0)


def test_a_critical_epoch_keeps_the_small_batch() -> None:
    sizes = BatchSizes(parse(CONFIG), workers=2)
    for norm in (5.0, 0.0, 2.4, 0.0):
        told(sizes, ([norm], 1))
        sizes.end_epoch(0.1, 0.1)
    assert sizes.passes == 1
    again = BatchSizes(parse(CONFIG), workers=2)
    told(sizes, ([1.0], 1))
    again.load_state_dict(json.loads(json.dumps(sizes.state_dict(), default=torch.Tensor.tolist)))
    again._sum = {name: torch.tensor(values) for name, values in again._sum.items()}
    for one in (sizes, again):
        told(one, ([1.0], 1))
        one.end_epoch(0.1, 0.1)
    assert (sizes.passes, again.passes) == (4, 4)  # 2 is near 2.4, half of it before the state was saved


def test_smiths_batch_grows_as_the_rate_would_fall() -> None:
    schedule = {"name": "smith", "low": 8, "high": 32}
    sizes, again = (BatchSizes(parse(CONFIG | {"batch_schedule": schedule}), workers=2) for _ in range(2))
    sizes.end_epoch(0.1, 0.2)
    told(sizes, ([1.0], 1))  # takes no memory
    assert (sizes.passes, sizes.factor, sizes.state_dict()["sum"]) == (1, 1.0, {})
    sizes.end_epoch(0.2, 0.1)
    assert (sizes.passes, sizes.factor) == (2, 2.0)
    again.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    for one in (sizes, again):
        one.end_epoch(0.1, 0.02)
        assert (one.passes, one.factor) == (4, 4.0)


def test_a_fixed_number_of_batches() -> None:
    sizes = BatchSizes(parse({"accumulate": 3}), workers=2)
    told(sizes, ([1.0], 3))
    sizes.end_epoch(0.1, 0.01)
    assert (sizes.passes, sizes.factor) == (3, 1.0)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"accumulate": 2}, "leave out accumulate (given 2)"),
        ({"schedule": {"name": "gravac"}, "compression": "topk"}, "and schedule (given gravac)"),
        ({"data": {"name": "digits", "batch_size": 3}}, "batch_schedule: per_pass must divide the batch of 8, got 6"),
        ({"batch_schedule": {"name": "accordion", "low": 8, "high": 9}}, "high must be a multiple of low"),
        ({"batch_schedule": {"name": "smith", "low": 8, "high": 7}}, "high must be"),
        ({"batch_schedule": {"name": "smith", "low": 9}}, "batch_schedule: per_pass must divide the batch of 9, got 8"),
    ],
)
def test_what_does_not_fit(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(parse(CONFIG | changed), workers=2)
    assert says in str(caught.value)


def a_run(folder: Path, more: str) -> Path:
    """A configuration of eight steps an epoch on two workers, with ``more`` lines."""
    config = folder / "run.yaml"
    config.write_text(
        "model: {name: mlp, hidden: 16}\ndata: {name: 'training_runs:blobs', samples: 64, batch_size: 4}\n"
        f"optimizer: {{lr: 0.01}}\n{more}"
    )
    return config


@pytest.mark.ranks
def test_a_run_whose_batch_grows_has_fewer_steps_and_resumes_bitwise(tmp_path: Path) -> None:
    config = a_run(
        tmp_path,
        "batch_schedule: {name: accordion, low: 8, high: 32, interval: 1, eta: 0.3}\nepochs: 4\nevaluate_every: 0\n",
    )
    whole, again = tmp_path / "whole", tmp_path / "again"
    done = train(config, "-np", "2", f"run_dir={whole}")
    lines = rows(whole)
    assert [line["batches"] for line in lines] == [1] * 16 + [4] * 4
    assert [line["epoch"] for line in lines] == [0] * 8 + [1] * 8 + [2] * 2 + [3] * 2
    assert [line["lr"] for line in lines] == pytest.approx([0.01] * 16 + [0.04] * 4)
    assert "step 20/20" in done.out
    assert summary(whole)["epochs"] == 4
    train(config, "-np", "2", f"run_dir={again}", "steps=13", "checkpoint_every=0")
    train(config, "-np", "2", f"run_dir={again}", "--resume")
    assert summary(again)["parameters_sha256"] == summary(whole)["parameters_sha256"]


@pytest.mark.ranks
def test_a_run_whose_rate_stays_as_its_batch_grows(tmp_path: Path) -> None:
    config = a_run(
        tmp_path,
        "batch_schedule: {name: smith, low: 8, high: 32}\n"
        "lr_schedule: {name: step, milestone_epochs: [2, 3], factor: 0.25}\nepochs: 4\nevaluate_every: 0\n",
    )
    train(config, "-np", "2", f"run_dir={tmp_path / 'run'}")
    lines = rows(tmp_path / "run")
    assert [line["batches"] for line in lines] == [1] * 16 + [4] * 4
    assert [line["lr"] for line in lines] == pytest.approx([0.01] * 18 + [0.0025] * 2)
