"""What travels: how many collectives, under which names, and the same numbers through Horovod's own optimizer.

Two ranks; HOROVOD_TIMELINE is set.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from torch import nn

import hvdcomp
from hvdcomp import compressors
from hvdcomp.schedules import GraVAC, Static
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
    loss_of,
    me,
    net,
    parameters,
    raised,
    residuals,
    wrap,
)

_OPERATIONS = ("allreduce_async", "allreduce_async_", "allgather_async", "alltoall_async", "broadcast_async")


@contextlib.contextmanager
def _watched() -> Iterator[list[tuple[str, str]]]:
    """(kind, name) of every collective that is started through Horovod's public module."""
    seen: list[tuple[str, str]] = []
    with contextlib.ExitStack() as stack:
        for operation in _OPERATIONS:
            original = getattr(hvd, operation)

            def spy(*args: Any, _original: Any = original, _kind: str = operation, **keywords: Any) -> Any:
                seen.append((_kind.split("_")[0], keywords["name"]))
                return _original(*args, **keywords)

            stack.enter_context(mock.patch.object(hvd, operation, spy))
        yield seen


def _layers(count: int = 50) -> dict[str, nn.Parameter]:
    shapes = {f"{n}.weight": (12, 16) for n in range(count)} | {f"{n}.bias": (16,) for n in range(count)}
    return parameters(shapes)


def _counted(compression: Any, **arguments: Any) -> list[Counter[str]]:
    params = _layers()
    optimizer = wrap(params, compression, **arguments)
    counts = []
    for step in range(4):
        optimizer.zero_grad()
        grads = gradients(step, me(), {name: tuple(p.shape) for name, p in params.items()})
        with _watched() as seen:
            give(params, grads)
            optimizer.step()
        counts.append(Counter(kind for kind, _ in seen))
        assert optimizer.last_step.exchanges == len(seen), (optimizer.last_step, seen)
    assert_alike(params.values())
    return counts


def check_powersgd_makes_two_exchanges() -> None:
    """Issue 2, done when 6: every P together, with the dense tensors, then every Q."""
    assert _counted(hvdcomp.PowerSGD(rank=2)) == [Counter(allreduce=2)] * 4


def check_buckets_are_decided_on_apart() -> None:
    """As in the simulation, on all ranks alike, and across a checkpoint."""
    rng = torch.Generator().manual_seed(3)
    spiky = torch.zeros(40, 50).index_put((torch.tensor([1, 7]), torch.tensor([2, 3])), torch.tensor([9.0, -7.0]))
    steps = [{"a": spiky + 1e-3 * torch.randn(40, 50, generator=rng), "b": torch.ones(30, 40)} for _ in range(12)]

    def schedule(exact: bool) -> GraVAC:
        return GraVAC(cf_min=2, cf_max=16, epsilon=0.8, window=2, exact=exact, per="bucket")

    for exact in (True, False):
        now = [0.0]
        chosen, own = schedule(exact), schedule(exact)
        params = parameters({"a": (40, 50), "b": (30, 40)})
        chosen.clock = lambda now=now: now[0]  # type: ignore[misc]
        optimizer = wrap(params, "topk", schedule=chosen, bucket_mb=1e-6)
        simulated = World(2, "topk", schedule=own, bucket_mb=1e-6)
        cfs = []
        for step, grads in enumerate(steps):
            if step == 6:
                state = optimizer.compressor_state_dict()
                assert_alike(p.data for p in params.values())
                again = schedule(exact)
                again.clock = chosen.clock
                optimizer = wrap(params, "topk", schedule=again, bucket_mb=1e-6)
                optimizer.load_compressor_state_dict(state)
            means = simulated.step([grads, grads])[0]
            optimizer.zero_grad()
            give(params, grads)
            optimizer.synchronize()
            assert_close([params[name].grad for name in grads], [means[name] for name in grads])
            cfs.append(optimizer.last_step.cfs)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert len(everyones(cfs)) == 2
        assert everyones(cfs)[0] == everyones(cfs)[1]
        assert cfs[-1][0] == 16  # nearly all of it is two elements
        assert cfs[-1][1] < 2  # dense: halves do not hold .8 of it


