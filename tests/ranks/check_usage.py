"""What scripts do with ``hvd.DistributedOptimizer`` goes on working: two ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvdcomp
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
    train,
    world,
    wrap,
)


def _mean(step: int, name: str) -> Tensor:
    return sum(gradients(step, worker)[name] for worker in range(hvd.size())) / hvd.size()


def _topk() -> Any:
    return hvdcomp.TopK(cf=5)


# -- accumulation ------------------------------------------------------------------------------------------------------


def check_accumulation_sums_micro_batches_and_never_averages() -> None:
    params = parameters()
    optimizer = wrap(params, _topk(), backward_passes_per_step=3)
    simulated = world(2, _topk())
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            give(params, gradients(10 * step + micro, me()))
        optimizer.synchronize()
        sums = [
            {name: sum(gradients(10 * step + micro, worker)[name] for micro in range(3)) for name in SHAPES}
            for worker in range(2)
        ]
        means = simulated.step(sums)[me()]
        assert_close([p.grad for p in params.values()], [means[name] for name in params])
        assert optimizer.last_step.step == step
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_alike(params.values())


def check_leftover_micro_batch() -> None:
    """An epoch that ends with fewer micro-batches than backward_passes_per_step."""
    for compression in ("none", _topk()):
        params = parameters()
        optimizer = wrap(params, compression, backward_passes_per_step=2)
        expected = world(2, compression) if compression != "none" else World(2, "none")
        for step, micros in enumerate([2, 1, 2, 1]):
            optimizer.zero_grad()
            for micro in range(micros):
                give(params, gradients(10 * step + micro, me()))
            optimizer.synchronize()
            sums = [
                {name: sum(gradients(10 * step + micro, worker)[name] for micro in range(micros)) for name in SHAPES}
                for worker in range(2)
            ]
            means = expected.step(sums)[me()]
            assert_close([p.grad for p in params.values()], [means[name] for name in params])
            with optimizer.skip_synchronize():
                optimizer.step()


def check_leftover_on_one_rank_only() -> None:
    params = parameters()
    optimizer = wrap(params, _topk(), backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2 if me() == 0 else 1):
            give(params, gradients(10 * step + micro, me()))
        optimizer.step()
    assert_alike(params.values())


def check_more_backward_passes_than_announced() -> None:
    params = parameters()
    optimizer = wrap(params, _topk())
    give(params, gradients(0, me()))
    message = raised(AssertionError, lambda: give(params, gradients(1, me())))
    assert "backward_passes_per_step" in message
    optimizer.step()


def check_backward_passes_can_be_changed() -> None:
    params = parameters()
    optimizer = wrap(params, "none")
    optimizer.set_backward_passes_per_step(2)
    give(params, gradients(0, me()))
    give(params, gradients(1, me()))
    optimizer.synchronize()
    for name, param in params.items():
        assert_close([param.grad], [_mean(0, name) + _mean(1, name)])


# -- reductions --------------------------------------------------------------------------------------------------------


def check_sum() -> None:
    for method, make in LOSSY.items():
        summed, averaged = parameters(), parameters()
        a, b = wrap(summed, make(), op=hvd.Sum), wrap(averaged, make(), op=hvd.Average)
        for step in range(2):
            for params, optimizer in ((summed, a), (averaged, b)):
                optimizer.zero_grad()
                give(params, gradients(step, me()))
                optimizer.synchronize()
            for one, other in zip(summed.values(), averaged.values(), strict=True):
                assert torch.equal(one.grad, 2 * other.grad), method
        assert_equal(residuals(a).values(), residuals(b).values())


def check_adasum() -> None:
    message = raised(ValueError, lambda: wrap(parameters(), _topk(), op=hvd.Adasum))
    assert "Adasum" in message
    assert "TopK" in message
    raised(ValueError, lambda: wrap(parameters(), hvd.Compression.fp16, op=hvd.Adasum))
    ours, plain = net(), net()
    for model, make in ((ours, hvdcomp.DistributedOptimizer), (plain, hvd.DistributedOptimizer)):
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(ours.parameters(), plain.parameters())


def check_unknown_op() -> None:
    assert "op must be" in raised(ValueError, lambda: wrap(parameters(), "topk", op=hvd.Max))


def check_gradient_predivide_factor() -> None:
    for method in LOSSY:
        plain, divided = parameters(), parameters()
        a = wrap(plain, LOSSY[method]())
        b = wrap(divided, LOSSY[method](), gradient_predivide_factor=4.0)
        for params, optimizer in ((plain, a), (divided, b)):
            give(params, gradients(0, me()))
            optimizer.synchronize()
        assert_close([p.grad for p in plain.values()], [p.grad for p in divided.values()])
    arguments = {"gradient_predivide_factor": 2.0, "op": hvd.Sum}
    assert "predivide" in raised(ValueError, lambda: wrap(parameters(), "none", **arguments))
    with mock.patch.object(hvd, "allreduce_async_", wraps=hvd.allreduce_async) as spy:
        params = {"only": nn.Parameter(torch.zeros(3))}
        optimizer = wrap(params, "none", gradient_predivide_factor=4.0)
        give(params, {"only": torch.ones(3)})
        optimizer.step()
    assert spy.call_args.kwargs["prescale_factor"] == 0.25
    assert spy.call_args.kwargs["postscale_factor"] == 4.0


def check_halves_are_divided_before_the_sum() -> None:
    """40000 on two ranks is 40000 in float16."""
    for compression in ("fp16", hvd.Compression.fp16):
        params = {"w": nn.Parameter(torch.zeros(2, 2))}
        optimizer = wrap(params, compression)
        give(params, {"w": torch.full((2, 2), 40000.0)})
        optimizer.synchronize()
        assert torch.equal(params["w"].grad, torch.full((2, 2), 40000.0))
    half = {"w": nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))}
    optimizer = wrap(half, "none")
    half["w"].grad = torch.full((2, 2), 40000.0, dtype=torch.float16)
    optimizer.synchronize()
    assert torch.equal(half["w"].grad, torch.full((2, 2), 40000.0, dtype=torch.float16))


# -- buckets -----------------------------------------------------------------------------------------------------------


def _trained(**arguments: Any) -> tuple[dict[str, nn.Parameter], Any]:
    params = parameters()
    groups = arguments.pop("named_groups", None)
    if groups is not None:
        arguments["groups"] = [[params[name] for name in group] for group in groups]
    optimizer = wrap(params, _topk(), **arguments)
    for step in range(3):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.step()
    return params, optimizer


def check_groups_are_buckets() -> None:
    plain, _ = _trained()
    for arguments, buckets in (
        ({"groups": 0}, 1),
        ({"groups": 2}, 2),
        ({"groups": 3}, 3),
        ({"groups": 4}, 4),
        ({"groups": 9}, 4),
        ({"named_groups": [["layer.10.weight", "conv.weight"]]}, 3),
        ({"named_groups": [["layer.10.weight"], [], ["layer.2.bias", "layer.2.weight"]]}, 3),
        ({"bucket_mb": 1e-6}, 4),
    ):
        params, optimizer = _trained(**arguments)
        assert len(optimizer._exchange.buckets) == buckets, arguments
        assert_equal(params.values(), plain.values())


def check_groups_with_a_parameter_unused_on_one_rank() -> None:
    params = parameters()
    optimizer = wrap(params, _topk(), groups=2)
    for step in range(3):
        optimizer.zero_grad()
        grads = gradients(step, me())
        if me() == 1:
            del grads["layer.2.weight"]
        give(params, grads)
        optimizer.step()
    assert_alike(params.values())


def check_groups_that_are_wrong() -> None:
    params = parameters()
    weight = params["conv.weight"]
    assert "only appear once" in raised(ValueError, lambda: wrap(params, groups=[[weight], [weight]]))
    assert "non-negative" in raised(ValueError, lambda: wrap(params, groups="two"))
    assert "torch.Tensor" in raised(ValueError, lambda: wrap(params, groups=[["conv.weight"]]))
    assert "num_groups" in raised(DeprecationWarning, lambda: wrap(params, num_groups=2))


def check_groups_may_hold_what_is_not_optimised() -> None:
    params = parameters()
    elsewhere = nn.Parameter(torch.zeros(3, 3))
    optimizer = wrap(params, _topk(), groups=[[elsewhere, params["conv.weight"]]])
    give(params, gradients(0, me()))
    optimizer.step()
    assert_alike(params.values())


# -- sparse gradients --------------------------------------------------------------------------------------------------


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.table = nn.Embedding(20, 3, sparse=True)
            self.out = nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.out(self.table(words).mean(1))
        return output


def _words(step: int, worker: int) -> Tensor:
    return torch.tensor([[(3 * step + worker) % 20, 4, 7], [4, (step + 2 * worker) % 20, 11]])


def _train_words(model: _Words, optimizer: Any, missing_on: tuple[int, ...] = (), **zero: Any) -> None:
    for step in range(4):
        optimizer.zero_grad(**zero)
        if me() in missing_on and step % 2 == 0:
            model.out(torch.ones(2, 3)).square().sum().backward()
        else:
            model(_words(step, me())).square().sum().backward()
        optimizer.step()


def _dense_words(missing_on: tuple[int, ...] = ()) -> _Words:
    """The right values: dense gradients, averaged by hand."""
    models = [_Words() for _ in range(2)]
    steppers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        model.table.sparse = False
    for step in range(4):
        for worker, model in enumerate(models):
            model.zero_grad()
            if worker in missing_on and step % 2 == 0:
                model.out(torch.ones(2, 3)).square().sum().backward()
            else:
                model(_words(step, worker)).square().sum().backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(torch.zeros_like(p) if p.grad is None else p.grad for p in pair) / 2
            for p in pair:
                p.grad = mean.clone()
        for stepper in steppers:
            stepper.step()
    return models[0]


def check_sparse_gradients() -> None:
    for compression in ("none", hvdcomp.TopK(cf=1)):
        for as_dense in (False, True):
            for missing_on in ((), (1,), (0,)):
                model = _Words()
                base = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = hvdcomp.DistributedOptimizer(
                    base, model.named_parameters(), compression, sparse_as_dense=as_dense
                )
                _train_words(model, optimizer, missing_on)
                assert_alike(model.parameters())
                assert_close(model.parameters(), _dense_words(missing_on).parameters())
                assert model.table.weight.grad.is_sparse or (as_dense and missing_on)


def check_sparse_gradients_stay_sparse_on_the_wire() -> None:
    sent = []
    for sparse in (True, False):
        table = nn.Embedding(5000, 4, sparse=sparse)
        optimizer = wrap({"table": table.weight}, "none")
        table(torch.tensor([1, 2 + me()])).sum().backward()
        optimizer.step()
        sent.append(optimizer.last_step.bytes_sent)
    assert sent[0] < 200, sent
    assert sent[1] == 80000, sent


def check_sparse_adam() -> None:
    tables = {}
    for kind in ("sparse", "by hand"):
        model = _Words()
        base = torch.optim.SparseAdam([model.table.weight], lr=0.01)
        if kind == "sparse":
            optimizer = hvdcomp.DistributedOptimizer(base, [("table", model.table.weight)], "topk")
            for step in range(4):
                optimizer.zero_grad()
                if me() == 1 and step == 2:
                    pass
                else:
                    model(_words(step, me())).square().sum().backward()
                optimizer.step()
            assert_alike([model.table.weight])
        else:
            for step in range(4):
                total = torch.zeros(20, 3)
                for worker in range(2):
                    model.zero_grad()
                    if not (worker == 1 and step == 2):
                        model(_words(step, worker)).square().sum().backward()
                        total += model.table.weight.grad.to_dense()
                rows = torch.cat([_words(step, w).flatten() for w in range(2) if not (w == 1 and step == 2)]).unique()
                model.table.weight.grad = torch.sparse_coo_tensor(
                    rows[None], total[rows] / 2, (20, 3), check_invariants=True
                )
                base.step()
        tables[kind] = model.table.weight.detach()
    assert_close([tables["sparse"]], [tables["by hand"]])


def check_sparse_sum_and_accumulation() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = wrap({"table": table.weight}, "topk", op=hvd.Sum, backward_passes_per_step=2)
    for word in (3, 3 + me()):
        table(torch.tensor([word])).sum().backward()
    optimizer.synchronize()
    expected = torch.zeros(10, 2)
    expected[3], expected[4] = 3, 1
    assert torch.equal(table.weight.grad.to_dense(), expected)


def check_sparse_gradient_with_a_nan() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    optimizer = wrap({"table": table.weight, "w": nn.Parameter(torch.zeros(2, 2))}, "topk", exclude=())
    before = table.weight.detach().clone()
    (table(torch.tensor([3])).sum() * (float("nan") if me() == 1 else 1.0)).backward()
    optimizer.step()
    assert optimizer.last_step.skipped
    assert torch.equal(table.weight, before)
    optimizer.zero_grad()
    table(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert not optimizer.last_step.skipped
    assert torch.isfinite(table.weight).all()
    assert not torch.equal(table.weight, before)


def check_sparse_gradient_that_first_comes_later() -> None:
    for missing_at_first_on in ((0, 1), (1,)):
        model = _Words()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), hvdcomp.TopK(cf=1))
        for step in range(3):
            optimizer.zero_grad()
            if me() in missing_at_first_on and step == 0:
                model.out(torch.ones(2, 3)).square().sum().backward()
            else:
                model(_words(step, me())).square().sum().backward()
            optimizer.step()
        assert_alike(model.parameters())


# -- who takes part ----------------------------------------------------------------------------------------------------


def check_parameter_without_gradient_on_one_rank() -> None:
    for method in LOSSY:
        params = parameters()
        optimizer = wrap(params, LOSSY[method]())
        simulated = world(2, LOSSY[method]())
        for step in range(4):
            optimizer.zero_grad()
            given = [gradients(step, worker) for worker in range(2)]
            for name in ("layer.10.weight", "layer.2.bias"):
                if step != 2:
                    del given[step % 2][name]
            give(params, given[me()])
            optimizer.synchronize()
            means = simulated.step(given)[me()]
            assert_close([p.grad for p in params.values()], [means[name] for name in params])
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_alike(params.values())


def check_parameter_without_gradient_anywhere_gets_zeros() -> None:
    """As Horovod does, so that weight decay acts on it."""
    params = parameters()
    params["conv.weight"].data.fill_(1.0)
    base = torch.optim.SGD(list(params.values()), lr=0.1, weight_decay=0.5)
    optimizer = hvdcomp.DistributedOptimizer(base, list(params.items()), _topk())
    grads = gradients(0, me())
    del grads["conv.weight"]
    give(params, grads)
    optimizer.step()
    assert torch.equal(params["conv.weight"].grad, torch.zeros(SHAPES["conv.weight"]))
    assert_close([params["conv.weight"]], [torch.full(SHAPES["conv.weight"], 0.95)])


def check_step_without_any_backward() -> None:
    params = parameters()
    optimizer = wrap(params, _topk())
    optimizer.step()
    give(params, gradients(0, me()) if me() == 0 else {})
    optimizer.step()
    assert_alike(params.values())
    assert params["conv.weight"].abs().sum() > 0


def check_frozen_parameters() -> None:
    params = parameters()
    params["conv.weight"].requires_grad_(False)
    optimizer = wrap(params, _topk())
    for step in range(2):
        optimizer.zero_grad()
        give(params, {name: grad for name, grad in gradients(step, me()).items() if name != "conv.weight"})
        optimizer.step()
    assert params["conv.weight"].grad is None
    assert "conv.weight" not in residuals(optimizer)
    assert_alike(params.values())


def check_unfrozen_after_wrapping_then_frozen_again() -> None:
    params = parameters()
    frozen = params["conv.weight"].requires_grad_(False)
    optimizer = wrap(params, _topk())
    simulated = world(2, _topk())
    positions = []
    for step in range(6):
        if step == 2:
            frozen.requires_grad_(True)
        if step == 4:
            frozen.requires_grad_(False)
        optimizer.zero_grad()
        names = [name for name in SHAPES if name != "conv.weight" or 2 <= step < 4]
        give(params, {name: gradients(step, me())[name] for name in names})
        optimizer.step()
        positions.append(frozen.detach().clone())
    assert torch.equal(positions[1], torch.zeros(SHAPES["conv.weight"]))
    means = simulated.step([{"conv.weight": gradients(2, worker)["conv.weight"]} for worker in range(2)])[0]
    assert_close([positions[2]], [-0.1 * means["conv.weight"]])
    assert not torch.equal(positions[3], positions[2])
    assert torch.equal(positions[5], positions[3]), "a frozen parameter moved"
    assert_alike(params.values())
    optimizer.check_replicas()


def check_unfrozen_sparse_table() -> None:
    model = _Words()
    model.table.weight.requires_grad_(False)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), hvdcomp.TopK(cf=1))
    for step in range(4):
        model.table.weight.requires_grad_(step >= 2)
        optimizer.zero_grad()
        model(_words(step, me())).square().sum().backward()
        optimizer.step()
    assert_alike(model.parameters())
    assert not torch.equal(model.table.weight, _Words().table.weight)


def check_add_param_group() -> None:
    params = parameters()
    added = nn.Parameter(torch.zeros(4, 6))
    optimizer = wrap(params, _topk())
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [added], "lr": 1.0})
        optimizer.zero_grad()
        grads = gradients(step, me())
        products = [(params[name] * grad).sum() for name, grad in grads.items()]
        if step >= 1:
            products.append((added * (step + me())).sum())
        torch.stack(products).sum().backward()
        optimizer.step()
    assert_alike([*params.values(), added])
    assert added.abs().sum() > 0
    assert optimizer.param_groups[1]["lr"] == 1.0
    state = optimizer.compressor_state_dict()
    assert len(state["residuals"]) == 4


def check_add_param_group_before_the_first_step() -> None:
    params = parameters()
    added = nn.Parameter(torch.zeros(4, 6))
    optimizer = wrap(params, _topk())
    optimizer.add_param_group({"params": [added], "lr": 1.0})
    (added * (1.0 + me())).sum().backward()
    optimizer.step()
    assert_alike([added])
    assert added.abs().sum() > 0


# -- synchronize -------------------------------------------------------------------------------------------------------


def check_clipping() -> None:
    """Exchanged once, the clipped gradient is what the step takes, the residual knows nothing of it."""
    params = parameters()
    optimizer = wrap(params, _topk())
    simulated = world(2, _topk())
    positions = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(3):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(params.values(), 0.5)
        assert norm > 0.5
        with optimizer.skip_synchronize():
            optimizer.step()
        means = simulated.step([gradients(step, worker) for worker in range(2)])[0]
        for name, mean in means.items():
            positions[name] -= 0.1 * mean * 0.5 / (norm + 1e-6)
        for name, residual in residuals(optimizer).items():
            assert torch.equal(residual, simulated.residual(me(), name)), name
    assert_close(params.values(), [positions[name] for name in params])
    assert optimizer.last_step.step == 2


def check_a_step_exchanges_once() -> None:
    """synchronize() twice, and step() without skip_synchronize() after it."""
    once, often = parameters(), parameters()
    a, b = wrap(once, _topk()), wrap(often, _topk())
    for step in range(3):
        for params, optimizer in ((once, a), (often, b)):
            optimizer.zero_grad()
            give(params, gradients(step, me()))
            optimizer.synchronize()
            if optimizer is b:
                optimizer.synchronize()
                optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
    assert_equal(once.values(), often.values())
    assert_equal(residuals(a).values(), residuals(b).values())
    assert (a.last_step.step, a._exchange.step) == (b.last_step.step, b._exchange.step) == (2, 3)


def check_skip_synchronize_ends_with_its_block() -> None:
    params = parameters()
    optimizer = wrap(params, _topk())
    with contextlib.suppress(KeyError), optimizer.skip_synchronize():
        raise KeyError
    give(params, gradients(0, me()))
    optimizer.step()
    assert optimizer.last_step is not None


def check_zero_grad_in_flight() -> None:
    params = parameters()
    optimizer = wrap(params, _topk())
    for step in range(2):
        give(params, gradients(step, me()))
        assert "race condition" in raised(AssertionError, optimizer.zero_grad)
        optimizer.step()
        optimizer.zero_grad()


def check_zero_grad_set_to_none() -> None:
    results = []
    for set_to_none in (True, False):
        params = parameters()
        optimizer = wrap(params, _topk())
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) == (set_to_none or step == 0) for p in params.values())
            give(params, gradients(step, me()))
            optimizer.step()
        results.append(list(params.values()))
    assert_equal(*results)


def check_zero_grad_of_the_model_while_in_flight() -> None:
    """As in Horovod, nobody stops it; our copies must not be what is zeroed."""
    params = parameters()
    optimizer = wrap(params, _topk())
    for step in range(2):
        for param in params.values():
            param.grad = None
        give(params, gradients(step, me()))
        optimizer.step()
    assert_alike(params.values())


def check_gradients_are_not_aliased() -> None:
    """What the user keeps of p.grad, or of the loss's graph, is not changed by later steps of ours."""
    for method in LOSSY:
        params = parameters()
        optimizer = wrap(params, LOSSY[method]())
        kept = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            give(params, gradients(step, me()))
            optimizer.step()
            kept.append([(p.grad, p.grad.clone()) for p in params.values()])
        for one, other in (pair for step in kept for pair in step):
            assert torch.equal(one, other), method
        pointers = [p.grad.untyped_storage().data_ptr() for p in params.values()]
        assert len(set(pointers)) == len(pointers), method
        if LOSSY[method]().error_feedback:
            for part in optimizer._exchange.buckets[0].parts:
                assert part.feedback is None or part.feedback.residual.data_ptr() not in pointers


