"""Each method: values worked by hand, bytes, parameters, Horovod's interface, awkward tensors."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import every_method
from torch import Tensor

from hvdcomp import compressors
from hvdcomp.compressors import (
    BF16,
    FP16,
    Compressor,
    NoCompression,
    OkTopK,
    PowerSGD,
    RandomK,
    TopK,
    available,
    create,
)
from hvdcomp.compressors.randomk import shared_seed
from hvdcomp.compressors.requests import (
    Allgather,
    Allreduce,
    Alltoall,
    Alltoallv,
    Broadcast,
    Decide,
    Reduced,
    Unit,
    Volume,
)
from hvdcomp.compressors.sparsifier import GatheredSparsifier, kept_elements
from hvdcomp.kernels import squared_norm
from hvdcomp.simulation import World

X = torch.tensor([4.0, -3.0, 2.0, -1.0, 0.5])
NAMES = sorted(available())


def drive(
    compressor: Compressor, tensors: list[Tensor], levels: tuple[float, float] | None = None, level: int = -1
) -> tuple[list[Reduced], list[Volume], list[list[float]]]:
    """One step of one unit on several workers, each request answered by hand.

    Returns the workers' outcomes, the collectives that worker 0 asked for, and every worker's ``kept_sq``.
    """
    workers = len(tensors)
    units = [Unit("w", t.shape, w, workers, levels=levels) for w, t in enumerate(tensors)]
    generators = [compressor.rounds(t.reshape(-1), unit) for t, unit in zip(tensors, units, strict=True)]
    outcomes: dict[int, Reduced] = {}
    volumes: list[Volume] = []
    kept: list[list[float]] = []
    answers: list[Any] = [None] * workers
    while len(outcomes) < workers:
        requests = []
        for worker, generator in enumerate(generators):
            try:
                requests.append(generator.send(answers[worker]))
            except StopIteration as stop:
                outcomes[worker] = stop.value
        if not requests:
            break
        assert len(requests) == workers, "some workers are done, others are not"
        first = requests[0]
        if isinstance(first, Decide):
            kept = [[float(sq) for sq in request.kept_sq] for request in requests]
            answers = [level] * workers
            continue
        if isinstance(first, Allreduce):
            kind, sent = "allreduce", first.tensor
            answers = [torch.stack([r.tensor for r in requests]).mean(0)] * workers
        elif isinstance(first, Allgather):
            kind, sent = "allgather", first.payload
            answers = [[r.payload for r in requests]] * workers
        elif isinstance(first, Broadcast):
            kind, sent = "broadcast", first.tensor
            answers = [requests[first.root].tensor] * workers
        elif isinstance(first, Alltoallv):
            kind, sent = "alltoall", torch.cat(first.payloads)
            answers = [[r.payloads[worker] for r in requests] for worker in range(workers)]
        else:
            assert isinstance(first, Alltoall)
            kind, sent = "alltoall", first.tensor
            answers = [torch.stack([r.tensor[worker] for r in requests]) for worker in range(workers)]
        volumes.append(Volume(len(volumes), kind, sent.numel() * sent.element_size()))
    return [outcomes[worker] for worker in range(workers)], volumes, kept


def mean_of(outcome: Reduced, shape: torch.Size) -> Tensor:
    out = torch.full((shape.numel(),), torch.nan)  # write_mean_ must overwrite all of it
    outcome.write_mean_(out)
    return out.view(shape)


# -- bytes


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (0,), (0, 3), (3, 0), (1, 1), (2, 2), (8, 6), (6, 8), (4, 3, 3, 3), (1, 50), (50, 1)]
)
@pytest.mark.parametrize(
    "compressor",
    [
        *(
            method
            for made in ({}, {"cf": 1, "rank": 3}, {"cf": 2.5, "rank": 2})
            for method in every_method(**made)
            if method.name != "gradiveq"
        ),  # what it sends changes from step to step
        PowerSGD(rank=4),
        TopK(cf=1e9),
    ],
    ids=repr,
)
def test_requests_are_what_the_rounds_ask_for(compressor: Compressor, shape: tuple[int, ...], workers: int) -> None:
    _, volumes, _ = drive(compressor, [torch.randn(shape) for _ in range(workers)])
    stated = compressor.requests(shape, workers)
    assert [(v.phase, v.kind) for v in volumes] == [(v.phase, v.kind) for v in stated]
    for asked, bound in zip(volumes, stated, strict=True):
        if asked.kind != "allreduce" and isinstance(compressor, (GatheredSparsifier, OkTopK)):
            assert asked.nbytes <= bound.nbytes  # indices take as many bits as they need
        else:
            assert asked.nbytes == bound.nbytes


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    ("compressor", "nbytes"),
    [
        (NoCompression(), 4 * 1200),
        (FP16(), 2 * 1200),
        (TopK(cf=100), 24 + 8 * 12),  # 24 of header
        (TopK(cf=1), 4 * 1200),  # dense: no indices
        (RandomK(cf=100), 4 * 12),
        (PowerSGD(rank=2), 4 * 2 * (30 + 40)),
    ],
    ids=repr,
)
def test_bytes_are_those_of_the_table(compressor: Compressor, nbytes: int, workers: int) -> None:
    assert sum(volume.nbytes for volume in compressor.requests((30, 40), workers)) == nbytes


@pytest.mark.parametrize(
    ("compressor", "nbytes"),
    [("none", 4 * 1200), ("fp16", 2 * 1200), ("randomk", 4 * 12), ("powersgd", 4 * 4 * 70)],
)
def test_a_world_reports_these_bytes(compressor: str, nbytes: int) -> None:
    world = World(2, compressor)
    world.step([{"w": torch.randn(30, 40)} for _ in range(2)])
    assert world.nbytes == nbytes


def test_bf16_moves_as_much_as_a_ring_of_halves_whatever_the_remainder() -> None:
    assert BF16().requests((10,), 4) == [Volume(0, "alltoall", 2 * 3 * 4), Volume(1, "allgather", 2 * 3)]


# -- top-k


@pytest.mark.parametrize(
    ("k", "squared", "norm"), [(1, 0.528926, 0.727273), (2, 0.826446, 0.909091), (3, 0.958678, 0.979121)]
)
def test_topk_gains(k: int, squared: float, norm: float) -> None:
    _, _, ((kept_sq, _),) = drive(TopK(), [X], levels=(5 / k, 5 / k))
    gain = kept_sq / float(squared_norm(X))
    assert gain == pytest.approx(squared, abs=5e-7)
    assert math.sqrt(gain) == pytest.approx(norm, abs=5e-7)


@pytest.mark.parametrize(("cf", "mean"), [(5, [4, 0, 0, 0, 0]), (2.5, [4, -3, 0, 0, 0]), (1.25, [4, -3, 2, -1, 0])])
def test_topk_sends_the_largest_magnitudes(cf: float, mean: list[float]) -> None:
    (outcome,), _, _ = drive(TopK(cf=cf), [X])
    assert mean_of(outcome, X.shape).tolist() == mean


def test_topk_means_over_workers_and_overlaps_add() -> None:
    outcomes, _, _ = drive(TopK(cf=2), [torch.tensor([4.0, 0.0, 1.0, 2.0]), torch.tensor([6.0, 3.0, 0.0, 0.0])])
    for outcome in outcomes:
        assert mean_of(outcome, torch.Size([4])).tolist() == [5.0, 1.5, 0.0, 1.0]


def test_topk_zeroes_the_residual_by_index_even_where_it_is_not_finite() -> None:
    acc = torch.tensor([math.inf, 1.0, 2.0, 0.5])
    (outcome,), _, _ = drive(TopK(cf=4), [acc])
    outcome.settle_(acc)
    assert acc.tolist() == [0.0, 1.0, 2.0, 0.5]


@pytest.mark.parametrize("factor", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("lowest", [1, 1.5, 4, 10])
def test_multi_level_topk_equals_direct_topk_for_a_whole_second_factor(lowest: float, factor: int) -> None:
    x = (torch.randperm(1009) + 1.0) * torch.where(torch.rand(1009) < 0.5, 1.0, -1.0)  # distinct magnitudes
    k = kept_elements(kept_elements(1009, lowest), factor)
    (outcome,), _, ((_, kept_sq),) = drive(TopK(), [x], levels=(lowest, lowest * factor), level=1)
    direct = torch.zeros_like(x)
    top = x.abs().topk(k).indices
    direct[top] = x[top]
    if lowest * factor == 1:
        direct = x
    assert torch.equal(mean_of(outcome, x.shape), direct)
    assert kept_sq == pytest.approx(float(direct.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize(("levels", "level"), [((1, 2), 0), ((1, 1), 1), ((2, 4), -1)])
def test_a_level_that_keeps_everything_travels_dense(levels: tuple[float, float], level: int) -> None:
    for compressor in (TopK(), RandomK()):
        _, volumes, _ = drive(compressor, [X, X], levels=levels, level=level)
        assert volumes == [Volume(0, "allreduce", 4 * 5)]


def test_each_level_is_sent_as_decided() -> None:
    sent = {}
    for level in (-1, 0, 1):
        (outcome,), _, _ = drive(TopK(), [X], levels=(2.5, 5), level=level)
        sent[level] = mean_of(outcome, X.shape).tolist()
    assert sent == {-1: X.tolist(), 0: [4.0, -3.0, 0.0, 0.0, 0.0], 1: [4.0, 0.0, 0.0, 0.0, 0.0]}


@pytest.mark.parametrize(
    ("numel", "cf", "kept"),
    [
        (0, 4, 0), (1, 100, 1), (5, 1, 5), (5, 2, 2), (1000, 100, 10), (999, 100, 9), (1000, 2.5, 400), (7, 7, 1),
        (7, 8, 1), (300, 1 / 0.01, 3), (2_000_000_000 - 1, 2, 999_999_999), (2**31 - 1, 1.0000000001, 2147483646),
    ],
)  # fmt: skip
def test_kept_elements(numel: int, cf: float, kept: int) -> None:
    assert kept_elements(numel, cf) == kept


# -- random-k


def positions(name: str, step: int = 0, seed: int = 0, n: int = 400, k: int = 40) -> list[int]:
    unit = Unit(name, torch.Size([n]), step=step)
    return RandomK(seed=seed).select(torch.zeros(n), k, unit, 0).positions.tolist()


def test_randomk_draws_without_replacement() -> None:
    for step in range(20):
        drawn = positions("w", step)
        assert drawn == sorted(set(drawn))
        assert len(drawn) == 40
        assert 0 <= drawn[0] <= drawn[-1] < 400


def test_randomk_reaches_every_element_the_last_too() -> None:
    assert {p for step in range(200) for p in positions("w", step, n=20, k=2)} == set(range(20))


def test_randomk_depends_on_name_step_and_seed() -> None:
    base = positions("listen")
    assert base == positions("listen")
    assert all(base != other for other in (positions("silent"), positions("listen", 1), positions("listen", seed=1)))


def test_shared_seed_depends_on_the_order_and_borders_of_its_parts() -> None:
    seeds = [shared_seed(*parts) for parts in (("ab", "c"), ("a", "bc"), ("c", "ab"), (1, 11, "a"), (11, 1, "a"))]
    assert len(set(seeds)) == len(seeds)
    assert shared_seed(0, 1, "w") == 13301438256950023153  # alike in every process, unlike hash()


def test_randomk_is_the_same_whatever_comes_with_it_and_in_whatever_order() -> None:
    a, b = torch.randn(50), torch.randn(60)
    together = World(1, "randomk", cf=5).step([{"a": a, "b": b}])[0]
    turned = World(1, "randomk", cf=5).step([{"b": b, "a": a}])[0]
    alone = World(1, "randomk", cf=5).step([{"a": a}])[0]
    assert torch.equal(together["a"], turned["a"])
    assert torch.equal(together["a"], alone["a"])


@pytest.mark.parametrize("compressor", every_method(), ids=lambda c: c.name)
def test_no_method_touches_the_users_random_numbers(compressor: Compressor) -> None:
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    world = World(2, compressor)
    for _ in range(2):
        world.step([{"w": torch.ones(6, 8), "b": torch.ones(9)}] * 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert repr(np.random.get_state()) == before[1]
    assert random.getstate() == before[2]


def test_randomk_sends_values_as_they_are_with_feedback_and_times_n_over_k_without() -> None:
    ones = torch.ones(40)
    assert World(2, "randomk", cf=4).step([{"w": ones}] * 2)[0]["w"].unique().tolist() == [0.0, 1.0]
    without = World(2, "randomk", cf=4, error_feedback=False)
    assert without.step([{"w": ones}] * 2)[0]["w"].unique().tolist() == [0.0, 4.0]
    assert without.residual(0, "w").count_nonzero() == 0


def test_randomk_without_feedback_is_unbiased() -> None:
    x = torch.arange(1.0, 11.0)
    world = World(1, "randomk", cf=5, error_feedback=False)
    mean = sum(world.step([{"w": x}])[0]["w"] for _ in range(4000)) / 4000
    assert torch.allclose(mean, x, rtol=0.15)


# -- fp16 and bf16


def test_fp16_divides_before_the_sum() -> None:
    assert World(2, "fp16").step([{"w": torch.full((3,), 40000.0)}] * 2)[0]["w"].tolist() == [40000.0] * 3


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 9, 16])
@pytest.mark.parametrize("value", [65504.0, 65520.0, 1e5, 3e38])
def test_fp16_saturates_at_its_largest_number_for_any_world(value: float, workers: int) -> None:
    mean = World(workers, "fp16").step([{"w": torch.tensor([value, -value])}] * workers)[0]["w"]
    assert mean.tolist() == pytest.approx([65504.0, -65504.0], rel=1e-2)
    assert mean.abs().max() <= 65504


def test_fp16_uses_its_memory_again_and_sends_nothing_old_from_it() -> None:
    unit = Unit("w", torch.Size([1000]), workers=2)
    sent = []
    for value in (1.0, math.nan, 2.0):  # the second step is skipped
        rounds = FP16().rounds(torch.full((1000,), value), unit)
        sent.append(next(rounds).tensor)
        rounds.close()
    assert sent[0].data_ptr() == sent[2].data_ptr()
    assert sent[2].eq(2).all()
    world = World(2, "fp16")
    means = [world.step([{"w": torch.full((1000,), v)}] * 2)[0]["w"] for v in (1.0, math.nan, 2.0)]
    assert means[0].eq(1).all()
    assert means[2].eq(2).all()


def test_fp16_saturates_each_workers_share() -> None:
    means = World(2, "fp16").step([{"w": torch.tensor([1e5, -1e5])}, {"w": torch.tensor([0.0, 65504.0])}])
    assert means[0]["w"].tolist() == [32752.0, 0.0]
    half, ctx = FP16().compress(torch.tensor([1e5, -3e38, math.inf]))
    assert FP16().decompress(half, ctx).tolist() == [65504.0, -65504.0, math.inf]


def test_fp16_of_three_workers() -> None:
    means = World(3, "fp16").step([{"w": torch.tensor([v])} for v in (40000.0, 50000.0, 60000.0)])
    assert [mean["w"].item() for mean in means] == pytest.approx([50000.0] * 3, rel=1e-3)


@pytest.mark.parametrize(("compressor", "precision"), [(FP16(), 2**-11), (BF16(), 2**-8)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_casts_keep_their_precision(compressor: Compressor, precision: float, workers: int) -> None:
    grads = [{"w": torch.rand(33) + 0.5} for _ in range(workers)]
    plain = torch.stack([g["w"] for g in grads]).mean(0)
    for mean in World(workers, compressor).step(grads):
        assert torch.allclose(mean["w"], plain, rtol=(workers + 1) * precision, atol=0)


def test_bf16_sums_in_float32() -> None:
    """257 workers' ones would stop at 256 in bfloat16; 100 and 0.25 would lose the quarter."""
    grads = [{"w": torch.tensor([v])} for v in (100.0, 0.25, 0.25, 0.25, 0.25, -100.0, 0.0, 0.0)]
    assert World(8, "bf16").step(grads)[0]["w"].item() == 0.125