def check_plain_steps_take_whatever_a_gradient_is() -> None:
    """Missing on one rank, or laid out otherwise there; a sum; and a bucket that a bfloat16 tensor keeps from it."""
    for op, dtype in itertools.product((hvd.Average, hvd.Sum), (torch.float32, torch.float64, torch.bfloat16)):
        params = parameters()
        params["odd"] = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
        optimizer = wrap(params, "none", op=op)
        for step in range(3):
            optimizer.zero_grad()
            grads = gradients(step, me())
            if me() == 1:
                grads["conv.weight"] = grads["conv.weight"].to(memory_format=torch.channels_last)
            for name, grad in grads.items():
                params[name].grad = grad
            params["odd"].grad = torch.full((3, 5), 2.0, dtype=dtype) if me() == step % 2 else None
            with _watched() as seen:
                optimizer.synchronize()
            travelled = Counter(kind for kind, _ in seen)
            alone = Counter(allreduce=len(params))
            assert (travelled == alone) == (dtype != torch.bfloat16), travelled
            factor = 1 if op == hvd.Average else hvd.size()
            for name in SHAPES:
                both = [gradients(step, rank)[name] for rank in range(hvd.size())]
                assert_close([params[name].grad], [factor * sum(both) / len(both)], rtol=1e-5, atol=1e-6)
            assert_close([params["odd"].grad], [torch.full((3, 5), factor * 2.0 / hvd.size(), dtype=dtype)])
            assert_alike(p.grad for p in params.values())


def check_topk_makes_an_allgather_and_an_allreduce() -> None:
    assert _counted(hvdcomp.TopK(cf=10)) == [Counter(allgather=1, allreduce=1)] * 4
    assert _counted(hvdcomp.TopK(cf=10), exclude=()) == [Counter(allgather=1)] * 4


def check_others_make_one_or_two() -> None:
    assert _counted("none") == [Counter(allreduce=len(_layers()))] * 4  # as plain Horovod: each by itself
    assert _counted(hvdcomp.RandomK(cf=10)) == [Counter(allreduce=1)] * 4
    assert _counted("fp16") == [Counter(allreduce=1)] * 4
    assert _counted(compressors.OkTopK(cf=10), exclude=()) == [Counter(alltoall=1, allgather=1)] * 4
    assert _counted("bf16") == [Counter(alltoall=1, allgather=1)] * 4


def check_decisions_are_counted_apart() -> None:
    schedule = GraVAC(cf_min=2, cf_max=4, epsilon=0.01, window=2)
    assert _counted(hvdcomp.TopK(), schedule=schedule) == [Counter(allgather=1, allreduce=1)] * 4
    params = parameters()
    optimizer = wrap(params, "topk", schedule=GraVAC(cf_min=2, cf_max=4))
    give(params, gradients(0, me()))
    before = optimizer.last_step
    optimizer.step()
    assert before is None
    assert optimizer.last_step.exchanges == 2


def check_a_dense_decision_makes_one_allreduce() -> None:
    schedule = GraVAC(cf_min=8, cf_max=16, epsilon=1.0, window=2)
    assert _counted(hvdcomp.TopK(), schedule=schedule) == [Counter(allreduce=1)] * 4


def check_bytes() -> None:
    params = _layers()
    optimizer = wrap(params, hvdcomp.TopK(cf=10))
    give(params, gradients(0, me(), {name: tuple(p.shape) for name, p in params.items()}))
    with _watched():
        optimizer.step()
    record = optimizer.last_step
    kept, dense = 50 * 19, 50 * 16 * 4
    assert record.bytes_dense == 50 * (12 * 16 + 16) * 4
    assert dense + kept * 5 <= record.bytes_sent <= dense + kept * 8 + 50 * 40 + 64  # an index takes 1 to 4 bytes
    assert record.bytes_received == record.bytes_sent
    assert record.cf == 10


def check_buckets_start_in_the_backward_pass() -> None:
    """From the second step on; and no bucket waits for another one."""
    params = parameters({f"{n}.weight": (16, 16) for n in range(4)})
    optimizer = wrap(params, hvdcomp.TopK(cf=4), bucket_mb=16 * 16 * 4 / 2**20)
    for step in range(2):
        optimizer.zero_grad()
        with _watched() as seen:
            give(params, gradients(step, me(), {name: (16, 16) for name in params}))
            started = len(seen)
            optimizer.step()
        assert (started, len(seen)) == ((0, 4), (4, 4))[step]


# -- names -------------------------------------------------------------------------------------------------------------