# -- closures ----------------------------------------------------------------------------------------------------------


def check_sgd_with_a_closure() -> None:
    """Stock Horovod trains silently wrong here: the closure's gradients must be what is exchanged."""
    results = []
    for with_closure in (True, False):
        model = net()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), _topk())
        for step in range(4):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            if with_closure:
                loss = optimizer.step(closure)
                assert isinstance(loss, Tensor)
            else:
                closure()
                optimizer.step()
        assert optimizer.last_step.step == 3
        results.append(list(model.parameters()))
    assert_equal(*results)
    assert_alike(results[0])


def check_lbfgs() -> None:
    """Every evaluation is exchanged, so that all ranks walk alike: the same as LBFGS on both ranks' data together."""
    model, alone = net(dtype=torch.float64), net(dtype=torch.float64)
    # A line search compares losses, which differ between ranks unless the closure averages them.
    optimizer = hvdcomp.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4), model.named_parameters(), "none"
    )
    plain = torch.optim.LBFGS(alone.parameters(), lr=0.2, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    def together() -> Tensor:
        plain.zero_grad()
        loss = (loss_of(alone, 0, 0) + loss_of(alone, 0, 1)) / 2
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        plain.step(together)
    assert_alike(model.parameters())
    assert_close(model.parameters(), alone.parameters(), 1e-9, 1e-9)
    assert optimizer.last_step.step > 5


# -- mixed precision ---------------------------------------------------------------------------------------------------


def _scaled_training(infinite_on: int | None, told: bool, compression: Any, growth: int = 2) -> tuple[Any, ...]:
    """Horovod's documented recipe."""
    params = parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=growth)
    optimizer = wrap(params, compression, grad_scaler=scaler if told else None)
    scales, skipped = [], []
    for step in range(6):
        optimizer.zero_grad()
        grads = gradients(step, me())
        if step == 3 and me() == infinite_on:
            grads["layer.10.weight"][0, 1] = float("inf")
        loss = torch.stack([(params[name] * grad).sum() for name, grad in grads.items()]).sum()
        before = [p.detach().clone() for p in params.values()]
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params.values(), 100.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        skipped.append(all(torch.equal(a, b) for a, b in zip(before, params.values(), strict=True)))
    return params, optimizer, scales, skipped


