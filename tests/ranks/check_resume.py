"""A resumed run equals an unbroken one bitwise: two ranks."""

from __future__ import annotations

import copy
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvdcomp
from hvdcomp.schedules import GraVAC
from ranks.launch import FOLDER
from ranks.tools import (
    LOSSY,
    assert_equal,
    everyones,
    give,
    gradients,
    me,
    net,
    parameters,
    raised,
    residuals,
    train,
    wrap,
)


def _gravac(**given: Any) -> GraVAC:
    return GraVAC(
        **{"cf_min": 2, "cf_max": 16, "epsilon": 0.3, "window": 2, "clock": itertools.count().__next__, **given}
    )


class _Run:
    """A model and its optimizer, as a script makes them."""

    def __init__(self, make: Callable[[], Any], scheduled: bool, **arguments: Any) -> None:
        self.model = net()
        base = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        schedule = _gravac() if scheduled else None
        self.optimizer = hvdcomp.DistributedOptimizer(
            base, self.model.named_parameters(), make(), schedule=schedule, **arguments
        )
        self.log: list[Any] = []

    def train(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            train(self.model, self.optimizer, 1, first=step)
            record = self.optimizer.last_step
            self.log.append((record.step, record.cf, record.level, record.levels, record.gains))

    def save(self) -> bytes:
        out = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.optimizer.compressor_state_dict()], out)
        return out.getvalue()

    def load(self, saved: bytes) -> None:
        model, optimizer, compressor = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.load_compressor_state_dict(compressor)

    def assert_equals(self, other: _Run) -> None:
        assert_equal(self.model.parameters(), other.model.parameters())
        assert_equal(residuals(self.optimizer).values(), residuals(other.optimizer).values())
        mine, others = ([state["momentum_buffer"] for state in run.optimizer.state.values()] for run in (self, other))
        assert_equal(mine, others)
        left, right = (run.optimizer.compressor_state_dict() for run in (self, other))
        assert left["states"].keys() == right["states"].keys()
        for unit, state in left["states"].items():
            assert_equal(state.values(), right["states"][unit].values())
        for key in ("step", "levels", "schedule", "worker", "workers"):
            assert left[key] == right[key], (key, left[key], right[key])


def _resumed(
    make: Callable[[], Any], scheduled: bool = False, before: int = 5, after: int = 6, **arguments: Any
) -> None:
    unbroken, saving, resumed = (_Run(make, scheduled, **arguments) for _ in range(3))
    unbroken.train(before + after)
    saving.train(before)
    saved = saving.save()
    saving.train(after, first=before)
    resumed.load(saved)
    resumed.train(after, first=before)
    assert resumed.log == unbroken.log[before:], (resumed.log, unbroken.log[before:])
    assert saving.log == unbroken.log
    resumed.assert_equals(unbroken)
    saving.assert_equals(unbroken)


def check_static_topk() -> None:
    _resumed(LOSSY["topk"])
    _resumed(LOSSY["topk"], granularity="model")


def check_static_randomk() -> None:
    """Its positions go on from the step, not from the beginning."""
    _resumed(LOSSY["randomk"])


def check_static_powersgd() -> None:
    _resumed(lambda: hvdcomp.PowerSGD(rank=1))


def check_casts_and_none() -> None:
    for method in ("none", "fp16", "bf16"):
        _resumed(LOSSY[method], before=2, after=2)


def check_gravac_with_a_replayed_clock() -> None:
    """In windows and at their ends, with buckets that the backward pass starts in its own order."""
    for before in (3, 4, 5):
        _resumed(hvdcomp.TopK, scheduled=True, before=before, bucket_mb=1e-5)


def check_statistics_do_not_depend_on_who_starts_a_bucket() -> None:
    """Hooks start buckets in the backward pass's order, the first step after loading in their own."""
    shapes = {f"{n}.weight": (5, 7) for n in range(24)}
    unbroken: list[Any] = []
    states: list[Any] = []
    for first in range(6):
        params = parameters(shapes)
        # Norms have more bits than squares of float32 have, and a window of 1 takes each gain as it is.
        schedule = _gravac(gain="raw", cf_min=1.1, cf_max=30, policy="geometric", ratio=1.5, window=1)
        optimizer = wrap(params, "topk", schedule=schedule, bucket_mb=1e-5)
        if first:
            optimizer.load_compressor_state_dict(states[first - 1])
        for step in range(first, first + 1 if first else 6):
            optimizer.zero_grad()
            give(params, gradients(step, me(), shapes))
            optimizer.step()
            if not first:
                unbroken.append(optimizer.last_step.gains)
                states.append(optimizer.compressor_state_dict())
        assert optimizer.last_step.gains == unbroken[first or -1], first


def check_gravac_over_randomk() -> None:
    _resumed(hvdcomp.RandomK, scheduled=True)


def check_the_search_does_not_start_again() -> None:
    run = _Run(hvdcomp.TopK, scheduled=True)
    run.train(7)
    resumed = _Run(hvdcomp.TopK, scheduled=True)
    resumed.load(run.save())
    resumed.train(1, first=7)
    assert resumed.log[0][0] == 7
    assert resumed.optimizer.last_step.levels == run.log[-1][3] or resumed.log[0][3] != (2.0, 2.0)
    assert run.log[-1][3] != (2.0, 2.0)


