"""Settings that rank 0's schedule assigns: levels and methods change at the same step on all ranks. Two ranks."""

from __future__ import annotations

import io
from typing import Any

import horovod.torch as hvd
import torch
from scripted import Scripted

import hvdcomp
from hvdcomp.schedules import Accordion, Setting
from hvdcomp.simulation import World
from ranks.tools import (
    SHAPES,
    assert_alike,
    assert_close,
    assert_equal,
    everyones,
    give,
    gradients,
    me,
    parameters,
    raised,
    residuals,
    wrap,
)

METHODS: tuple[Setting, ...] = (
    {"cf": 5},
    {"name": "powersgd", "rank": 1},
    {"name": "none"},
    {"name": "oktopk", "cf": 4},
    {"name": "powersgd", "rank": 2},
    {"name": "randomk", "cf": 3},
    {"name": "fp16"},
    {"cf": 2},
)
PLAN = {0: [0, 1, 2], 1: [1, 2, 3], 2: 4, 3: [2, 5, 7], 4: [2, 0, 6], 6: 7, 7: 2}
STEPS = 12


def _scripted(**given: Any) -> Scripted:
    return Scripted(METHODS, PLAN, **given)


def _run(optimizer: Any, params: Any, steps: range) -> list[Any]:
    log = []
    for step in steps:
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.loss = float(step + 100 * me())
        optimizer.step()
        log.append(optimizer.last_step.switched)
    return log


def check_equals_the_simulation() -> None:
    """Means, residuals and what changes; a trace of two ranks shows one decision."""
    params, schedule = parameters(), _scripted(phase=3)
    optimizer = wrap(params, hvdcomp.TopK(cf=5), lr=1.0, schedule=schedule)
    simulated = _scripted(phase=3)
    world = World(2, hvdcomp.TopK(cf=5), schedule=simulated, exclude=("1d",))
    expected = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        (switched,) = _run(optimizer, params, range(step, step + 1))
        means = world.step([gradients(step, worker) for worker in range(2)])[me()]
        assert switched == world.switched, (step, switched, world.switched)
        assert everyones(switched) == [switched] * 2
        assert optimizer.last_step.bytes_sent == world.nbytes or me() == 1
        for name, mean in means.items():
            expected[name] -= mean
    assert_close(params.values(), expected.values(), atol=1e-5)
    assert_alike(params.values())
    for name, residual in residuals(optimizer).items():
        assert_close([residual], [world.residual(me(), name)], atol=1e-5)
    if me() == 0:
        assert [evidence.phase_steps for evidence in schedule.seen] == [0, 0, 3] * 4
        assert [evidence.loss for evidence in schedule.seen] == [float(step) for step in range(STEPS)]
        assert {evidence.lr for evidence in schedule.seen} == {1.0}
        for evidence, other in zip(schedule.seen, simulated.seen, strict=True):  # the last steps are plain, in place
            for sums, expected in zip(evidence.sums, other.sums, strict=True):
                assert abs(sums.total - expected.total) < 1e-4, evidence.step
                assert abs(sums.norm - expected.norm) < 1e-4, evidence.step
            for overlap, wanted in zip(evidence.overlaps, other.overlaps, strict=True):
                assert abs(overlap.residual_sum - wanted.residual_sum) < 1e-3, evidence.step
                assert abs(overlap.sum_squares - wanted.sum_squares) < 1e-3, evidence.step
        assert optimizer.schedule_nbytes > 0
    else:
        assert schedule.seen == []
        assert optimizer.schedule_nbytes == 0


def check_nothing_is_lost() -> None:
    """What was applied and what is left is what was given, whatever methods have followed each other."""
    for never_slower in (False, True):
        params = parameters()
        optimizer = wrap(params, "topk", lr=1.0, schedule=_scripted(), never_slower=never_slower)
        _run(optimizer, params, range(STEPS))
        given = {n: torch.zeros(shape) for n, shape in SHAPES.items()}
        for step in range(STEPS):
            for worker in range(2):
                for name, gradient in gradients(step, worker).items():
                    given[name] += gradient / 2
        states = everyones(residuals(optimizer))
        for name, total in given.items():
            left = sum((state[name] / 2 for state in states if name in state), start=torch.zeros(SHAPES[name]))
            assert_close([left - params[name].detach()], [total], rtol=1e-2, atol=1e-2)  # fp16 rounds