def check_grad_scaler() -> None:
    """An Inf on one rank makes every scaler back off, and training goes on."""
    for method, make in LOSSY.items():
        for rank in (0, 1):
            params, optimizer, scales, skipped = _scaled_training(rank, method in ("topk", "powersgd"), make())
            assert skipped == [False, False, False, True, False, False], (method, skipped)
            assert scales == [256, 512, 512, 256, 256, 512], (method, scales)
            assert everyones(scales)[0] == everyones(scales)[1]
            assert all(torch.isfinite(p).all() for p in params.values())
            assert_alike(params.values())
            assert all(torch.isfinite(r).all() for r in residuals(optimizer).values())


def check_residuals_are_kept_without_the_scale() -> None:
    """A scale that changes between steps must not rescale what was not sent: as exact as without a scaler."""
    for make in (_topk, LOSSY["powersgd"], LOSSY["randomk"]):
        scaled, optimizer, scales, _ = _scaled_training(None, told=True, compression=make(), growth=1)
        assert scales[-1] == 256 * 2**6
        plain = parameters()
        reference = wrap(plain, make())
        for step in range(6):
            reference.zero_grad()
            give(plain, gradients(step, me()))
            reference.step()
        assert_close(scaled.values(), plain.values(), 1e-4, 1e-5)
        assert_close(residuals(optimizer).values(), residuals(reference).values(), 1e-4, 1e-5)