def test_bf16_keeps_the_range_of_float32() -> None:
    assert World(2, "bf16").step([{"w": torch.tensor([1e38])}] * 2)[0]["w"].item() == pytest.approx(1e38, rel=2**-8)


# -- PowerSGD


def test_powersgd_by_hand() -> None:
    """M = [[3, 0], [0, 1]] from Q = [1, 0] gives [[3, 0], [0, 0]]."""
    matrix = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    unit = Unit("w", matrix.shape, state={"q": torch.tensor([[1.0], [0.0]])})
    generator = PowerSGD(rank=1, small_matrix_rule=False).rounds(matrix.reshape(-1), unit)
    p = next(generator)
    assert isinstance(p, Allreduce)
    assert p.tensor.tolist() == [[3.0], [0.0]]
    q = generator.send(p.tensor)
    assert isinstance(q, Allreduce)
    with pytest.raises(StopIteration) as stop:
        generator.send(q.tensor)
    outcome = stop.value.value
    assert torch.allclose(mean_of(outcome, matrix.shape), torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
    acc = matrix.reshape(-1).clone()
    outcome.settle_(acc)
    assert torch.allclose(acc, torch.tensor([0.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("workers", [1, 3])
def test_powersgd_is_exact_for_a_matrix_of_its_rank(workers: int) -> None:
    matrix = torch.outer(torch.randn(9), torch.randn(11))
    world = World(workers, "powersgd", rank=1)
    mean = world.step([{"w": matrix}] * workers)[0]["w"]
    assert torch.allclose(mean, matrix, atol=1e-5)
    assert world.residual(0, "w").abs().max() < 1e-5


def test_powersgd_keeps_what_is_outside_p_of_each_workers_own_matrix() -> None:
    """r = M - P (M^T P)^T with this worker's own M, so that P^T r = 0; the paper's code takes the averaged Q."""
    grads = [{"w": torch.randn(9, 11)} for _ in range(3)]
    world = World(3, "powersgd", rank=2)
    mean = world.step(grads)[0]["w"]
    p = torch.linalg.svd(mean).U[:, :2]
    for worker, gradient in enumerate(grads):
        left = world.residual(worker, "w")
        assert torch.allclose(left, gradient["w"] - p @ (p.t() @ gradient["w"]), atol=1e-4)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 7), (7, 1), (3, 2, 2, 2)])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_powersgd_at_full_rank_loses_nothing(shape: tuple[int, ...], workers: int) -> None:
    grads = [{"w": torch.randn(shape)} for _ in range(workers)]
    world = World(workers, "powersgd", rank=99, small_matrix_rule=False)
    for _ in range(3):
        mean = world.step(grads)[0]["w"]
        assert torch.allclose(mean, torch.stack([g["w"] for g in grads]).mean(0), atol=1e-5)
        assert (sum(world.residual(worker, "w") for worker in range(workers)) / workers).abs().max() < 1e-5


def test_powersgd_treats_a_tensor_as_the_matrix_of_its_first_dimension() -> None:
    tensor = torch.randn(4, 3, 2, 2)
    whole = World(1, "powersgd", rank=2).step([{"w": tensor}])[0]["w"]
    flat = World(1, "powersgd", rank=2).step([{"w": tensor.view(4, 12)}])[0]["w"]
    assert torch.equal(whole.view(4, 12), flat)


@pytest.mark.parametrize(
    ("shape", "rank", "compressed"),
    [
        ((10, 10), 4, True),
        ((10, 10), 5, False),
        ((2, 2), 1, False),
        ((100,), 1, False),
        ((3, 2), 1, True),
        ((1, 9), 1, False),
    ],
)
def test_powersgd_sends_small_matrices_dense(shape: tuple[int, ...], rank: int, compressed: bool) -> None:
    """Compressed only if (n1 + n2) * r < n1 * n2."""
    world = World(1, "powersgd", rank=rank)
    gradient = torch.randn(shape)
    mean = world.step([{"w": gradient}])[0]["w"]
    assert (len(world.compression.requests(shape, 1)) == 2) == compressed
    if not compressed:
        assert torch.equal(mean, gradient)
        assert world.residual(0, "w").count_nonzero() == 0


def test_powersgd_keeps_q_so_that_a_constant_gradient_is_met_ever_better() -> None:
    matrix = torch.randn(20, 30)
    world = World(1, "powersgd", rank=2, error_feedback=False)
    errors = [float((world.step([{"w": matrix}])[0]["w"] - matrix).norm()) for _ in range(8)]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors)), errors
    values = torch.linalg.svdvals(matrix)
    best = float(values[2:].square().sum().sqrt())
    fresh = World(1, "powersgd", rank=2, error_feedback=False)
    for _ in range(150):
        last = fresh.step([{"w": matrix}])[0]["w"]
    assert float((last - matrix).norm()) == pytest.approx(best, rel=1e-3)


