"""What goes wrong on one rank must end alike on all: two ranks, over MPI and Gloo."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvdcomp
from hvdcomp.schedules import Decision, GraVAC, Static, Statistics
from ranks.check_methods import every_method
from ranks.tools import (
    LOSSY,
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

PROCESS_SETS = [hvd.ProcessSet([0])]


def _gravac(**given: Any) -> GraVAC:
    ticks = itertools.count().__next__
    return GraVAC(**{"cf_min": 2, "cf_max": 16, "epsilon": 0.3, "window": 2, "clock": ticks, **given})


# -- NaN and Inf ------------------------------------------------------------------------------------------


def _one_bad_step(make: Callable[[], Any], bad: float, rank: int, name: str, **arguments: Any) -> None:
    params = parameters()
    base = torch.optim.SGD(list(params.values()), lr=0.1, momentum=0.9)
    optimizer = hvdcomp.DistributedOptimizer(base, list(params.items()), make(), **arguments)
    for step in range(5):
        optimizer.zero_grad()
        grads = gradients(step, me())
        before = [p.detach().clone() for p in params.values()]
        left = residuals(optimizer)
        momentum = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
        if step == 2 and me() == rank:
            grads[name].view(-1)[-1] = bad
        give(params, grads)
        optimizer.synchronize()
        assert optimizer.last_step.skipped == (step == 2), (step, optimizer.last_step)
        if step == 2:
            assert all(torch.isnan(p.grad).all() for p in params.values())
        with optimizer.skip_synchronize():
            optimizer.step()
        assert everyones(optimizer.last_step.skipped) == [step == 2] * 2
        if step == 2:
            assert_equal(params.values(), before)
            assert_equal([s["momentum_buffer"] for s in optimizer.state.values()], momentum)
            assert_close(residuals(optimizer).values(), left.values(), 0, 1e-6)
        else:
            assert not torch.equal(params[name], before[list(params).index(name)])
    assert all(torch.isfinite(p).all() for p in params.values())
    assert all(torch.isfinite(r).all() for r in residuals(optimizer).values())
    assert_alike(params.values())


def check_nan_with_each_method() -> None:
    for method in LOSSY:
        if method != "none":
            for rank, name in ((0, "layer.10.weight"), (1, "layer.10.weight"), (1, "layer.2.bias")):
                _one_bad_step(LOSSY[method], math.nan, rank, name)


def check_inf_with_each_method() -> None:
    for method in LOSSY:
        if method != "none":
            _one_bad_step(LOSSY[method], -math.inf, 1, "conv.weight", bucket_mb=1e-5)


def check_nan_with_gravac() -> None:
    for method in ("topk", "randomk"):
        for rank, name in ((0, "layer.10.weight"), (1, "layer.2.bias")):
            _one_bad_step(LOSSY[method], math.nan, rank, name, schedule=_gravac(), bucket_mb=1e-5)


def check_nan_by_bucket_and_model() -> None:
    for granularity in ("bucket", "model"):
        _one_bad_step(LOSSY["topk"], math.nan, 1, "conv.weight", granularity=granularity)


def check_nan_without_feedback() -> None:
    for make in (
        lambda: hvdcomp.TopK(cf=5, error_feedback=False),
        lambda: hvdcomp.RandomK(cf=5, error_feedback=False),
        lambda: hvdcomp.PowerSGD(rank=1, error_feedback=False),
    ):
        _one_bad_step(make, math.nan, 0, "layer.10.weight")


def check_nan_without_compression_is_horovods() -> None:
    """Plain Horovod applies it, alike on all ranks."""
    params = parameters()
    optimizer = wrap(params, "none")
    grads = gradients(0, me())
    if me() == 1:
        grads["layer.10.weight"][0, 0] = math.nan
    give(params, grads)
    optimizer.step()
    assert not optimizer.last_step.skipped
    assert torch.isnan(params["layer.10.weight"]).sum() == 1
    assert torch.isfinite(params["conv.weight"]).all()


def check_a_rank_with_nothing_to_send() -> None:
    """Zeros on one rank, of which a threshold sends nothing, while the other rank sends."""
    for quiet, compressor in itertools.product((0, 1), every_method()):
        params = parameters()
        base = torch.optim.SGD(list(params.values()), lr=0.1, momentum=0.0 if compressor.name == "signum" else 0.9)
        optimizer = hvdcomp.DistributedOptimizer(base, list(params.items()), compressor)
        for step in range(3):
            optimizer.zero_grad()
            give(params, {name: grad * (me() != quiet) for name, grad in gradients(step, me()).items()})
            optimizer.step()
        assert_alike(params.values())
        assert all(torch.isfinite(p).all() and p.count_nonzero() for p in params.values()), repr(compressor)


def check_sums_that_overflow() -> None:
    """Finite on each rank, not finite together or with the residual: alike on all ranks, and harmless."""
    for method in ("topk", "randomk", "powersgd"):
        params = {"w": nn.Parameter(torch.zeros(6, 6))}
        optimizer = wrap(params, LOSSY[method](), lr=1e-30)
        generator = torch.Generator().manual_seed(3)
        for factor in (3e38, 3e38, 1.0, 1.0):
            optimizer.zero_grad()
            grad = torch.rand(6, 6, generator=generator) * factor
            give(params, {"w": grad})
            optimizer.step()
            assert len(set(everyones(optimizer.last_step.skipped))) == 1
        assert torch.isfinite(residuals(optimizer)["w"]).all(), method
        assert_alike(params.values())


def check_only_nan_ever() -> None:
    params = parameters()
    optimizer = wrap(params, LOSSY["topk"](), schedule=_gravac())
    for _step in range(3):
        optimizer.zero_grad()
        give(params, {name: torch.full(shape, math.nan) for name, shape in SHAPES.items()})
        optimizer.step()
        assert optimizer.last_step.skipped
    assert_equal(params.values(), parameters().values())
    assert all(not r.any() for r in residuals(optimizer).values())


# -- ranks that differ -------------------------------------------------------------------------------------------------


def _differing(words: list[str], own: Callable[[], Any]) -> None:
    """Both ranks must raise a ReplicaError with these words, now and at the next step."""
    optimizer, params, shapes = own()
    for _attempt in range(2):
        before = [p.detach().clone() for p in params.values()]
        give(params, {name: torch.ones(shape) for name, shape in shapes.items()})
        message = raised(hvdcomp.ReplicaError, optimizer.step)
        assert all(word in message for word in [*words, "worker 1"]), message
        assert_equal(params.values(), before)
        optimizer.zero_grad()
        assert everyones(message) == [message] * 2


def _case(first: dict[str, Any], second: dict[str, Any], words: list[str]) -> None:
    given = [first, second][me()]
    shapes = given.pop("shapes", SHAPES)
    dtype = given.pop("dtype", torch.float32)

    def own() -> Any:
        params = parameters(shapes, dtype)
        return wrap(params, **{"compression": hvdcomp.TopK(cf=5), **given}), params, shapes

    _differing(words, own)


def check_other_shape() -> None:
    _case({}, {"shapes": {**SHAPES, "layer.2.weight": (12, 10)}}, ["layer.2.weight", "[12, 10]", "[12, 9]"])


def check_other_type() -> None:
    _case({}, {"dtype": torch.float64}, ["torch.float64", "torch.float32"])


def check_other_number_of_parameters() -> None:
    _case({}, {"shapes": {**SHAPES, "more": (3, 3)}}, ["more", "missing"])
    fewer = {name: shape for name, shape in SHAPES.items() if name != "conv.weight"}
    _case({}, {"shapes": fewer}, ["conv.weight", "missing"])


def check_other_factor() -> None:
    _case({}, {"compression": hvdcomp.TopK(cf=6)}, ["TopK(cf=5", "TopK(cf=6"])


def check_other_method() -> None:
    _case({"compression": "powersgd"}, {"compression": "randomk"}, ["PowerSGD", "RandomK"])


def check_other_seed() -> None:
    _case({"compression": hvdcomp.RandomK(seed=1)}, {"compression": hvdcomp.RandomK(seed=2)}, ["seed=1", "seed=2"])


def check_other_layout() -> None:
    _case({"granularity": "bucket"}, {"granularity": "model"}, ["granularity"])
    _case({"bucket_mb": 1.0}, {"bucket_mb": 2.0}, ["bucket_mb"])
    _case({"exclude": ["conv.*"]}, {}, ["exclude"])
    _case({"groups": 2}, {"groups": 3}, ["groups"])


def check_other_reduction() -> None:
    _case({"op": hvd.Sum}, {}, ["op"])


def check_other_predivide_factor() -> None:
    _case({"gradient_predivide_factor": 2.0}, {}, ["gradient_predivide_factor"])


def check_other_parameters_of_the_schedule() -> None:
    _case({"schedule": _gravac()}, {"schedule": _gravac(cf_max=17)}, ["schedule", "cf_max"])


def check_other_schedule() -> None:
    """One adaptive, one not: nobody may wait for the other's decisions."""
    _case({"schedule": _gravac()}, {}, ["schedule"])
    _case({"schedule": Static(cf=3)}, {"schedule": _gravac()}, ["s"])