def check_disabled_grad_scaler() -> None:
    params = parameters()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = wrap(params, _topk(), grad_scaler=scaler)
    give(params, gradients(0, me()))
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert_alike(params.values())


def check_grad_scaler_with_fused_adam() -> None:
    """A fused optimizer unscales by itself."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    base = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), _topk(), grad_scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert_alike(model.parameters())
    assert not torch.equal(model[0].weight, net()[0].weight)


# -- optimizers and schedulers -----------------------------------------------------------------------------------------


def check_lr_scheduler_made_after_wrapping() -> None:
    params = parameters()
    optimizer = wrap(params, "none", lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        give(params, {"layer.2.bias": torch.ones(12)})
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (step + 1)
    assert_close([params["layer.2.bias"]], [torch.full((12,), -1.75)])


def check_lr_scheduler_made_before_wrapping() -> None:
    params = parameters()
    base = torch.optim.SGD(list(params.values()), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
    optimizer = hvdcomp.DistributedOptimizer(base, list(params.items()), "none")
    for _ in range(3):
        optimizer.zero_grad()
        give(params, {"layer.2.bias": torch.ones(12)})
        optimizer.step()
        scheduler.step()
    assert_close([params["layer.2.bias"]], [torch.full((12,), -1.75)])


def check_lr_scheduler_made_before_wrapping_goes_on_after_loading() -> None:
    params = parameters()
    base = torch.optim.SGD(list(params.values()), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
    optimizer = hvdcomp.DistributedOptimizer(base, list(params.items()), "none")
    optimizer.load_state_dict(optimizer.state_dict())
    give(params, {"layer.2.bias": torch.ones(12)})
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def check_state_dict_is_torchs() -> None:
    model, other = net(), net()
    base = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), _topk())
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())  # torch's load_state_dict shares tensors
    assert set(saved) == {"state", "param_groups"}
    plain = torch.optim.Adam(other.parameters(), lr=1.0)
    plain.load_state_dict(copy.deepcopy(saved))
    assert plain.param_groups[0]["lr"] == 0.01
    assert float(plain.state[other[0].weight]["step"]) == 3
    again = hvdcomp.DistributedOptimizer(
        torch.optim.Adam(other.parameters(), lr=1.0), other.named_parameters(), _topk()
    )
    again.load_state_dict(saved)
    again.load_compressor_state_dict(optimizer.compressor_state_dict())
    other.load_state_dict(model.state_dict())
    train(model, optimizer, 2, first=3)
    train(other, again, 2, first=3)
    assert_equal(model.parameters(), other.parameters())


def check_broadcasts() -> None:
    for make, attribute in (
        (lambda p: torch.optim.SGD(p, lr=0.1 * (1 + me()), momentum=0.9), "momentum_buffer"),
        (lambda p: torch.optim.Adam(p, lr=0.01 * (1 + me())), "exp_avg"),
    ):
        for already in (0, 2):
            model = net(seed=me())
            optimizer = hvdcomp.DistributedOptimizer(make(model.parameters()), model.named_parameters(), _topk())
            train(model, optimizer, already)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert everyones(optimizer.param_groups[0]["lr"])[1] == optimizer.param_groups[0]["lr"]
            assert_alike(model.parameters())
            if not already:
                assert_equal([model[0].weight], [net(seed=0)[0].weight])
            assert optimizer.last_step is None or optimizer.last_step.step == already - 1
            train(model, optimizer, 3)
            assert_alike(model.parameters())
            assert_alike(optimizer.state[p][attribute] for p in model.parameters())


def check_two_optimizers_and_a_metric() -> None:
    """Independent of each other, and the script's own allreduce is exact."""
    together = [parameters(), parameters()]
    optimizers = [wrap(params, _topk()) for params in together]
    for step in range(3):
        for number, (params, optimizer) in enumerate(zip(together, optimizers, strict=True)):
            optimizer.zero_grad()
            give(params, gradients(step + 100 * number, me()))
        loss = hvd.allreduce(torch.tensor([1.0 + 2 * me(), 0.1]), name="loss")
        assert_close([loss], [torch.tensor([2.0, 0.1])], 1e-7, 0)
        unnamed = hvd.allreduce(torch.tensor(3.0 + me()))
        assert float(unnamed) == 3.5
        for optimizer in optimizers[:: 1 if step % 2 else -1]:
            optimizer.step()
    for number, params in enumerate(together):
        alone = parameters()
        optimizer = wrap(alone, _topk())
        for step in range(3):
            optimizer.zero_grad()
            give(alone, gradients(step + 100 * number, me()))
            optimizer.step()
        assert_equal(alone.values(), params.values())
        assert_equal(residuals(optimizer).values(), residuals(optimizers[number]).values())


