"""Dense inside a node, compressed between nodes: four ranks on two nodes.

Where the launcher started all on one machine, a check pretends that there are two: ranks 0 and 2 on the one, 1 and 3 on
the other, so that a node's ranks are no neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from scripted import Scripted
from torch import Tensor, nn

import hvdcomp
from hvdcomp.schedules import GraVAC, Static
from ranks.tools import (
    LOSSY,
    SHAPES,
    assert_alike,
    assert_close,
    digest,
    everyones,
    give,
    gradients,
    me,
    parameters,
    raised,
    world,
    wrap,
)

ROUND_ROBIN = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}
"""Rank -> its node and its place there, as the checks pretend."""


@contextlib.contextmanager
def _topology(places: dict[int, tuple[int, int]]) -> Iterator[None]:
    node, place = places[me()]
    with (
        mock.patch.object(hvd, "cross_rank", return_value=node),
        mock.patch.object(hvd, "local_rank", return_value=place),
    ):
        yield


def _wrap(params: dict[str, nn.Parameter], compression: Any, **arguments: Any) -> Any:
    """Our optimizer over nodes: those that the launcher made, or two that are pretended."""
    real = {rank: place for rank, place in enumerate(everyones((hvd.cross_rank(), hvd.local_rank())))}
    several = len({node for node, _ in real.values()}) > 1
    with _topology(real if several else ROUND_ROBIN):
        return wrap(params, compression, **{"hierarchical": True, **arguments})


def _ranks_of_nodes(optimizer: Any) -> list[list[int]]:
    return [ranks for ranks in sorted(map(list, set(map(tuple, everyones(optimizer._nodes.inside.ranks)))))]


def _node_means(step: int, nodes: list[list[int]]) -> list[dict[str, Tensor]]:
    return [
        {name: sum(gradients(step, rank)[name] for rank in ranks) / len(ranks) for name in SHAPES} for ranks in nodes
    ]


def _leads(optimizer: Any) -> bool:
    return me() in optimizer._nodes.leaders.ranks


def _step(params: dict[str, nn.Parameter], optimizer: Any, grads: dict[str, Tensor]) -> None:
    optimizer.zero_grad()
    give(params, grads)
    optimizer.step()


def check_equals_a_world_of_nodes() -> dict[str, Any]:
    """The means of the nodes' gradients are what a world of as many workers as nodes exchanges."""
    nodes: list[list[int]] = []
    for method, make in LOSSY.items():
        params = parameters()
        optimizer = _wrap(params, make())
        nodes = _ranks_of_nodes(optimizer)
        assert [len(ranks) for ranks in nodes] == [2, 2]
        simulated = world(2, make())
        for step in range(4):
            optimizer.zero_grad()
            give(params, gradients(step, me()))
            optimizer.synchronize()
            means = simulated.step(_node_means(step, nodes))[0]
            loose = method in ("fp16", "bf16", "powersgd")  # halves may round to a neighbour
            tolerance = {"rtol": 1e-2, "atol": 1e-2} if loose else {}
            assert_close([p.grad for p in params.values()], [means[name] for name in params], **tolerance)
            assert_alike(p.grad for p in params.values())
            record = optimizer.last_step
            assert record.step == step
            assert (record.bytes_sent > 0) == _leads(optimizer)
            assert me() != 0 or record.bytes_sent == simulated.nbytes
            assert record.bytes_dense == 4 * sum(p.numel() for p in params.values())
            cf = record.cf if make().has_levels else None  # else that of this node's bytes
            assert len(set(everyones((cf, record.level, record.skipped)))) == 1
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_alike(params.values())
        kept = optimizer.residual_nbytes
        assert (kept > 0) == (_leads(optimizer) and make().error_feedback)
    return {"nodes": nodes}


def check_means_stay_in_place_and_large_tensors_travel_by_themselves() -> None:
    shapes = {"a": (300, 300), "b": (300, 300), "c": (5,)}
    params = parameters(shapes)
    optimizer = _wrap(params, "none")
    for step in range(2):
        optimizer.zero_grad()
        give(params, gradients(step, me(), shapes))
        before = {name: p.grad.data_ptr() for name, p in params.items()}
        optimizer.synchronize()
        expected = [sum(gradients(step, rank, shapes)[name] for rank in range(4)) / 4 for name in shapes]
        assert_close([p.grad for p in params.values()], expected)
        assert before == {name: p.grad.data_ptr() for name, p in params.items()}
        assert_alike(p.grad for p in params.values())