def check_a_resumed_run_equals_an_unbroken_one() -> None:
    unbroken = parameters()
    optimizer = wrap(unbroken, "topk", schedule=_scripted(phase=4))
    log = _run(optimizer, unbroken, range(STEPS))
    for before in (1, 3, 6):
        params = parameters()
        first = wrap(params, "topk", schedule=_scripted(phase=4))
        _run(first, params, range(before))
        file = io.BytesIO()
        torch.save(first.compressor_state_dict(), file)
        file.seek(0)
        params = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
        second = wrap(params, "topk", schedule=_scripted(phase=4))
        second.load_compressor_state_dict(torch.load(file, weights_only=True))
        assert _run(second, params, range(before, STEPS)) == log[before:]
        assert_equal(params.values(), unbroken.values())
        assert_equal(residuals(second).values(), residuals(optimizer).values())
        mine, other = (made.compressor_state_dict()["assignment"]["watch"] for made in (second, optimizer))
        assert mine["steps"] == other["steps"]
        assert_equal(mine["sums"].values(), other["sums"].values())
        assert_equal(mine["samples"].values(), other["samples"].values())


def check_a_nan_on_any_rank_changes_nothing() -> None:
    params, schedule = parameters(), _scripted(phase=1)
    optimizer = wrap(params, "topk", schedule=schedule)
    _run(optimizer, params, range(3))
    before = {name: p.detach().clone() for name, p in params.items()}
    for worker in range(2):
        optimizer.zero_grad()
        grads = gradients(3, me())
        if me() == worker:
            grads["layer.2.weight"][0, 0] = torch.nan
        give(params, grads)
        optimizer.step()
        assert optimizer.last_step.skipped
        assert optimizer.last_step.switched == {}
    assert_equal(params.values(), before.values())
    _run(optimizer, params, range(3, STEPS))
    assert_alike(params.values())
    if me() == 0:
        assert len(schedule.seen) == STEPS


def check_a_schedule_that_fails_fails_everywhere() -> None:
    params = parameters()
    optimizer = wrap(params, "topk", schedule=_scripted(fails_at=1))
    _run(optimizer, params, range(1))
    kind, message = (ArithmeticError, "as planned") if me() == 0 else (RuntimeError, "failed on worker 0")
    assert message in raised(kind, lambda: _run(optimizer, params, range(1, 2)))


def check_ranks_with_other_settings_are_told() -> None:
    params = parameters()
    optimizer = wrap(params, "topk", schedule=Scripted([{"cf": 5 + me()}]))
    message = raised(hvdcomp.ReplicaError, lambda: _run(optimizer, params, range(1)))
    assert "settings" in message


def check_sparse_gradients_as_dense_in_plain_steps_and_no_learning_rate() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(50, 8, sparse=True)
    stock = torch.optim.SGD(table.parameters(), lr=0.1)
    chosen = Accordion(low={"name": "none"}, high={"cf": 10}, steps_per_epoch=5)
    optimizer: Any = hvdcomp.DistributedOptimizer(
        stock, table.named_parameters(), "topk", sparse_as_dense=True, schedule=chosen
    )
    for group in optimizer.param_groups:
        group["lr"] = None
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor([step, hvd.rank()])).sum().backward()
        optimizer.synchronize()
        assert len(set(everyones(float(table.weight.grad.to_dense().sum())))) == 1


def check_parameters_added_later_are_assigned_too() -> None:
    params, schedule = parameters(), Scripted([{"cf": 1}, {"name": "none"}], {2: 1})
    optimizer = wrap(params, hvdcomp.TopK(cf=5), lr=1.0, schedule=schedule)
    _run(optimizer, params, range(1))
    late = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer.add_param_group({"params": [late]})
    for step in (1, 2, 3):
        optimizer.zero_grad()
        (late * torch.full((6, 4), float(me()))).sum().backward()
        give(params, gradients(step, me()))
        optimizer.step()
        if step == 2:
            assert len(optimizer.last_step.switched) == 4
    assert_close([late.detach()], [torch.full((6, 4), -1.5)])
    assert_alike([late])
    if me() == 0:
        assert len(schedule.units) == 4