def check_two_adaptive_optimizers() -> None:
    from hvdcomp.schedules import GraVAC

    together = [parameters(), parameters()]
    optimizers = [
        wrap(params, _topk(), schedule=GraVAC(cf_min=2 + n, cf_max=9, window=2, epsilon=0.2))
        for n, params in enumerate(together)
    ]
    for step in range(5):
        for params, optimizer in zip(together, optimizers, strict=True):
            optimizer.zero_grad()
            give(params, gradients(step, me()))
        for optimizer in optimizers[::-1]:
            optimizer.step()
    for params in together:
        assert_alike(params.values())


def check_what_the_base_optimizer_learned_is_kept() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), amsgrad=True),
    ):
        model, plain = net(), net()
        base, other = make(model.parameters()), make(plain.parameters())
        for own, stepper in ((model, base), (plain, other)):
            for step in range(3):
                stepper.zero_grad()
                loss_of(own, step, worker=0).backward()
                stepper.step()
            own.zero_grad()
        optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), "none")
        assert optimizer.defaults == other.defaults
        for (a, left), (b, right) in zip(optimizer.state.items(), other.state.items(), strict=True):
            assert torch.equal(a, b)
            assert left.keys() == right.keys()
        optimizer.zero_grad()
        loss_of(model, 3, worker=0).backward()
        optimizer.step()
        loss_of(plain, 3, worker=0).backward()
        other.step()
        assert_close(model.parameters(), plain.parameters(), 1e-6, 1e-7)