def test_powersgd_goes_on_after_a_zero_gradient_even_where_the_first_rows_stay_zero() -> None:
    """A zero gradient makes Q zero; P = MQ is then completed by unit vectors, which meet only the first rows."""
    matrix = torch.outer(torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0]), torch.randn(6))
    world = World(2, "powersgd", rank=1)
    world.step([{"w": torch.zeros(5, 6)}] * 2)
    mean = world.step([{"w": matrix}] * 2)[0]["w"]
    assert torch.allclose(mean, matrix, atol=1e-5)


def test_powersgd_starts_alike_on_all_workers_and_differently_by_name_and_seed() -> None:
    gradient = torch.randn(9, 9)

    def first(name: str, seed: int) -> Tensor:
        means = World(2, "powersgd", rank=1, seed=seed).step([{name: gradient}] * 2)
        assert torch.equal(means[0][name], means[1][name])
        return means[0][name]

    assert torch.equal(first("a", 0), first("a", 0))
    assert not torch.allclose(first("a", 0), first("b", 0))
    assert not torch.allclose(first("a", 0), first("a", 1))


# -- awkward tensors, through every method

AWKWARD = {
    "zero": torch.zeros(6, 8),
    "constant": torch.full((6, 8), 3.0),
    "all negative": -torch.rand(6, 8) - 0.5,
    "one-hot": torch.zeros(6, 8).index_put((torch.tensor(4), torch.tensor(5)), torch.tensor(2.0)),
    "last element": torch.zeros(6, 8).index_put((torch.tensor(5), torch.tensor(7)), torch.tensor(-2.0)),
    "one element": torch.tensor([5.0]),
    "0-dim": torch.tensor(-5.0),
    "empty": torch.zeros(0),
    "empty matrix": torch.zeros(0, 4),
    "empty rows": torch.zeros(4, 0),
    "tiny": torch.full((6, 8), 1e-40),
    "transposed": torch.randn(8, 6).t(),
}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("tensor", AWKWARD.values(), ids=AWKWARD)
def test_awkward_tensors(method: Compressor, tensor: Tensor, workers: int) -> None:
    """Finite, of the same shape, and together with what is left over just what was given."""
    world = World(workers, method)
    total = torch.zeros_like(tensor)
    for step in range(1, 4):
        for mean in world.step([{"w": tensor}] * workers):
            assert mean["w"].shape == tensor.shape
            assert torch.isfinite(mean["w"]).all()
        total += mean["w"]
        if method.error_feedback or method.residual_state:
            assert torch.allclose(total + world.residual(0, "w"), step * tensor, rtol=1e-4, atol=1e-6)
    if not (method.error_feedback or method.residual_state):
        assert torch.allclose(total, 3 * tensor, rtol=0.02, atol=1e-7)