def check_ranks_go_on_after_a_replica_error() -> None:
    params = parameters()
    optimizer = wrap(params, "topk", schedule=_gravac())
    give(params, gradients(0, me()))
    optimizer.step()
    assert_alike(params.values())


# -- the schedule ------------------------------------------------------------------------------------------------------


class _Breaks(GraVAC):
    def decide(self, statistics: Statistics) -> Decision:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 3:
            raise ZeroDivisionError("the schedule's own fault")
        return super().decide(statistics)


class _BreaksWatching(GraVAC):
    def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
        raise ZeroDivisionError("the schedule's own fault")


def check_a_schedule_that_fails_on_rank_0_fails_everywhere() -> None:
    """decide() and observe() run on rank 0 only: the others must not wait for ever."""
    for schedule, step_of_fault in ((_Breaks, 2), (_BreaksWatching, 1)):
        params = parameters()
        optimizer = wrap(params, "topk", schedule=schedule(cf_min=2, cf_max=9))
        for step in range(4):
            give(params, gradients(step, me()))
            before = [p.detach().clone() for p in params.values()]
            error = _error_of(optimizer.step)
            if error is not None:
                break
            optimizer.zero_grad()
        else:
            raise AssertionError("nothing was raised")
        assert isinstance(error, ZeroDivisionError if me() == 0 else RuntimeError), error
        assert ("own fault" if me() == 0 else "worker 0") in str(error)
        assert everyones(step)[0] == everyones(step)[1]
        assert step_of_fault <= step <= step_of_fault + 1
        assert_equal(params.values(), before)
        assert all(torch.isfinite(r).all() for r in residuals_after_a_fault(optimizer))