def check_step_hooks_fire_once_and_see_the_exchanged_gradient() -> None:
    params = parameters()
    base = torch.optim.SGD(list(params.values()), lr=0.1)
    seen: list[Tensor] = []
    calls: list[str] = []
    base.register_step_pre_hook(lambda *_: seen.append(params["layer.2.bias"].grad.clone()))
    optimizer = hvdcomp.DistributedOptimizer(base, list(params.items()), _topk())
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(2):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.step()
    assert calls == ["pre", "post"] * 2, calls
    assert_close(seen, [_mean(0, "layer.2.bias"), _mean(1, "layer.2.bias")])


def check_class() -> None:
    params = parameters()
    optimizer = wrap(params, _topk())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert repr(optimizer).startswith("SGD")
    calls = []

    class Counted(type(optimizer)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            return super().step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

    optimizer.__class__ = Counted
    for step in range(2):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.step()
    assert calls == [1, 1]
    assert_alike(params.values())
    assert optimizer.last_step.step == 1


def check_named_parameters() -> None:
    params = parameters()
    base = torch.optim.SGD(list(params.values()), lr=0.1)
    make = hvdcomp.DistributedOptimizer
    assert "unique" in raised(ValueError, lambda: make(base, [("a", p) for p in params.values()], "topk"))
    assert "tuples" in raised(ValueError, lambda: make(base, list(params.values()), "topk"))
    assert "not named" in raised(ValueError, lambda: make(base, list(params.items())[1:], "topk"))
    unnamed = make(base, None, "topk")
    give(params, gradients(0, me()))
    unnamed.step()
    assert_alike(params.values())


def check_named_parameters_in_another_order_on_each_rank() -> None:
    results = []
    for shuffled in (False, True):
        for method in ("topk", "randomk", "powersgd", "none"):
            params = parameters()
            order = list(params.items())
            if shuffled and me() == 1:
                order = order[::-1]
            base = torch.optim.SGD(set(params.values()) if shuffled else params.values(), lr=0.1)
            optimizer = hvdcomp.DistributedOptimizer(base, order, LOSSY[method](), bucket_mb=3e-4)
            for step in range(3):
                optimizer.zero_grad()
                give(params, dict(list(gradients(step, me()).items())[:: -1 if shuffled and me() else 1]))
                optimizer.step()
            assert_alike(params.values())
            results.append([p.detach() for p in params.values()])
    for straight, turned in zip(results[:4], results[4:], strict=True):
        assert_equal(straight, turned)


def check_tied_weights_under_two_names() -> None:
    """``named_parameters(remove_duplicate=False)``, in another order on each rank."""
    shared = nn.Parameter(torch.zeros(4, 5))
    names = ["decoder.weight", "encoder.weight"][:: 1 if me() else -1]
    optimizer = hvdcomp.DistributedOptimizer(
        torch.optim.SGD([shared], lr=0.1), [(name, shared) for name in names], _topk()
    )
    for step in range(2):
        optimizer.zero_grad()
        (shared * (1.0 + me())).sum().add((shared.t() * step).sum()).backward()
        optimizer.step()
    assert_alike([shared])


# -- forms of parameters -----------------------------------------------------------------------------------------------


def check_channels_last() -> None:
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        for method in LOSSY:
            model = net().to(memory_format=form)
            base = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), LOSSY[method]())
            for step in range(3):
                optimizer.zero_grad()
                data = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(step + 10 * me()))
                model(data.to(memory_format=form)).square().mean().backward()
                optimizer.step()
            if form == torch.channels_last and method == "topk":
                assert model[0].weight.is_contiguous(memory_format=form)
            assert_alike(model.parameters())
            results.append([p.detach().contiguous() for p in model.parameters()])
    for plain, last in zip(results[: len(LOSSY)], results[len(LOSSY) :], strict=True):
        assert_close(plain, last, 1e-3, 1e-4)