def check_a_nan_anywhere_skips_everywhere() -> None:
    for method in ("topk", "powersgd", "bf16"):
        params = parameters()
        optimizer = _wrap(params, LOSSY[method]())
        _step(params, optimizer, gradients(0, me()))
        for culprit, bad in itertools.product(range(4), (float("nan"), float("inf"))):
            before, state = digest(params.values()), optimizer.compressor_state_dict().get("residuals", {})
            grads = gradients(1, me())
            if me() == culprit:
                grads["conv.weight"][0, 0, 0, 0] = bad
            optimizer.zero_grad()
            give(params, grads)
            optimizer.synchronize()
            assert everyones(optimizer.last_step.skipped) == [True] * 4
            assert all(p.grad.isnan().all() for p in params.values())
            optimizer.step()
            assert digest(params.values()) == before
            after = optimizer.compressor_state_dict().get("residuals", {})
            assert_close(after.values(), state.values(), atol=1e-5)
        _step(params, optimizer, gradients(2, me()))
        assert everyones((optimizer.last_step.skipped, optimizer.last_step.step)) == [(False, 9)] * 4
        assert_alike(params.values())


def check_sums_and_accumulation_and_clipping() -> None:
    params = parameters()
    optimizer = _wrap(params, hvdcomp.TopK(cf=1), op=hvd.Sum, backward_passes_per_step=2)
    for first in (0, 2):
        optimizer.zero_grad()
        for step in (first, first + 1):
            give(params, gradients(step, me()))
        optimizer.synchronize()
        expected = [sum(gradients(s, r)[name] for s in (first, first + 1) for r in range(4)) for name in params]
        assert_close([p.grad for p in params.values()], expected, rtol=1e-4, atol=1e-5)
        torch.nn.utils.clip_grad_norm_(params.values(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_alike(params.values())


def check_momentum_and_weight_decay_of_the_compressor() -> None:
    """DGC accumulates gradient + decay, which is added once, to the node's mean."""

    def train(wrapped: Any, params: dict[str, nn.Parameter], grads: Any) -> None:
        for step in range(3):
            _step(params, wrapped, grads(step))

    def made() -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(torch.full(shape, 0.5)) for name, shape in SHAPES.items()}

    def sgd(params: dict[str, nn.Parameter]) -> Any:
        return torch.optim.SGD(params.values(), lr=0.1, momentum=0.9, weight_decay=0.1)

    method = hvdcomp.compressors.create("dgc", cf=1)
    params, flat = made(), made()
    with _topology(ROUND_ROBIN):
        nodes = hvdcomp.DistributedOptimizer(sgd(params), params.items(), method, hierarchical=True)
    train(nodes, params, lambda step: gradients(step, me()))
    train(hvdcomp.DistributedOptimizer(sgd(flat), flat.items(), method), flat, lambda step: gradients(step, me()))
    assert_close(params.values(), flat.values(), rtol=1e-4, atol=1e-5)


def check_gradients_in_another_order_on_every_rank() -> None:
    """Every tensor is a bucket, and hooks start them without waiting."""
    params = parameters()
    optimizer = _wrap(params, hvdcomp.TopK(cf=1), bucket_mb=1e-9)
    for step in range(3):
        names = sorted(SHAPES)
        names = names[me() :] + names[: me()]
        optimizer.zero_grad()
        own = gradients(step, me())
        give(params, {name: own[name] for name in names})
        assert len(optimizer._exchange._started) == 4 if step else optimizer._exchange is None
        optimizer.synchronize()
        expected = [sum(gradients(step, rank)[name] for rank in range(4)) / 4 for name in params]
        assert_close([p.grad for p in params.values()], expected)


def check_missing_gradients_and_parameters_added_later() -> None:
    params = parameters()
    optimizer = _wrap(params, LOSSY["topk"]())
    some = {name: grad for name, grad in gradients(0, me()).items() if me() != 3 or "layer" not in name}
    _step(params, optimizer, some)
    later = nn.Parameter(torch.zeros(4, 6))
    optimizer.add_param_group({"params": [later]})
    for step in (1, 2):
        _step(params | {"later": later}, optimizer, gradients(step, me(), {**SHAPES, "later": (4, 6)}))
    assert later.any()
    assert_alike([*params.values(), later])


def check_types() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        for method in ("none", "topk"):
            params = parameters(dtype=dtype)
            optimizer = _wrap(params, hvdcomp.TopK(cf=1) if method == "topk" else method)
            optimizer.zero_grad()
            give(params, gradients(0, me()))
            optimizer.synchronize()
            expected = [(sum(gradients(0, rank)[name] for rank in range(4)) / 4).to(dtype) for name in params]
            tolerance = 1e-6 if dtype == torch.float64 else 2e-2
            assert_close([p.grad for p in params.values()], expected, rtol=tolerance, atol=tolerance)
            assert_alike(p.grad for p in params.values())


def check_sparse_gradients() -> None:
    table = nn.Parameter(torch.zeros(9, 3))
    optimizer = _wrap({"table": table}, "none")
    nn.functional.embedding(torch.tensor([me(), 5]), table, sparse=True).sum().backward()
    assert "'table' is sparse" in raised(ValueError, optimizer.synchronize)
    table.grad = None
    optimizer = _wrap({"table": table}, "none", sparse_as_dense=True)
    nn.functional.embedding(torch.tensor([me(), 5]), table, sparse=True).sum().backward()
    optimizer.synchronize()
    assert_close([table.grad.to_dense()[:, 0]], [torch.tensor([1, 1, 1, 1, 0, 4.0, 0, 0, 0]) / 4])


def check_an_adaptive_schedule() -> None:
    """Leaders decide; the other workers hear what was decided."""

    def schedule() -> GraVAC:
        return GraVAC(cf_min=2, cf_max=16, epsilon=0.3, window=2, clock=itertools.count().__next__)

    params = parameters()
    optimizer = _wrap(params, "topk", schedule=schedule())
    nodes = _ranks_of_nodes(optimizer)
    simulated = world(2, hvdcomp.TopK(), schedule=schedule())
    sent = set()
    for step in range(6):
        _step(params, optimizer, gradients(step, me()))
        simulated.step(_node_means(step, nodes))
        assert optimizer.last_step.cf == simulated.decision.cf
        assert optimizer.last_step.level == simulated.decision.level
        sent.add(optimizer.last_step.cf)
    assert len(sent) > 1
    assert_alike(params.values())


def check_a_schedule_that_assigns() -> None:
    """By leaders, whose gradients are their nodes' means; also where some steps are dense between all workers."""
    settings = [{"cf": 4}, {"name": "powersgd", "rank": 1}, {"name": "none"}]
    for never_slower in (False, True):
        params = parameters()
        schedules = [Scripted(settings, {0: [0, 1, 2], 2: 2, 4: 1, 6: 0}, phase=3) for _ in range(2)]
        optimizer = _wrap(params, "topk", lr=1.0, schedule=schedules[0], never_slower=never_slower)
        nodes = _ranks_of_nodes(optimizer)
        simulated = world(2, hvdcomp.TopK(), schedule=schedules[1])
        applied = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(9):
            _step(params, optimizer, gradients(step, me()))
            means = simulated.step(_node_means(step, nodes))[0]
            for name, mean in means.items():
                applied[name] -= mean
        assert_alike(params.values())
        if not never_slower:
            assert_close(params.values(), applied.values(), atol=1e-5)
            if me() == 0:
                for left, right in zip(schedules[0].seen, schedules[1].seen, strict=True):
                    assert len(left.sums) == len(right.sums)
                    for mine, other in zip(left.sums, right.sums, strict=True):
                        assert abs(mine.norm - other.norm) < 1e-4


def check_a_fault_between_nodes_is_raised_everywhere() -> None:
    schedule = GraVAC(cf_min=2, cf_max=16, window=2)
    params = parameters()
    optimizer = _wrap(params, "topk", schedule=schedule)
    give(params, gradients(0, me()))
    with mock.patch.object(schedule, "decide", side_effect=ZeroDivisionError("the schedule's own")):
        if me() == 0:
            raised(ZeroDivisionError, optimizer.synchronize)
        else:
            expected = "failed on worker 0" if _leads(optimizer) else "this node's first worker"
            assert expected in raised(RuntimeError, optimizer.synchronize)


def check_the_honest_switch_exchanges_between_all_workers() -> None:
    """Dense steps are plain Horovod's, after one that sends what the leaders' residuals hold; nothing is lost."""
    for dense_s, compressed_s, ends_dense in ((0.1, 1.0, True), (1.0, 0.1, False)):
        now = [0.0]
        params = parameters()
        schedule = Static(clock=lambda now=now: now[0])
        optimizer = _wrap(params, hvdcomp.TopK(cf=10), schedule=schedule, never_slower=True)
        applied = {name: torch.zeros_like(p) for name, p in params.items()}
        given = {name: torch.zeros_like(p) for name, p in params.items()}
        sent = []
        for step in range(14):
            optimizer.zero_grad()
            grads = gradients(step, me())
            if step == 11 and me() == 3:
                grads["conv.weight"][0, 0, 0, 0] = float("nan")
            give(params, grads)
            dense = step > 0 and optimizer._exchange.referee.dense
            now[0] += dense_s if dense else compressed_s
            optimizer.synchronize()
            record = optimizer.last_step
            assert (record.step, record.fell_back, record.skipped) == (step, dense, step == 11 and not dense)
            assert_alike(p.grad for p in params.values())
            if step == 11:
                continue
            sent.append((dense, record.bytes_sent))
            for name, p in params.items():
                applied[name] += p.grad
                given[name] += sum(gradients(step, rank)[name] for rank in range(4)) / 4
        kept = everyones(optimizer.compressor_state_dict().get("residuals", {}))
        left = [residuals for residuals in kept if residuals]
        for name in given:
            rest = sum(residuals[name] for residuals in left) / 2 if name in left[0] else 0.0
            assert_close([applied[name] + rest], [given[name]], rtol=1e-4, atol=1e-4)
        assert record.fell_back == ends_dense
        whole = 4 * sum(p.numel() for p in params.values())
        flat = [
            nbytes == whole for (dense, nbytes), (before, _) in zip(sent[1:], sent, strict=False) if dense and before
        ]
        assert flat
        assert all(flat), sent


def check_resumed() -> None:
    """Every rank saves and loads its own; those that do not lead have nothing to save."""
    params = parameters()
    optimizer = _wrap(params, LOSSY["powersgd"]())
    for step in range(3):
        _step(params, optimizer, gradients(step, me()))
    state = optimizer.compressor_state_dict()
    assert bool(state) == _leads(optimizer)
    states = everyones(state)
    copies = [{name: nn.Parameter(p.detach().clone()) for name, p in params.items()} for _ in range(2)]
    for own, given in zip(copies, (state, states), strict=True):
        other = _wrap(own, LOSSY["powersgd"]())
        other.load_compressor_state_dict(given)
        assert digest(other.compressor_state_dict().get("residuals", {}).values()) == digest(
            state.get("residuals", {}).values()
        )
        _step(own, other, gradients(3, me()))
        assert other.last_step.step == 3
    _step(params, optimizer, gradients(3, me()))
    for own in copies:
        assert digest(own.values()) == digest(params.values())


def check_nodes_become_single_workers() -> None:
    """Off again: a state of two nodes goes on in a world of four workers, as that of any other number does."""
    params = parameters()
    optimizer = _wrap(params, LOSSY["topk"]())
    _step(params, optimizer, gradients(0, me()))
    states = everyones(optimizer.compressor_state_dict())
    mean = sum(state["residuals"]["conv.weight"] for state in states if state) / 2
    flat = wrap(params, LOSSY["topk"]())
    flat.load_compressor_state_dict(states, on_world_change="mean")
    assert_close([flat.compressor_state_dict()["residuals"]["conv.weight"]], [mean])


def check_refused_and_left_off() -> None:
    params = parameters()

    def message(places: dict[int, tuple[int, int]], **arguments: Any) -> str:
        with _topology(places):
            for_none = arguments | {"hierarchical": None}
            assert wrap(params, **for_none)._nodes is None
            return raised(ValueError, lambda: wrap(params, **{"hierarchical": True, **arguments}))

    assert "all 4 workers are on one node" in message({rank: (0, rank) for rank in range(4)})
    assert "each of the 4 nodes has one worker" in message({rank: (rank, 0) for rank in range(4)})
    assert "different numbers of workers" in message({0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0)})
    assert "leave process_set out" in message(ROUND_ROBIN, process_set=_wrap(params, "none")._nodes.inside)
    assert "Adasum is no mean" in raised(ValueError, lambda: wrap(params, op=hvd.Adasum, hierarchical=True))
    with mock.patch.dict("os.environ", HOROVOD_DYNAMIC_PROCESS_SETS="0"):
        assert "set HOROVOD_DYNAMIC_PROCESS_SETS=1 on every rank" in message(
            {0: (0, 0), 1: (1, 0), 2: (1, 1), 3: (0, 1)}
        )
    assert "True or False" in raised(ValueError, lambda: wrap(params, hierarchical="yes"))
    with _topology(ROUND_ROBIN):
        assert wrap(params, hierarchical=None)._nodes is not None
        assert wrap(params)._nodes is None


def check_sets_are_made_once() -> None:
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks
    _wrap(parameters(), "none")
    before = known()
    _wrap(parameters(), "topk")
    assert known() == before


def check_join_is_refused() -> None:
    optimizer = _wrap(parameters(), "none")
    assert all(everyones("hierarchical=True" in raised(RuntimeError, hvd.join)))
    del optimizer
