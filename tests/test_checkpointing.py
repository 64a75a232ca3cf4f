"""A worker's compressor state: saved, loaded, refused, and carried into a world of another size."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from conftest import every_method
from in_process import ExchangeWorld, GivenGradients
from torch import Tensor

from hvdcomp import checkpointing
from hvdcomp.buckets import Spec
from hvdcomp.compressors import DGC, Compressor, PowerSGD, RandomK, TopK
from hvdcomp.exchange import Exchange, LocalTransport
from hvdcomp.schedules import GraVAC, Static, Warmup

SHAPES = {"a.weight": (6, 8), "a.bias": (9,), "b.weight": (4, 3, 2)}
SPECS = {name: Spec(name, torch.Size(shape), torch.float32, torch.device("cpu")) for name, shape in SHAPES.items()}


def grads(workers: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(workers)]


def world(workers: int, compressor: Compressor, **options: Any) -> ExchangeWorld:
    return ExchangeWorld(workers, compressor, grads(1, 0)[0], **options)


def trained(workers: int, compressor: Compressor, steps: int = 3, **options: Any) -> ExchangeWorld:
    made = world(workers, compressor, **options)
    for step in range(steps):
        made.step(grads(workers, step))
    return made


def states(made: ExchangeWorld) -> list[dict[str, Any]]:
    return [checkpointing.state_of(exchange) for exchange in made.exchanges]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(exchange: Exchange, given: Any, on_world_change: str = "error") -> None:
    """What the optimizer's ``load_compressor_state_dict`` does."""
    chosen = checkpointing.choose(given, exchange.transport, SPECS, on_world_change)
    if exchange.coordinator is not None:
        checkpointing.load_schedule(exchange.coordinator.schedule, chosen)
    checkpointing.restore(exchange, chosen)