def check_types_of_parameters() -> None:
    """bfloat16, float16, float64 and all in one model, with and without feedback."""
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.float32)
    makers = {
        **LOSSY,
        "topk alone": lambda: hvdcomp.TopK(cf=5, error_feedback=False),
        "randomk alone": lambda: hvdcomp.RandomK(cf=5, error_feedback=False),
        "powersgd alone": lambda: hvdcomp.PowerSGD(rank=1, error_feedback=False),
    }
    for method, make in makers.items():
        for exclude in (None, ()):
            params = {
                f"{number}.{name}": nn.Parameter(torch.zeros(shape, dtype=dtype))
                for number, dtype in enumerate(kinds)
                for name, shape in SHAPES.items()
            }
            optimizer = wrap(params, make(), exclude=exclude)
            for step in range(2):
                optimizer.zero_grad()
                grads = gradients(step, me())
                give(params, {name: grads[name.split(".", 1)[1]] for name in params})
                optimizer.step()
            for name, param in params.items():
                assert param.grad.dtype == param.dtype
                assert torch.isfinite(param).all()
                assert param.abs().sum() > 0, (method, name)
            assert_alike(params.values())
            if method in ("none", "topk", "topk alone"):  # the others draw something for each name
                for name in SHAPES:
                    double, single = (params[f"{number}.{name}"].double() for number in (2, 3))
                    assert_close([double], [single])


def check_biases_only() -> None:
    for method in LOSSY:
        params = {"a.bias": nn.Parameter(torch.zeros(5)), "b.bias": nn.Parameter(torch.zeros(3))}
        optimizer = wrap(params, LOSSY[method]())
        give(params, {"a.bias": torch.full((5,), 1.0 + me()), "b.bias": torch.full((3,), 2.0)})
        optimizer.step()
        assert_close(params.values(), [torch.full((5,), -0.15), torch.full((3,), -0.2)], 1e-2, 1e-3)
        assert_alike(params.values())


def check_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.encoder, self.decoder = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
            self.decoder.weight = nn.Parameter(self.encoder.weight.t().contiguous())
            self.again = nn.Linear(4, 6, bias=False)
            self.again.weight = self.encoder.weight

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.again(self.decoder(self.encoder(x)))
            return output

    for method in LOSSY:
        model = Tied()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdcomp.DistributedOptimizer(base, model.named_parameters(), LOSSY[method]())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + me())).square().mean().backward()
            optimizer.step()
        assert_alike(model.parameters())


def check_odd_shapes() -> None:
    """0-dimensional, one-element and empty parameters, compressed or not; a zero gradient; one that is constant."""
    shapes = {"dot": (), "one": (1,), "empty": (0, 3), "row": (1, 7), "matrix": (4, 4)}
    for method in LOSSY:
        for exclude in (None, ()):
            params = parameters(shapes)
            optimizer = wrap(params, LOSSY[method](), exclude=exclude)
            for factor in (0.0, 1.0):
                optimizer.zero_grad()
                give(params, {name: torch.full(shape, factor * (1 + me())) for name, shape in shapes.items()})
                optimizer.step()
                for param in params.values():
                    assert torch.isfinite(param).all(), method
            assert_close([params["dot"]], [torch.tensor(-0.15)], 1e-2, 1e-3)
            assert_alike(params.values())