@pytest.mark.parametrize("name", ["topk", "randomk"])
@pytest.mark.parametrize("tensor", [AWKWARD["zero"], AWKWARD["constant"], AWKWARD["one-hot"], AWKWARD["all negative"]])
def test_sparsifiers_select_exactly_k_of_awkward_tensors(name: str, tensor: Tensor) -> None:
    (outcome,), volumes, _ = drive(create(name, cf=4), [tensor])
    assert sum(v.nbytes for v in volumes) <= {"topk": 24 + 8 * 12, "randomk": 4 * 12}[name]
    if tensor.count_nonzero() == tensor.numel():
        assert mean_of(outcome, tensor.shape).count_nonzero() == 12


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "bucket", "model"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_mixed_shapes_and_types_in_one_model(
    method: Compressor, granularity: str, workers: int, error_feedback: bool
) -> None:
    if method.needs_matrices and granularity != "tensor":
        pytest.skip("matrices only")
    if "error_feedback" in method.parameters():
        method = method.with_parameters(error_feedback=error_feedback)
    types = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16, "d": torch.float64}
    shapes: dict[str, tuple[int, ...]] = {"m": (6, 8), "v": (5,), "s": (), "e": (0,)}
    grads = [
        {f"{t}.{s}": torch.randn(shape).to(dtype) for t, dtype in types.items() for s, shape in shapes.items()}
        for _ in range(workers)
    ]
    world = World(workers, method, granularity=granularity)
    for _ in range(2):
        means = world.step(grads)
    for name, gradient in grads[0].items():
        assert means[0][name].dtype == gradient.dtype
        assert means[0][name].shape == gradient.shape
        assert torch.isfinite(means[0][name]).all()
        assert all(torch.equal(mean[name], means[0][name]) for mean in means)


