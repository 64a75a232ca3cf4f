"""Parameters are bitwise alike on all ranks, and means and residuals are those of the simulation.

Runs with any number of ranks, over MPI and over Gloo.
"""

from __future__ import annotations

import itertools
from typing import Any

import horovod.torch as hvd
import torch

import hvdcomp
from hvdcomp.schedules import GraVAC
from hvdcomp.simulation import World
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
    net,
    parameters,
    residuals,
    train,
    world,
    wrap,
)

BITWISE = {"topk", "oktopk", "bf16"}
"""Sums are taken by ourselves, in worker order; elsewhere Horovod sums, in its ring's order."""


def _ticks() -> Any:
    return itertools.count().__next__


def _gravac(**given: Any) -> GraVAC:
    return GraVAC(**{"cf_min": 2, "cf_max": 16, "epsilon": 0.3, "window": 2, "clock": _ticks(), **given})


def _as_simulated(method: str, steps: int = 6, **layout: Any) -> None:
    compression, size = LOSSY[method](), hvd.size()
    simulated = world(size, compression, **layout)
    params = parameters()
    optimizer = wrap(params, compression, **layout)
    for step in range(steps):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.synchronize()
        means = simulated.step([gradients(step, worker) for worker in range(size)])[me()]
        tolerance = 0 if method in BITWISE else 4e-3 if method == "fp16" else 2e-5
        for name, param in params.items():
            dense = name == "layer.2.bias" and "1d" in compression.default_exclude  # it travels by allreduce
            assert_close([param.grad], [means[name]], 2e-5 if dense else tolerance, 2e-5 if dense else tolerance)
        left = residuals(optimizer)
        for name, residual in left.items():
            assert_close([residual], [simulated.residual(me(), name)], tolerance, tolerance)
        assert me() != 0 or optimizer.last_step.bytes_sent == simulated.nbytes
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_alike(params.values())
    if LOSSY[method]().error_feedback:
        assert len(left) == 3
        assert max(float(r.abs().max()) for r in left.values()) > 0.1
        assert len(set(everyones(next(r.sum().item() for r in left.values())))) == size


def check_none_is_as_simulated() -> None:
    _as_simulated("none")


def check_fp16_is_as_simulated() -> None:
    _as_simulated("fp16")


def check_bf16_is_as_simulated() -> None:
    _as_simulated("bf16")


def check_topk_is_as_simulated() -> None:
    _as_simulated("topk")


def check_oktopk_is_as_simulated() -> None:
    _as_simulated("oktopk")


def check_oktopk_rounded_is_as_simulated() -> None:
    """Over as many regions as there are ranks, most of them empty: a bias of 12 elements keeps one."""
    params, size = parameters({"bias": (12,), "scalar": (), "empty": (0, 3), "weight": (9, 8)}), hvd.size()
    compression = hvdcomp.compressors.OkTopK(cf=12, values="int8")
    optimizer, simulated = wrap(params, compression, exclude=()), World(size, compression)
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    for step in range(4):
        give(params, gradients(step, me(), shapes))
        optimizer.synchronize()
        means = simulated.step([gradients(step, worker, shapes) for worker in range(size)])[me()]
        assert_equal([param.grad for param in params.values()], [means[name] for name in params])
        for name, residual in residuals(optimizer).items():
            assert torch.equal(residual, simulated.residual(me(), name)), name
        optimizer.zero_grad()


def check_topk_by_bucket_is_as_simulated() -> None:
    _as_simulated("topk", granularity="bucket", bucket_mb=0.0005)


def check_topk_of_the_model_is_as_simulated() -> None:
    _as_simulated("topk", granularity="model")


def check_randomk_is_as_simulated() -> None:
    _as_simulated("randomk")


def check_randomk_by_bucket_is_as_simulated() -> None:
    _as_simulated("randomk", granularity="bucket")


def check_powersgd_is_as_simulated() -> None:
    _as_simulated("powersgd")


def check_many_buckets_are_as_simulated() -> None:
    _as_simulated("topk", bucket_mb=1e-5)