def check_each_rank_must_load_its_own() -> None:
    run = _Run(LOSSY["topk"], scheduled=False)
    run.train(3)
    states = everyones(run.optimizer.compressor_state_dict())
    left, right = (list(state["residuals"].values()) for state in states)
    assert any(not torch.equal(a, b) for a, b in zip(left, right, strict=True))
    fresh = _Run(LOSSY["topk"], scheduled=False).optimizer
    if me() == 1:
        message = raised(ValueError, lambda: fresh.load_compressor_state_dict(states[0]))
        assert "each must load its own" in message
        assert fresh.compressor_state_dict()["step"] == 0
    else:
        fresh.load_compressor_state_dict(states[0])
    fresh.load_compressor_state_dict(states)
    fresh.load_compressor_state_dict(states[::-1])
    assert_equal(fresh.compressor_state_dict()["residuals"].values(), states[me()]["residuals"].values())


def check_states_by_file() -> None:
    run = _Run(LOSSY["powersgd"], scheduled=False)
    run.train(2)
    folder = Path(os.environ.get(FOLDER, "/tmp"))
    torch.save(run.optimizer.compressor_state_dict(), folder / f"state-{me()}.pt")
    everyones(None)
    states = [torch.load(folder / f"state-{worker}.pt", weights_only=True) for worker in range(2)]
    again = _Run(LOSSY["powersgd"], scheduled=False)
    again.model.load_state_dict(run.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    again.optimizer.load_compressor_state_dict(states)
    run.train(2, first=2)
    again.train(2, first=2)
    again.assert_equals(run)


def check_loading_into_a_running_optimizer() -> None:
    """Going back to an earlier state of the same run."""
    for scheduled in (False, True):
        run = _Run(LOSSY["topk"], scheduled)
        run.train(4)
        saved = run.save()
        run.train(3, first=4)
        first = run.log[4:], [p.detach().clone() for p in run.model.parameters()]
        run.load(saved)
        run.log.clear()
        run.train(3, first=4)
        if not scheduled:
            assert run.log == first[0]
            assert_equal(run.model.parameters(), first[1])
        assert run.log[0][0] == 4


def check_state_before_the_first_step() -> None:
    for scheduled in (False, True):
        run, other = _Run(LOSSY["topk"], scheduled), _Run(LOSSY["topk"], scheduled)
        state = run.optimizer.compressor_state_dict()
        assert (state["step"], state["workers"], state["worker"]) == (0, 2, me())
        other.load(run.save())
        run.train(3)
        other.train(3)
        other.assert_equals(run)


def check_a_loaded_state_is_saved_again_before_the_first_step() -> None:
    run = _Run(LOSSY["topk"], scheduled=True)
    run.train(3)
    other = _Run(LOSSY["topk"], scheduled=True)
    other.load(run.save())
    third = _Run(LOSSY["topk"], scheduled=True)
    third.load(other.save())
    run.train(2, first=3)
    third.train(2, first=3)
    third.assert_equals(run)


def check_a_saved_state_does_not_change() -> None:
    run = _Run(LOSSY["topk"], scheduled=False)
    run.train(2)
    state = run.optimizer.compressor_state_dict()
    before = copy.deepcopy(state["residuals"])
    run.train(2, first=2)
    assert_equal(state["residuals"].values(), before.values())


def check_states_that_do_not_fit() -> None:
    params = parameters()
    optimizer = wrap(params, LOSSY["topk"]())
    give(params, gradients(0, me()))
    optimizer.step()
    good = optimizer.compressor_state_dict()
    load = optimizer.load_compressor_state_dict
    renamed = {("other" if name == "conv.weight" else name): r for name, r in good["residuals"].items()}
    for state, word in (
        ({**good, "residuals": {**good["residuals"], "conv.weight": torch.zeros(2, 2)}}, "shape"),
        ({**good, "residuals": renamed}, "'other'"),
        ({**good, "version": 99}, "version"),
        ({"step": 3}, "keys"),
        ([good, good], "one of each worker"),
        ([good, {**good, "worker": 1 - me(), "step": 7}], "one step"),
        ([], "one of each worker"),
    ):
        assert word in raised(ValueError, lambda state=state: load(state)), word
        assert_equal(residuals(optimizer).values(), good["residuals"].values())
    assert "on_world_change" in raised(ValueError, lambda: load(good, on_world_change="sum"))
    adaptive = wrap(parameters(), "topk", schedule=_gravac())
    assert "static" in raised(ValueError, lambda: adaptive.load_compressor_state_dict(good))


def check_no_state_is_given_out_in_the_middle_of_an_exchange() -> None:
    """Between backward() and step() a residual already holds the gradient."""
    params = parameters()
    optimizer = wrap(params, LOSSY["topk"]())
    for step in range(2):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        if step == 1:
            assert "step()" in raised(RuntimeError, optimizer.compressor_state_dict)
        optimizer.step()
    optimizer.compressor_state_dict()