def check_names_are_stable_and_few() -> None:
    """Horovod's cache of responses holds 1024."""
    names: set[str] = set()
    for make in (*LOSSY.values(), lambda: hvdcomp.TopK(cf=3)):
        params = _layers(20)
        optimizer = wrap(params, make(), bucket_mb=2e-3)
        of_steps = []
        for step in range(3):
            optimizer.zero_grad()
            with _watched() as seen:
                give(params, gradients(step, me(), {name: tuple(p.shape) for name, p in params.items()}))
                optimizer.step()
            of_steps.append({name for _, name in seen})
            assert len(of_steps[-1]) == len(seen)
        assert of_steps[1] == of_steps[2]
        names |= of_steps[0] | of_steps[2]
    assert all(name.startswith("hvdcomp.") for name in names)
    assert len(names) < 200


def check_the_timeline_shows_readable_names() -> None:
    params = parameters()
    optimizer = wrap(params, hvdcomp.TopK(cf=4))
    label = optimizer._label
    give(params, gradients(0, me()))
    optimizer.step()
    hvd.barrier()
    path = Path(os.environ["HOROVOD_TIMELINE"])
    if me() == 0:
        for _attempt in range(50):
            text = path.read_text() if path.exists() else ""
            if f"{label}.0.0.allgather" in text:
                break
            time.sleep(0.1)
        assert f"{label}.0.0.allgather.uint8" in text
        assert f"{label}.0.0.allreduce.float32" in text


# -- the stock optimizer -----------------------------------------------------------------------------------------------


def _bound_and_ours(make: Any, steps: int = 5, **arguments: Any) -> tuple[Any, Any]:
    bound_model, our_model = net(), net()
    bound = make().bind(bound_model.named_parameters(), op=arguments.get("op"))
    stock = hvd.DistributedOptimizer(
        torch.optim.SGD(bound_model.parameters(), lr=0.05, momentum=0.9),
        bound_model.named_parameters(),
        compression=bound,
        **arguments,
    )
    ours = hvdcomp.DistributedOptimizer(
        torch.optim.SGD(our_model.parameters(), lr=0.05, momentum=0.9),
        our_model.named_parameters(),
        make(),
        granularity="tensor",
        **arguments,
    )
    passes = arguments.get("backward_passes_per_step", 1)
    for step in range(steps):
        for model, optimizer in ((bound_model, stock), (our_model, ours)):
            optimizer.zero_grad()
            for micro in range(passes):
                loss_of(model, 10 * step + micro).backward()
            optimizer.step()
    assert_alike(bound_model.parameters())
    return bound_model, our_model


def _same(make: Any, tolerance: float = 0.0, **arguments: Any) -> None:
    bound_model, our_model = _bound_and_ours(make, **arguments)
    for (name, a), (_, b) in zip(bound_model.named_parameters(), our_model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.equal(our_model[0].weight, net()[0].weight)


def check_bound_topk_is_bitwise_ours() -> None:
    _same(lambda: hvdcomp.TopK(cf=3))


def check_bound_randomk_is_ours() -> None:
    _same(lambda: hvdcomp.RandomK(cf=3), 1e-6)


def check_bound_powersgd_is_ours() -> None:
    _same(lambda: hvdcomp.PowerSGD(rank=1), 1e-5)


def check_bound_casts_are_ours() -> None:
    _same(hvdcomp.FP16, 1e-6)
    _same(hvdcomp.BF16)


def check_bound_none_is_ours() -> None:
    _same(hvdcomp.NoCompression, 1e-6)


def check_bound_with_sums_accumulation_and_groups() -> None:
    _same(lambda: hvdcomp.TopK(cf=3), op=hvd.Sum)
    _same(lambda: hvdcomp.TopK(cf=3), backward_passes_per_step=2)
    _same(lambda: hvdcomp.TopK(cf=3), groups=2)


def check_bound_survives_a_nan() -> None:
    model = net()
    stock = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        compression=hvdcomp.TopK(cf=3).bind(model.named_parameters()),
    )
    loss_of(model, 0).backward()
    stock.step()
    stock.zero_grad()
    (loss_of(model, 1) * (float("nan") if me() else 1.0)).backward()
    stock.synchronize()
    assert all(torch.isnan(p.grad).all() for p in model.parameters())
    stock.zero_grad()
    loss_of(model, 2).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Horovod's, about synchronize() before step()
        stock.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_alike(model.parameters())