def test_float64_gradients_keep_their_precision() -> None:
    gradient = torch.randn(6, 8, dtype=torch.float64)
    for compressor in (NoCompression(), TopK(cf=1), RandomK(cf=1), PowerSGD(99, small_matrix_rule=False)):
        mean = World(1, compressor).step([{"w": gradient}])[0]["w"]
        assert torch.allclose(mean, gradient, rtol=1e-13, atol=1e-13)
    world = World(1, TopK(cf=4))
    world.step([{"w": gradient}])
    assert world.residual(0, "w").dtype == torch.float64


def test_half_precision_gradients_leave_a_float32_residual() -> None:
    """What is too small for float16 still adds up."""
    world = World(1, TopK(cf=2))
    small = torch.tensor([1.0, 2**-24], dtype=torch.float16)
    for _ in range(3):
        world.step([{"w": small}])
    assert world.residual(0, "w").tolist() == [0.0, 3 * 2**-24]


# -- parameters and names


@pytest.mark.parametrize("cf", [0.5, 0, -1, "100", math.nan, math.inf, -math.inf, True, None, 10**400, [10]])
@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_a_factor_that_is_none_is_refused(name: str, cf: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"cf must be (a number )?>= 1, got .*cf is original size / compressed size; for 1 % use cf=100",
    ):
        create(name, cf=cf)