def flat(value: Any) -> Any:
    """Comparable with ==."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return list(map(flat, value)) if isinstance(value, (list, tuple)) else value


# -- round trips


@pytest.mark.parametrize("granularity", ["tensor", "bucket", "model"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resumed_run_equals_an_unbroken_one_bitwise(method: Compressor, workers: int, granularity: str) -> None:
    if method.needs_matrices and granularity != "tensor":
        pytest.skip("matrices only")
    unbroken = trained(workers, method, granularity=granularity)
    saved = through_a_file(states(unbroken))
    resumed = world(workers, method, granularity=granularity)
    for exchange, state in zip(resumed.exchanges, saved, strict=True):
        load(exchange, state)
    assert flat(states(resumed)) == flat(states(unbroken))
    for step in range(3, 6):
        expected, means = unbroken.step(grads(workers, step)), resumed.step(grads(workers, step))
        assert flat(means) == flat(expected)
    assert flat(states(resumed)) == flat(states(unbroken))


def test_a_schedule_is_resumed_too() -> None:
    def schedules() -> list[GraVAC]:
        return [GraVAC(cf_min=2, cf_max=16, epsilon=0, window=2) for _ in range(2)]

    unbroken = trained(2, TopK(), steps=5, schedules=schedules())
    saved = through_a_file(states(unbroken))
    resumed = world(2, TopK(), schedules=schedules())
    for exchange, state in zip(resumed.exchanges, saved, strict=True):
        load(exchange, state)
    for step in range(5, 10):
        assert flat(resumed.step(grads(2, step))) == flat(unbroken.step(grads(2, step)))
        assert resumed.records[1].levels == unbroken.records[1].levels
        assert resumed.records[1].cf == unbroken.records[1].cf
    assert resumed.records[0].levels != (2.0, 2.0)


def test_a_warm_up_goes_on_where_it_was() -> None:
    """It must not begin again."""
    schedule = Warmup(steps_each=2, cfs=[1, 2, 8])
    method = DGC(momentum=0.5)
    unbroken = trained(2, method, steps=3, cf_at=schedule.cf_at)
    saved = through_a_file(states(unbroken))
    resumed = world(2, method, cf_at=schedule.cf_at)
    for exchange, state in zip(resumed.exchanges, saved, strict=True):
        load(exchange, state)
    for step in range(3, 7):
        assert flat(resumed.step(grads(2, step))) == flat(unbroken.step(grads(2, step)))
        assert resumed.records[0].cf == [1, 1, 2, 2, 8, 8, 8][step]
    assert flat(states(resumed)) == flat(states(unbroken))


def test_a_saved_state_is_a_copy() -> None:
    made = trained(2, PowerSGD(rank=1))
    before = states(made)
    kept = copy.deepcopy(before)
    made.step(grads(2, 9))
    assert flat(before) == flat(kept)
    load(made.exchanges[0], before[0])
    made.step(grads(2, 10))
    assert flat(before) == flat(kept)


def test_residuals_are_saved_by_name_in_the_parameters_shape_whatever_the_granularity() -> None:
    for granularity in ("tensor", "bucket", "model"):
        state = states(trained(2, TopK(cf=4), granularity=granularity))[1]
        assert {name: tuple(residual.shape) for name, residual in state["residuals"].items()} == SHAPES
    saved = states(trained(2, TopK(cf=4), granularity="model"))
    other = world(2, TopK(cf=4))
    load(other.exchanges[0], saved[0])
    assert flat(states(other)[0]["residuals"]) == flat(saved[0]["residuals"])


def test_a_state_from_before_the_first_step_starts_afresh() -> None:
    made = trained(2, TopK(cf=4))
    load(made.exchanges[0], states(world(2, TopK(cf=4)))[0])
    load(made.exchanges[1], checkpointing.empty(made.transports[1]))
    assert all(not residual.any() for state in states(made) for residual in state["residuals"].values())
    assert [exchange.step for exchange in made.exchanges] == [0, 0]


def test_what_a_state_does_not_mention_starts_from_zero() -> None:
    made = trained(1, TopK(cf=4))
    state = states(made)[0]
    del state["residuals"]["a.bias"]
    load(made.exchanges[0], state)
    residuals = states(made)[0]["residuals"]
    assert not residuals["a.bias"].any()
    assert residuals["a.weight"].any()


def test_the_method_may_change_with_the_residual_carried_over() -> None:
    saved = states(trained(2, TopK(cf=8)))
    for compressor in (TopK(cf=2), RandomK(cf=4), PowerSGD(rank=1, small_matrix_rule=False)):
        made = world(2, compressor)
        for exchange, state in zip(made.exchanges, saved, strict=True):
            load(exchange, state)
        assert flat(states(made)[0]["residuals"]) == flat(saved[0]["residuals"])
        made.step(grads(2, 3))


def test_nothing_is_saved_while_residuals_hold_gradients() -> None:
    made = trained(1, TopK(cf=4), alone=True)
    exchange = made.exchanges[0]
    before = flat(checkpointing.state_of(exchange))
    exchange.start(exchange.buckets[0], GivenGradients(dict(grads(1, 5)[0])))
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        checkpointing.state_of(exchange)
    exchange.drop()
    assert flat(checkpointing.state_of(exchange)["step"]) == before["step"]


# -- another number of workers


@pytest.mark.parametrize("new", [1, 2, 5])
def test_everybody_gets_the_mean_of_the_residuals(new: int) -> None:
    saved = states(trained(3, TopK(cf=4)))
    made = world(new, TopK(cf=4))
    for exchange in made.exchanges:
        load(exchange, list(reversed(saved)), "mean")
    for name in SHAPES:
        mean = sum(state["residuals"][name] for state in saved) / 3
        for state in states(made):
            assert torch.allclose(state["residuals"][name], mean, atol=1e-6)
            assert state["step"] == 3
            assert state["workers"] == new
    assert flat(states(made)[0]["residuals"]) == flat(states(made)[-1]["residuals"])
    made.step(grads(new, 4))


def test_residuals_are_dropped_where_that_is_wanted() -> None:
    saved = states(trained(3, PowerSGD(rank=1, small_matrix_rule=False)))
    made = trained(2, PowerSGD(rank=1, small_matrix_rule=False))
    for exchange in made.exchanges:
        load(exchange, saved[0], "drop")
    for state in states(made):
        assert not any(residual.any() for residual in state["residuals"].values())
        assert flat(state["states"]) == flat(saved[0]["states"])


@pytest.mark.parametrize(
    ("given", "policy", "message"),
    [
        ([0, 1, 2], "error", r"saved by 3 workers, and there are 2: choose on_world_change='mean'"),
        ([0, 1], "mean", r"'mean' needs the states of all 3 workers that saved, got those of \[0, 1\]"),
        ([1, 2], "drop", r"'drop' needs the states of worker 0"),
        ([0, 1, 1], "mean", r"one of each worker"),
        ([], "mean", r"one of each worker"),
        ([0, 1, 2], "average", r"on_world_change must be one of mean, drop, error, got 'average'"),
    ],
)
def test_another_world_without_what_it_needs_is_refused(given: list[int], policy: str, message: str) -> None:
    saved = states(trained(3, TopK(cf=4)))
    made = trained(2, TopK(cf=4), steps=2)
    before = flat(states(made))
    with pytest.raises(ValueError, match=message):
        load(made.exchanges[0], [saved[worker] for worker in given], policy)
    assert flat(states(made)) == before


def test_a_schedule_goes_into_another_world() -> None:
    old = [GraVAC(cf_min=2, cf_max=16, epsilon=0, window=2) for _ in range(3)]
    saved = states(trained(3, TopK(), steps=5, schedules=old))
    new = [GraVAC(cf_min=2, cf_max=16, epsilon=0, window=2) for _ in range(2)]
    made = world(2, TopK(), schedules=new)
    for exchange in made.exchanges:
        load(exchange, saved, "mean")
        assert exchange.levels == saved[0]["levels"]
    made.step(grads(2, 5))
    assert made.records[0].levels == saved[0]["levels"]


# -- what does not fit is refused, and then nothing has changed


def refused(change: Any, message: str, **options: Any) -> None:
    made = trained(2, TopK(cf=4), **options)
    before = flat(states(made))
    state = copy.deepcopy(states(trained(2, TopK(cf=4), steps=5, **options))[0])
    change(state)
    with pytest.raises(ValueError, match=message):
        load(made.exchanges[0], state)
    assert flat(states(made)) == before


def test_another_workers_state_is_refused() -> None:
    made = trained(2, TopK(cf=4))
    before = flat(states(made))
    with pytest.raises(ValueError, match="worker 1 was given the compressor state of worker 0: residuals differ"):
        load(made.exchanges[1], states(made)[0])
    assert flat(states(made)) == before
    load(made.exchanges[1], states(made))  # from all of them it takes its own
    assert flat(states(made)) == before


def test_an_unknown_name_is_refused() -> None:
    refused(
        lambda s: s["residuals"].update({"c.weight": torch.ones(2)}), "residual of 'c.weight', which is no parameter"
    )


def test_another_shape_is_refused() -> None:
    refused(
        lambda s: s["residuals"].update({"a.weight": torch.ones(8, 6)}),
        r"residual of 'a.weight' has shape \(8, 6\), the parameter \(6, 8\)",
    )


@pytest.mark.parametrize("change", [{"version": 1}, {"more": 1}])
def test_another_version_is_refused(change: dict[str, int]) -> None:
    refused(lambda s: s.update(change), "not a compressor state of version 2")


def test_a_state_with_a_part_missing_is_refused() -> None:
    refused(lambda s: s.pop("residuals"), "not a compressor state of version 2")


def test_states_of_different_steps_are_refused() -> None:
    made = trained(2, TopK(cf=4))
    mixed = [states(trained(2, TopK(cf=4), steps=steps))[worker] for worker, steps in enumerate((2, 3))]
    with pytest.raises(ValueError, match="from one step of one run"):
        load(made.exchanges[0], mixed)


def test_another_schedules_state_is_refused() -> None:
    adaptive = [GraVAC(cf_min=2, cf_max=16, epsilon=0, window=2) for _ in range(2)]
    made = trained(2, TopK(cf=4), schedules=adaptive)
    before = flat(states(made))
    with pytest.raises(ValueError, match="saved under schedule 'static', this run uses 'gravac'"):
        load(made.exchanges[0], states(trained(2, TopK(cf=4)))[0])
    other = trained(2, TopK(cf=4), schedules=[GraVAC(cf_min=3, cf_max=16) for _ in range(2)])
    with pytest.raises(ValueError, match="this GraVAC state was saved with"):
        load(made.exchanges[0], states(other)[0])
    assert flat(states(made)) == before


def test_a_static_run_goes_on_from_an_adaptive_one() -> None:
    adaptive = [GraVAC(cf_min=2, cf_max=16, epsilon=0, window=2)]
    saved = states(trained(1, TopK(cf=4), schedules=adaptive))[0]
    made = world(1, TopK(cf=4))
    checkpointing.load_schedule(Static(), saved)
    load(made.exchanges[0], saved)
    assert flat(states(made)[0]["residuals"]) == flat(saved["residuals"])


@pytest.mark.parametrize("given", [None, 3, "state", [None], [[]]])
def test_what_is_no_state_at_all_is_refused(given: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        checkpointing.choose(given, LocalTransport(), SPECS, "error")


def test_every_method_has_a_state_that_torch_saves_safely() -> None:
    for compressor in every_method():
        made = trained(2, compressor)
        assert flat(through_a_file(states(made))) == flat(states(made))


@pytest.mark.parametrize("damage", [{"residuals": None}, {"step": "x"}, {"states": 3}])
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    made = world(1, TopK(cf=4))
    with pytest.raises(ValueError, match="damaged"):
        load(made.exchanges[0], states(made)[0] | damage)


def test_a_residual_that_would_never_be_sent_is_refused() -> None:
    made = world(1, TopK(cf=4))
    state = states(made)[0]
    name = next(iter(state["residuals"]))
    state["residuals"][name].view(-1)[0] = math.nan
    with pytest.raises(ValueError, match="finite"):
        load(made.exchanges[0], state)