def check_bound_with_a_parameter_unused_on_one_rank() -> None:
    params = parameters()
    stock = hvd.DistributedOptimizer(
        torch.optim.SGD(list(params.values()), lr=0.05),
        list(params.items()),
        compression=hvdcomp.TopK(cf=3).bind(params.items()),
    )
    for step in range(3):
        stock.zero_grad()
        grads = gradients(step, me())
        if me() == step % 2:
            del grads["layer.2.weight"]
        give(params, grads)
        stock.step()
    assert_alike(params.values())


def check_bound_errors() -> None:
    params = parameters()
    assert "Adasum" in raised(ValueError, lambda: hvdcomp.TopK(cf=3).bind(params.items(), op=hvd.Adasum))
    bound = hvdcomp.TopK(cf=3).bind(params.items())
    assert "no gradient of the parameters" in raised(ValueError, lambda: bound.compress(torch.zeros(3, 4)))
    assert "bind" in raised(TypeError, lambda: hvdcomp.PowerSGD().compress(torch.zeros(3, 4)))


# -- what we rely on ---------------------------------------------------------------------------------------------------


def check_horovods_surface() -> None:
    """The parts of Horovod 0.28.1 that hvdcomp stands on, public or not; a change of any breaks something silently."""
    from horovod.torch import compression
    from horovod.torch import optimizer as stock

    assert (
        list(inspect.signature(hvd.DistributedOptimizer).parameters)
        == list(inspect.signature(hvdcomp.DistributedOptimizer).parameters)[:10]
    )
    ours = inspect.signature(hvdcomp.DistributedOptimizer).parameters
    assert all(parameter.kind == parameter.KEYWORD_ONLY for parameter in list(ours.values())[10:])
    # broadcast_optimizer_state knows a distributed optimizer by its class's module
    assert type(wrap(parameters(), "none")).__module__ == stock.DistributedOptimizer.__module__
    assert issubclass(hvd.Compression.fp16, compression.Compressor)
    for method in ("synchronize", "skip_synchronize", "set_backward_passes_per_step", "load_state_dict"):
        assert hasattr(stock._DistributedOptimizer, method)
        assert hasattr(type(wrap(parameters(), "none")), method)
    everybody = hvd.global_process_set
    assert (everybody.included(), everybody.size(), everybody.rank()) == (True, hvd.size(), hvd.rank())
    assert list(everybody.ranks or range(hvd.size())) == list(range(hvd.size()))
    assert everybody.process_set_id == 0
    # the stock optimizer hands `p.grad` itself to compress(), and reads the carrier through decompress()
    seen: list[str] = []

    class Spy:
        @staticmethod
        def compress(tensor: Any) -> Any:
            seen.append(next(name for name, p in params.items() if p.grad is tensor))
            return tensor, "context"

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            assert context == "context"
            return tensor

    params = parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(list(params.values()), lr=1.0), list(params.items()), Spy)
    give(params, {name: grad for name, grad in gradients(0, me()).items() if name != "conv.weight"})
    optimizer.step()
    assert sorted(seen) == sorted(SHAPES)


def check_a_compressor_of_horovods_kind() -> None:
    """A third party's ``compress``/``decompress`` goes on working, as object and as class."""

    class Half:
        @staticmethod
        def compress(tensor: Any) -> Any:
            return tensor / 2, tensor.shape

        @staticmethod
        def decompress(tensor: Any, shape: Any) -> Any:
            assert tensor.shape == shape
            return tensor * 2

    plain = parameters()
    reference = wrap(plain, "none")
    for compression in (Half, Half()):
        params = parameters()
        optimizer = wrap(params, compression)
        for own, stepper in ((params, optimizer), (plain, reference)):
            give(own, gradients(0, me()))
            stepper.synchronize()
        assert_equal([p.grad for p in params.values()], [p.grad for p in plain.values()])
        reference.zero_grad()
        assert not residuals(optimizer)


def check_clock_is_the_schedules() -> None:
    ticks = itertools.count()
    params = parameters()
    optimizer = wrap(params, "topk", schedule=GraVAC(clock=lambda: float(next(ticks))))
    with mock.patch("time.perf_counter", side_effect=AssertionError("not the schedule's clock")):
        for step in range(2):
            optimizer.zero_grad()
            give(params, gradients(step, me()))
            optimizer.step()
    assert float(optimizer.last_step.compress_s).is_integer()


