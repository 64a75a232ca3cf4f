"""Every method on real ranks: the optimizer hands it what it needs, and the replicas stay alike."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from hand_values import VALUES

import hvdcomp
from hvdcomp.schedules import GraVAC, Warmup
from hvdcomp.simulation import World
from ranks.tools import assert_alike, assert_close, me, net, raised, residuals, train

NEEDED: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.01},
    "gradiveq": {"slice_size": 8, "components": 2, "training_steps": 1, "quantised_steps": 3},
}
"""Parameters under which these methods compress small tensors within a few steps."""


def every_method() -> list[hvdcomp.Compressor]:
    defaults = [hvdcomp.compressors.create(name, **NEEDED.get(name, {})) for name in hvdcomp.compressors.available()]
    return [*defaults, hvdcomp.compressors.create("redsync", quantise=True)]


def check_every_method_trains_and_keeps_replicas_alike() -> None:
    for compressor in every_method():
        model, name = net(), repr(compressor)
        momentum = 0.0 if compressor.name == "signum" else 0.9
        base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), compressor)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, optimizer, 5)
        assert_alike(model.parameters())
        optimizer.check_replicas()
        assert any(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True)), name
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters()), name
        record = optimizer.last_step
        assert record.cf == (compressor.cf if compressor.has_levels else record.bytes_dense / record.bytes_sent), name


def check_every_method_gives_the_values_worked_by_hand() -> None:
    for value in VALUES:
        parameter = torch.nn.Parameter(torch.zeros(value.given.shape))
        base = torch.optim.SGD([parameter], lr=1.0)
        optimizer = hvdcomp.DistributedOptimizer(base, [("w", parameter)], value.compressor, exclude=())
        for _ in range(value.steps):
            parameter.grad = value.gradient(me())
            optimizer.synchronize()
            mean = parameter.grad.clone()
            with optimizer.skip_synchronize():
                optimizer.step()
        state = optimizer.compressor_state_dict()
        kept = state["states"]["w"]["own.v"] if value.compressor.name == "dgc" else residuals(optimizer).get("w")
        left = torch.zeros_like(mean) if kept is None else kept.view_as(mean)
        value.check(me(), hvd.size(), mean, left)


VARIANTS = [
    hvdcomp.compressors.create(name, **parameters)
    for name, parameters in (
        ("topk", {"cf": 5, "values": "fp16"}),
        ("topk", {"cf": 5, "values": "bf16"}),
        ("topk", {"cf": 5, "values": "int8"}),
        ("dgc", {"cf": 5, "momentum": 0.9, "clip": 3.0}),
        ("dgc", {"cf": 5, "momentum": 0.9, "nesterov": True}),
        ("redsync", {"cf": 5, "variant": "trimmed"}),
        *((name, {"cf": 5}) for name in ("redsync", "mstopk", "gaussiank", "sidcoe", "sidcogp", "sidcop", "oktopk")),
        ("artopk", {"cf": 5, "selection": "var"}),
        ("randomk", {"cf": 5, "error_feedback": False}),
        ("terngrad", {"shared_scale": True}),
        ("qsgd", {"levels": 4, "bucket": 7}),
    )
]
"""Beside every method's own settings, which keep one element in a hundred."""


def check_every_method_equals_the_simulation() -> None:
    shapes = {"a": (12, 10), "b": (6, 5, 3)}
    rounding = 1e-6 if hvd.size() == 2 else 2e-5  # a ring of three sums in another order, and PowerSGD feeds it back
    for compressor in [*every_method(), *VARIANTS]:
        params = {n: torch.nn.Parameter(torch.zeros(shape)) for n, shape in shapes.items()}
        base = torch.optim.SGD(list(params.values()), lr=1.0, momentum=0.0)
        optimizer = hvdcomp.DistributedOptimizer(base, list(params.items()), compressor, exclude=())
        world = World(hvd.size(), compressor)
        generator = torch.Generator().manual_seed(7)
        for _ in range(4):
            grads = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(hvd.size())]
            means = world.step(grads)
            for n, parameter in params.items():
                parameter.grad = grads[hvd.rank()][n].clone()
            optimizer.synchronize()
            for n, parameter in params.items():
                assert torch.allclose(parameter.grad, means[hvd.rank()][n], rtol=1e-5, atol=rounding), (compressor, n)
            with optimizer.skip_synchronize():
                optimizer.step()