def check_gravac_is_as_simulated_and_decides_alike() -> list[Any]:
    size, steps = hvd.size(), 12
    simulated = world(size, hvdcomp.TopK(), schedule=_gravac(), bucket_mb=1e-5)
    params = parameters()
    optimizer = wrap(params, hvdcomp.TopK(), schedule=_gravac(), bucket_mb=1e-5)
    decisions = []
    for step in range(steps):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.step()
        simulated.step([gradients(step, worker) for worker in range(size)])
        record = optimizer.last_step
        decisions.append([record.cf, record.level, *record.levels, *record.gains])
        assert record.cf == simulated.decision.cf
        assert_close([torch.tensor(record.gains)], [torch.tensor(simulated.decision.gains)], 1e-5, 0)
        for name, residual in residuals(optimizer).items():
            assert torch.equal(residual, simulated.residual(me(), name)), name
        assert record.decide_s > 0
    assert all(other == decisions for other in everyones(decisions))
    assert len({cf for cf, *_ in decisions}) >= 2, decisions
    assert_alike(params.values())
    return decisions


def _replicas(compression: Any, **arguments: Any) -> None:
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), compression, **arguments)
    train(model, optimizer, 12)
    assert_alike(model.parameters())
    assert_alike(state["momentum_buffer"] for state in optimizer.state.values())
    optimizer.check_replicas()
    start = net()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))


def check_replicas_stay_alike_with_none() -> None:
    _replicas("none")


def check_replicas_stay_alike_with_fp16() -> None:
    _replicas("fp16")


def check_replicas_stay_alike_with_horovods_fp16() -> None:
    _replicas(hvd.Compression.fp16)


def check_replicas_stay_alike_with_bf16() -> None:
    _replicas("bf16")


def check_replicas_stay_alike_with_topk() -> None:
    _replicas(hvdcomp.TopK(cf=4), exclude=())


def check_replicas_stay_alike_with_randomk() -> None:
    _replicas(hvdcomp.RandomK(cf=4), granularity="bucket")


def check_replicas_stay_alike_with_powersgd() -> None:
    _replicas(hvdcomp.PowerSGD(rank=2))


def check_replicas_stay_alike_with_gravac() -> None:
    _replicas("topk", schedule=_gravac())


def check_replicas_stay_alike_with_gravac_over_randomk() -> None:
    _replicas("randomk", schedule=_gravac(policy="geometric"))


def check_applied_mean_and_residuals_make_up_the_gradients() -> None:
    """Applied mean + mean of the residuals = mean of acc."""
    for method in ("topk", "randomk", "powersgd"):
        params = parameters()
        optimizer = wrap(params, LOSSY[method]())
        before = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(4):
            optimizer.zero_grad()
            give(params, gradients(step, me()))
            optimizer.synchronize()
            left = residuals(optimizer)
            for name, param in params.items():
                acc = sum(gradients(step, w)[name] for w in range(hvd.size())) / hvd.size() + before[name]
                residual = left.get(name, torch.zeros(SHAPES[name]))
                before[name] = hvd.allreduce(residual, name=f"mean.{name}")
                assert_close([param.grad + before[name]], [acc], 1e-4, 1e-5)
            with optimizer.skip_synchronize():
                optimizer.step()


def check_the_users_random_numbers_are_untouched() -> None:
    import random

    import numpy as np

    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for make in LOSSY.values():
        optimizer = wrap(params, make())
        for _step in range(2):
            optimizer.zero_grad()
            torch.stack([(p * p).sum() + p.sum() for p in params.values()]).sum().backward()
            optimizer.step()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def check_replicas_that_differ_are_found() -> None:
    params = parameters()
    optimizer = wrap(params, "topk")
    optimizer.check_replicas()
    if me() == hvd.size() - 1:
        params["layer.10.weight"].data[3, 4] = 1e-30
    if hvd.size() == 1:
        optimizer.check_replicas()
        return
    try:
        optimizer.check_replicas()
    except hvdcomp.ReplicaError as error:
        message = str(error)
    else:
        raise AssertionError("not found")
    assert "'layer.10.weight'" in message, message
    assert f"worker {hvd.size() - 1}" in message, message