def check_untimed_is_left_out() -> None:
    """Evaluation and checkpoints are no part of an iteration's time."""
    now = [0.0]
    seen: list[tuple[float, float]] = []

    class Watching(GraVAC):
        def observe(self, seconds: float, compress_s: float, samples: float = 1.0) -> None:
            seen.append((seconds, samples))

    params = parameters()
    optimizer = wrap(params, "topk", schedule=Watching(clock=lambda: now[0]))
    optimizer.samples = 32
    for step in range(4):
        optimizer.zero_grad()
        now[0] += 1.0
        give(params, gradients(step, me()))
        if step == 2:
            with optimizer.untimed():
                now[0] += 100.0
        optimizer.step()
    assert seen == ([(1.0, 32)] * 3 if me() == 0 else []), seen


def _steps_with_switch(compression: Any, dense_s: float, compressed_s: float, steps: int) -> tuple[Any, dict[str, Any]]:
    """An optimizer with the honest switch after so many steps of these lengths, and the sum of what it applied."""
    now = [0.0]
    params = parameters()
    optimizer = wrap(params, compression, schedule=Static(clock=lambda: now[0]), never_slower=True)
    applied = {name: torch.zeros_like(p) for name, p in params.items()}
    for step in range(steps):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        dense = optimizer.last_step is not None and optimizer._exchange.referee.dense
        now[0] += dense_s if dense else compressed_s
        optimizer.synchronize()
        assert optimizer.last_step.fell_back == dense
        for name, p in params.items():
            applied[name] += p.grad
        assert_alike([p.grad for p in params.values()])
    return optimizer, applied


def check_honest_switch_takes_what_is_faster_and_loses_nothing() -> None:
    for compression in (hvdcomp.TopK(cf=10), hvdcomp.PowerSGD(rank=1)):
        for dense_s, compressed_s, fell_back in ((0.1, 1.0, True), (1.0, 0.1, False)):
            optimizer, applied = _steps_with_switch(compression, dense_s, compressed_s, steps=12)
            assert optimizer.last_step.fell_back == fell_back, optimizer.last_step
            assert optimizer.last_step.cf == 1 if fell_back else optimizer.last_step.cf > 1
            left = residuals(optimizer)
            for name, value in applied.items():
                given = sum(gradients(s, w)[name] for s in range(12) for w in range(hvd.size())) / hvd.size()
                rest = hvd.allreduce(left[name], name=f"rest.{name}") if name in left else torch.zeros_like(value)
                assert_close([value + rest], [given], rtol=1e-4, atol=1e-4)
                if fell_back and name in left:
                    assert not left[name].any(), "a dense step leaves nothing behind"


def check_honest_switch_travels_as_plain_horovod_once_the_residuals_are_empty() -> None:
    optimizer, _ = _steps_with_switch(hvdcomp.TopK(cf=10), 0.1, 1.0, steps=10)
    params = dict(optimizer._parameters)
    optimizer.zero_grad()
    with _watched() as seen:
        give(params, gradients(10, me()))
        optimizer.synchronize()
    assert {kind for kind, _ in seen} == {"allreduce"}, seen
    expected = [sum(gradients(10, w)[n] for w in range(hvd.size())) / hvd.size() for n in params]
    assert_close([p.grad for p in params.values()], expected)


def check_honest_switch_lets_a_nan_travel_as_plain_horovod_does() -> None:
    optimizer, _ = _steps_with_switch(hvdcomp.TopK(cf=10), 0.1, 1.0, steps=10)
    params = dict(optimizer._parameters)
    grads = gradients(10, me())
    if me() == 1:
        next(iter(grads.values())).view(-1)[0] = torch.nan
    optimizer.zero_grad()
    give(params, grads)
    optimizer.synchronize()
    assert optimizer.last_step.fell_back
    assert not optimizer.last_step.skipped
    bad = [int(torch.isnan(p.grad).sum()) for p in params.values()]
    assert sum(bad) == 1, bad


def check_auto_is_top_k_with_the_honest_switch() -> None:
    optimizer = wrap(parameters(), "auto")
    assert optimizer.compression == hvdcomp.TopK(cf=100)  # with two workers; see test_plugin.py
    params = dict(optimizer._parameters)
    give(params, gradients(0, me()))
    optimizer.synchronize()
    assert optimizer._exchange.referee is not None
    assert wrap(parameters(), "topk")._never_slower is False
    assert "momentum of its own" in raised(ValueError, lambda: wrap(parameters(), "dgc", never_slower=True))
    assert "never_slower must be True or False" in raised(ValueError, lambda: wrap(parameters(), never_slower="yes"))