@pytest.mark.parametrize("rank", [0, -1, 1.5, "4", True, None])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"rank must be a whole number >= 1, got"):
        PowerSGD(rank=rank)


@pytest.mark.parametrize("seed", [-1, 0.5, "0", True])
@pytest.mark.parametrize("name", ["randomk", "powersgd"])
def test_a_seed_that_is_none_is_refused(name: str, seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number >= 0, got"):
        create(name, seed=seed)


@pytest.mark.parametrize(("wrong", "nearest"), [("topkk", "topk"), ("power-sgdd", "powersgd"), ("fp-61", "fp16")])
def test_an_unknown_name_names_the_nearest_and_all(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'") as error:
        create(wrong)
    assert all(name in str(error.value) for name in NAMES)


def test_an_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"parameter of compression 'powersgd' 'rnak'; did you mean 'rank'"):
        create("powersgd", rnak=4)
    with pytest.raises(ValueError, match=r"parameter of compression 'topk' 'rank'.*valid: cf, error_feedback"):
        create("topk", rank=4)
    with pytest.raises(ValueError, match=r"valid: none"):
        create("none", cf=4)


@pytest.mark.parametrize("spelling", ["topk", "top-k", "Top_K", "TOPK"])
def test_spellings_of_a_name(spelling: str) -> None:
    assert create(spelling, cf=7) == TopK(cf=7)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_described(name: str) -> None:
    cls = available()[name]
    made = create(name)
    assert type(made) is cls
    assert cls.name == name
    assert cls.collective in ("allreduce", "allgather", "alltoall")
    assert cls.source
    assert cls.__doc__
    assert made == made.with_parameters()
    assert hash(made) == hash(create(name))
    assert eval(repr(made), vars(compressors)) == made
    assert cls.collective in {volume.kind for volume in made.requests((40, 50), 2)}


def test_feedback_is_on_for_sparsifiers_powersgd_and_rounding_that_is_biased_only() -> None:
    assert {name for name in NAMES if create(name).error_feedback} == {
        "topk", "redsync", "mstopk", "gaussiank", "threshold", "sidcoe", "sidcogp", "sidcop", "randomk", "artopk",
        "oktopk", "powersgd", "gradiveq", "efsignsgd", "onebit", "int8",
    }  # fmt: skip


def test_the_registry_cannot_be_changed_from_outside() -> None:
    available().clear()
    assert available()


# -- Horovod's interface


@pytest.mark.parametrize("compressor", [NoCompression(), FP16(), BF16(), TopK(cf=1)], ids=lambda c: c.name)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_compress_and_decompress_of_one_round(
    compressor: Compressor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape).to(torch.bfloat16).to(torch.float16).to(dtype)
    before = tensor.clone()
    payload, ctx = compressor.compress(tensor)
    back = compressor.decompress(payload, ctx)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.allclose(back, before, rtol=2**-7, atol=1e-6)
    assert torch.equal(tensor, before)


def test_topk_compress_sends_what_the_rounds_send() -> None:
    payload, ctx = TopK(cf=2.5).compress(X)
    assert payload.dtype == torch.uint8
    assert payload.numel() <= 24 + 8 * 2
    assert TopK(cf=2.5).decompress(payload, ctx).tolist() == [4.0, -3.0, 0.0, 0.0, 0.0]


def test_each_payload_has_its_own_context() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5, dtype=torch.float64)]
    packed = [TopK(cf=1).compress(tensor) for tensor in tensors]
    for (payload, ctx), tensor in zip(packed, tensors, strict=True):
        assert torch.equal(TopK(cf=1).decompress(payload, ctx), tensor)


@pytest.mark.parametrize("compressor", [RandomK(), PowerSGD(), OkTopK()], ids=lambda c: c.name)
def test_methods_of_several_rounds_say_how_to_use_them(compressor: Compressor) -> None:
    with pytest.raises(TypeError, match=r"hvdcomp.DistributedOptimizer.*\.bind\(model.named_parameters\(\)\)") as error:
        compressor.compress(torch.ones(3))
    assert repr(compressor) in str(error.value)
    with pytest.raises(TypeError, match="one round"):
        compressor.decompress(torch.ones(3), None)


def test_numbers_of_numpy_are_numbers() -> None:
    assert TopK(cf=np.float32(10)) == TopK(cf=np.int64(10)) == TopK(cf=10)
    assert PowerSGD(rank=np.int64(2)) == PowerSGD(rank=2)


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_flags_are_true_or_false(wrong: Any) -> None:
    with pytest.raises(ValueError, match="error_feedback must be True or False"):
        TopK(error_feedback=wrong)