def check_an_empty_parameter_alone() -> None:
    for method in LOSSY:
        params = parameters({"empty": (0, 3), "full": (2, 2)})
        optimizer = wrap(params, LOSSY[method](), bucket_mb=1e-7, exclude=())
        give(params, {"empty": torch.zeros(0, 3), "full": torch.ones(2, 2)})
        optimizer.step()
        assert_alike(params.values())


# -- switches ----------------------------------------------------------------------------------------------------------


def check_switched_off() -> None:
    with mock.patch.dict(os.environ, HVDCOMP_DISABLE="1"):
        for compression in (_topk(), "topk", "none", hvd.Compression.fp16, hvdcomp.PowerSGD):
            params = parameters()
            optimizer = wrap(params, compression)
            assert hasattr(optimizer, "_handles")
            optimizer.load_compressor_state_dict(optimizer.compressor_state_dict())
            with optimizer.untimed():
                optimizer.check_replicas()
            give(params, gradients(0, me()))
            optimizer.step()
            assert optimizer.last_step is None
            loose = compression is hvd.Compression.fp16
            assert_close([params["conv.weight"]], [-0.1 * _mean(0, "conv.weight")], *((1e-2, 1e-2) if loose else ()))
    with mock.patch.dict(os.environ, HVDCOMP_DISABLE="0"):
        assert not hasattr(wrap(parameters(), _topk()), "_handles")


def check_an_optimizer_that_is_distributed_already_is_refused() -> None:
    params = parameters()
    for optimizer in (wrap(params, _topk()), hvd.DistributedOptimizer(torch.optim.SGD(params.values(), lr=0.1))):
        message = raised(ValueError, lambda optimizer=optimizer: hvdcomp.DistributedOptimizer(optimizer))
        assert "distributed already" in message


def check_arguments_that_would_fail_later_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"backward_passes_per_step": 1.5},
        {"gradient_predivide_factor": 0},
        {"gradient_predivide_factor": float("nan")},
        {"grad_scaler": 3},
        {"exclude": [3]},
        {"bucket_mb": "x"},
    ]
    for arguments in wrong:
        base = torch.optim.SGD(parameters().values(), lr=0.1)
        message = raised(ValueError, lambda base=base, a=arguments: hvdcomp.DistributedOptimizer(base, **a))
        assert next(iter(arguments)) in message, message


def check_elastic_mode_is_refused() -> None:
    with mock.patch.dict(os.environ, HOROVOD_ELASTIC="1"):
        message = raised(RuntimeError, lambda: wrap(parameters(), _topk()))
    assert "elastic" in message
    assert "HVDCOMP_DISABLE" in message


def check_join_is_refused_while_a_compressing_optimizer_lives() -> None:
    gc.collect()
    optimizer = wrap(parameters(), _topk())
    message = raised(RuntimeError, hvd.join)
    assert "hvd.join" in message
    del optimizer
    gc.collect()
    wrap(parameters(), "none")
    assert hvd.join() in (0, 1)


def check_constructions_that_do_not_fit() -> None:
    """An error at construction that says what is allowed."""
    from hvdcomp.schedules import GraVAC

    params = parameters()
    for arguments, words in (
        ({"compression": "topp"}, ["topk"]),
        ({"compression": 3}, ["Horovod's", "3"]),
        ({"compression": hvdcomp.TopK}, ["compression must be"]),
        ({"compression": hvdcomp.TopK(cf=2).bind(params.items())}, ["bind()"]),
        ({"compression": "powersgd", "granularity": "bucket"}, ["powersgd", "granularity"]),
        ({"compression": "topk", "granularity": "layer"}, ["granularity", "tensor"]),
        ({"compression": "topk", "bucket_mb": 0}, ["bucket_mb"]),
        ({"compression": "topk", "exclude": "*.bias"}, ["exclude"]),
        ({"compression": "qsgd", "schedule": GraVAC()}, ["gravac", "qsgd"]),
        ({"compression": "none", "schedule": GraVAC()}, ["gravac", "none"]),
        ({"compression": "none", "schedule": hvdcomp.schedules.Static(cf=10)}, ["static", "none"]),
        ({"compression": "topk", "schedule": "gravacc"}, ["gravac"]),
        ({"compression": "topk", "schedule": 100}, ["schedule"]),
        ({"compression": "topk", "backward_passes_per_step": 0}, ["backward_passes_per_step"]),
    ):
        message = raised(ValueError, lambda arguments=arguments: wrap(params, **arguments))
        assert all(word in message for word in words), message
    assert "cf must be" in raised(ValueError, lambda: hvdcomp.TopK(cf=0.5))


def check_static_schedule_gives_the_factor() -> None:
    a, b = parameters(), parameters()
    one = wrap(a, hvdcomp.TopK(cf=100), schedule=hvdcomp.schedules.Static(cf=5))
    other = wrap(b, hvdcomp.TopK(cf=5))
    for params, optimizer in ((a, one), (b, other)):
        give(params, gradients(0, me()))
        optimizer.step()
    assert_equal(a.values(), b.values())
    assert one.last_step.cf == 5


def check_memory_of_residuals_is_logged_once_by_rank_0() -> None:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hvdcomp")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        params = {"w": nn.Parameter(torch.zeros(512, 512))}
        optimizer = wrap(params, _topk())
        for _ in range(2):
            give(params, {"w": torch.ones(512, 512)})
            optimizer.step()
            optimizer.zero_grad()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert optimizer.residual_nbytes == 2**20
    assert len([text for text in records if "1.0 MiB" in text]) == (1 if me() == 0 else 0), records