def check_decisions_that_come_a_step_later_equal_the_simulation_and_go_on_when_resumed() -> None:
    def wrapped() -> tuple[torch.nn.Parameter, Any]:
        parameter = torch.nn.Parameter(torch.zeros(40, 30))
        schedule = GraVAC(**settings)
        base = torch.optim.SGD([parameter], lr=1.0)
        return parameter, hvdcomp.DistributedOptimizer(base, [("w", parameter)], "topk", schedule=schedule)

    settings: dict[str, Any] = {"cf_min": 2, "cf_max": 64, "epsilon": 0.3, "omega": 0, "window": 2, "exact": False}
    world = World(hvd.size(), "topk", schedule=GraVAC(**settings))
    parameter, optimizer = wrapped()
    generator = torch.Generator().manual_seed(7)
    sent = []
    for step in range(10):
        if step == 5:
            state = optimizer.compressor_state_dict()
            parameter, optimizer = wrapped()
            optimizer.load_compressor_state_dict(state)
        grads = [{"w": torch.randn(40, 30, generator=generator)} for _ in range(hvd.size())]
        mean = world.step(grads)[hvd.rank()]["w"]
        optimizer.zero_grad()
        parameter.grad = grads[hvd.rank()]["w"].clone()
        optimizer.synchronize()
        assert torch.equal(parameter.grad, mean), step
        sent.append(optimizer.last_step.cf)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert len(set(sent)) > 1, sent


def check_dgc_at_cf_1_is_momentum_sgd_with_weight_decay() -> None:
    """Settings are those of the moment; under another momentum Nesterov's u, which holds the old one, is not SGD's."""
    for nesterov in (False, True):
        ours, plain = net(), net()
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": nesterov}
        base = torch.optim.SGD(ours.parameters(), **settings)
        optimizer = hvdcomp.DistributedOptimizer(base, ours.named_parameters(), hvdcomp.compressors.create("dgc", cf=1))
        stock = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), **settings), plain.named_parameters())
        for first, momentum, weight_decay in ((0, 0.9, 1e-3), (20, 0.9 if nesterov else 0.5, 0.1)):
            for model, wrapped in ((ours, optimizer), (plain, stock)):
                wrapped.param_groups[0].update(momentum=momentum, weight_decay=weight_decay)
                train(model, wrapped, 15, first)
            assert_close(ours.parameters(), plain.parameters(), rtol=1e-5, atol=1e-6)
            assert optimizer.param_groups[0]["momentum"] == momentum


def check_warmup_equals_the_simulation_and_goes_on_when_resumed() -> None:
    def wrapped() -> tuple[torch.nn.Parameter, Any]:
        parameter = torch.nn.Parameter(torch.zeros(20, 16))
        base = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
        return parameter, hvdcomp.DistributedOptimizer(base, [("w", parameter)], "dgc", schedule=schedule)

    schedule = Warmup(steps_each=2, cfs=[1, 4, 16])
    world = World(hvd.size(), "dgc", momentum=0.9, schedule=schedule)
    parameter, optimizer = wrapped()
    generator = torch.Generator().manual_seed(7)
    for step in range(8):
        if step in (1, 5):
            state = optimizer.compressor_state_dict()
            parameter, optimizer = wrapped()
            optimizer.load_compressor_state_dict(state)
        grads = [{"w": torch.randn(20, 16, generator=generator)} for _ in range(hvd.size())]
        mean = world.step(grads)[hvd.rank()]["w"]
        parameter.grad = grads[hvd.rank()]["w"].clone()
        optimizer.synchronize()
        assert torch.allclose(parameter.grad, mean, rtol=1e-5, atol=1e-6), step
        assert optimizer.last_step.cf == [1, 1, 4, 4, 16, 16, 16, 16][step]
        with optimizer.skip_synchronize():
            optimizer.step()


def check_warmup_without_its_length_or_a_factor_is_refused() -> None:
    model = net()
    for compression, schedule, word in (("topk", "warmup", "steps_each"), ("qsgd", Warmup(3), "qsgd")):
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments = (base, model.named_parameters(), compression)
        message = raised(ValueError, lambda a=arguments, s=schedule: hvdcomp.DistributedOptimizer(*a, schedule=s))
        assert word in message


def check_dgc_refuses_an_optimizer_without_momentum() -> None:
    model = net()
    adam = torch.optim.Adam(model.parameters())
    message = raised(ValueError, lambda: hvdcomp.DistributedOptimizer(adam, model.named_parameters(), "dgc"))
    assert "torch.optim.SGD" in message
    ascending = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=True)  # whose decay has another sign
    message = raised(ValueError, lambda: hvdcomp.DistributedOptimizer(ascending, model.named_parameters(), "dgc"))
    assert "maximize" in message