def _error_of(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def residuals_after_a_fault(optimizer: Any) -> list[torch.Tensor]:
    return [part.feedback.residual for bucket in optimizer._exchange.buckets for part in bucket.parts if part.feedback]


def check_decisions_are_alike_and_their_cost_is_reported() -> list[float]:
    """Over MPI by mpi4py, over Gloo by Horovod."""
    params = parameters()
    optimizer = wrap(params, "topk", schedule=GraVAC(cf_min=2, cf_max=16, epsilon=0.3, window=2))
    decisions, costs = [], []
    for step in range(10):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.step()
        record = optimizer.last_step
        decisions.append((record.cf, record.level, record.levels, record.gains))
        costs.append(record.decide_s)
    assert everyones(decisions) == [decisions] * 2
    assert all(cost > 0 for cost in costs)
    channel = optimizer._exchange.coordinator.channel
    assert channel.name == ("mpi" if hvd.mpi_enabled() else "horovod")
    assert channel.root == (me() == 0)
    assert_alike(params.values())
    return costs


# -- process sets ------------------------------------------------------------------------------------------------------


def check_optimizers_made_by_members_only() -> None:
    """Made on one rank only, an optimizer of its own process set must not shift the names of the next one."""
    params = {"w": nn.Parameter(torch.zeros(4, 4))}
    own = PROCESS_SETS[0]
    if me() == 0:
        alone = {"w": nn.Parameter(torch.zeros(4, 4))}
        optimizer = wrap(alone, "topk", process_set=own)
        give(alone, {"w": torch.ones(4, 4)})
        optimizer.step()
        assert alone["w"].abs().sum() > 0
    together = wrap(params, "topk")
    give(params, {"w": torch.full((4, 4), 1.0 + me())})
    together.step()
    assert_alike(params.values())
