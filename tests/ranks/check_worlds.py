"""Process sets, and a state that goes on in a world of another size: four ranks."""

from __future__ import annotations

import itertools
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvdcomp
from hvdcomp.schedules import GraVAC
from ranks.tools import (
    LOSSY,
    SHAPES,
    assert_close,
    assert_equal,
    digest,
    everyones,
    give,
    gradients,
    me,
    parameters,
    raised,
    residuals,
    world,
    wrap,
)

PROCESS_SETS = [hvd.ProcessSet(list(ranks)) for ranks in ((1, 3), (0, 2), (2,))]


def _set(*ranks: int) -> Any:
    return next(chosen for chosen in PROCESS_SETS if chosen.ranks == list(ranks))


def _gravac() -> GraVAC:
    return GraVAC(cf_min=2, cf_max=16, epsilon=0.3, window=2, clock=itertools.count().__next__)


def check_a_subset_exchanges_among_itself() -> None:
    members = (1, 3)
    chosen = _set(*members)
    for method in ("topk", "oktopk", "bf16", "randomk", "powersgd", "none"):
        params = parameters()
        optimizer = wrap(params, LOSSY[method](), process_set=chosen)
        simulated = world(2, LOSSY[method]())
        for step in range(3):
            optimizer.zero_grad()
            give(params, gradients(step, me()))
            optimizer.synchronize()
            means = simulated.step([gradients(step, worker) for worker in members])[0]
            expected = means if me() in members else gradients(step, me())
            assert_close([p.grad for p in params.values()], [expected[name] for name in params])
            with optimizer.skip_synchronize():
                optimizer.step()
        digests = everyones(digest(params.values()))
        assert digests[1] == digests[3]
        assert len(set(digests)) == 3


def check_those_outside_step_on_their_own() -> None:
    params = parameters()
    optimizer = wrap(params, LOSSY["topk"](), process_set=_set(1, 3))
    if me() in (1, 3):
        return
    assert "not in the optimizer's process set" in raised(ValueError, optimizer.compressor_state_dict)
    optimizer.load_compressor_state_dict({})
    optimizer.check_replicas()
    for step in range(2):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.synchronize()
        optimizer.step()
    assert optimizer.last_step is None
    total = gradients(0, me())["conv.weight"] + gradients(1, me())["conv.weight"]
    assert_close([params["conv.weight"]], [-0.1 * total])


def check_two_sets_at_once() -> None:
    """Model parallel: each pair exchanges with a schedule and a coordinator of its own."""
    pairs = [_set(0, 2), _set(1, 3)]
    params = parameters()
    optimizer = wrap(params, "topk", process_set=pairs[me() % 2], schedule=_gravac())
    together = parameters()
    everybody = wrap(together, LOSSY["topk"]())
    members = [me() % 2, me() % 2 + 2]
    simulated = world(2, hvdcomp.TopK(), schedule=_gravac())
    for step in range(5):
        for own, stepper in ((params, optimizer), (together, everybody)):
            stepper.zero_grad()
            give(own, gradients(step, me()))
        for stepper in (everybody, optimizer)[:: -1 if step % 2 else 1]:
            stepper.step()
        simulated.step([gradients(step, worker) for worker in members])
        assert optimizer.last_step.cf == simulated.decision.cf
        for name, residual in residuals(optimizer).items():
            assert torch.equal(residual, simulated.residual(members.index(me()), name))
    digests = everyones(digest(params.values()))
    assert digests[0] == digests[2] != digests[1] == digests[3]
    assert len(set(everyones(digest(together.values())))) == 1
    channel = optimizer._exchange.coordinator.channel
    assert everyones(channel.root) == [True, True, False, False]


def check_a_set_of_one() -> None:
    """The same numbers as a world of equal ranks."""
    chosen = _set(2)
    params = parameters()
    optimizer = wrap(params, LOSSY["topk"](), process_set=chosen)
    if me() != 2:
        return
    simulated = world(1, LOSSY["topk"]())
    for step in range(3):
        optimizer.zero_grad()
        give(params, gradients(step, 0))
        optimizer.synchronize()
        means = simulated.step([gradients(step, 0)])[0]
        assert_equal([p.grad for p in params.values()], [means[name] for name in params])
        with optimizer.skip_synchronize():
            optimizer.step()


def check_made_by_members_only() -> None:
    chosen = _set(1, 3)
    if me() in (1, 3):
        for _number in range(me() and 2):
            params = parameters()
            optimizer = wrap(params, "topk", process_set=chosen)
            give(params, gradients(0, me()))
            optimizer.step()
    together = parameters()
    everybody = wrap(together, "topk")
    give(together, gradients(0, me()))
    everybody.step()
    assert len(set(everyones(digest(together.values())))) == 1


def check_a_nan_stays_within_its_set() -> None:
    params = parameters()
    optimizer = wrap(params, LOSSY["topk"](), process_set=_set(1, 3) if me() % 2 else _set(0, 2))
    grads = gradients(0, me())
    if me() == 3:
        grads["conv.weight"][0, 0, 0, 0] = float("nan")
    give(params, grads)
    optimizer.step()
    assert everyones(optimizer.last_step.skipped) == [False, True, False, True]


# -- worlds of another size -------------------------------------------------------------------------------


def _state_of(members: tuple[int, ...], scheduled: bool = False) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The states of all members after a few steps, handed to every rank; and the mean of their residuals."""
    chosen = _set(*members) if len(members) < hvd.size() else None
    state = None
    if me() in members:
        params = parameters()
        schedule = _gravac() if scheduled else None
        optimizer = wrap(params, LOSSY["topk"](), process_set=chosen, schedule=schedule)
        for step in range(4):
            optimizer.zero_grad()
            give(params, gradients(step, me()))
            optimizer.step()
        state = optimizer.compressor_state_dict()
    states = [state for state in everyones(state) if state is not None]
    assert [state["worker"] for state in states] == list(range(len(members)))
    means = {name: sum(s["residuals"][name] for s in states) / len(states) for name in states[0]["residuals"]}
    return states, means


def _grown_or_shrunk(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    states, means = _state_of(before)
    chosen = _set(*after) if len(after) < hvd.size() else None
    if me() not in after:
        return
    for policy in ("mean", "drop"):
        for running in (False, True):
            params = parameters()
            optimizer = wrap(params, LOSSY["topk"](), process_set=chosen)
            if running and policy == "mean":
                give(params, gradients(9, me()))
                optimizer.step()
                optimizer.zero_grad()
            message = raised(ValueError, lambda optimizer=optimizer: optimizer.load_compressor_state_dict(states))
            assert f"saved by {len(before)} workers" in message
            assert f"there are {len(after)}" in message
            own = states[0]
            if policy == "mean" and len(before) > 1:
                message = raised(
                    ValueError, lambda own=own, optimizer=optimizer: optimizer.load_compressor_state_dict(own, "mean")
                )
                assert "all" in message
            optimizer.load_compressor_state_dict(states if policy == "mean" else own, on_world_change=policy)
            loaded = optimizer.compressor_state_dict()
            assert (loaded["step"], loaded["workers"]) == (4, len(after))
            for name, mean in means.items():
                if policy == "mean":
                    assert_close([loaded["residuals"][name]], [mean])
                else:
                    assert not loaded["residuals"].get(name, torch.zeros(())).any()
            # what was not sent is sent now: with CF 5 and no gradient at all, the mean of the residuals
            give(params, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
            optimizer.synchronize()
            assert optimizer.last_step.step == 4
            left = residuals(optimizer)
            for name, mean in means.items():
                total = params[name].grad + left[name]
                assert_close([total], [mean if policy == "mean" else torch.zeros_like(mean)])


def check_from_four_to_two() -> None:
    _grown_or_shrunk((0, 1, 2, 3), (0, 2))


def check_from_two_to_four() -> None:
    _grown_or_shrunk((0, 2), (0, 1, 2, 3))


def check_from_one_to_four_and_back() -> None:
    _grown_or_shrunk((2,), (0, 1, 2, 3))
    _grown_or_shrunk((0, 1, 2, 3), (2,))


def check_the_schedule_goes_on_in_another_world() -> None:
    """Levels and gains stay, throughputs of another number of workers are forgotten."""
    states, _ = _state_of((0, 1, 2, 3), scheduled=True)
    chosen = _set(0, 2)
    if me() not in (0, 2):
        return
    params = parameters()
    optimizer = wrap(params, LOSSY["topk"](), process_set=chosen, schedule=_gravac())
    optimizer.load_compressor_state_dict(states, on_world_change="mean")
    assert optimizer.schedule.levels == tuple(states[0]["schedule"]["state"]["levels"])
    assert not optimizer.schedule.throughputs
    give(params, gradients(4, me()))
    optimizer.step()
    assert optimizer.last_step.step == 4


def check_warm_start_goes_on_in_another_world() -> None:
    """PowerSGD's Q is the same on all workers, so that any worker's will do."""
    chosen = _set(0, 2)
    params = {"w": nn.Parameter(torch.zeros(20, 30))}
    optimizer = wrap(params, hvdcomp.PowerSGD(rank=2))
    for step in range(3):
        optimizer.zero_grad()
        give(params, gradients(step, me(), {"w": (20, 30)}))
        optimizer.step()
    states = everyones(optimizer.compressor_state_dict())
    if me() in (0, 2):
        other = wrap(parameters({"w": (20, 30)}), hvdcomp.PowerSGD(rank=2), process_set=chosen)
        other.load_compressor_state_dict(states, on_world_change="mean")
        assert torch.equal(other.compressor_state_dict()["states"]["w"]["q"], states[0]["states"]["w"]["q"])
    everyones(None)  # a rank that ended would shut Horovod down, and its process sets with it, while others use them
