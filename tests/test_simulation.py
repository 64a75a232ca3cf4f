"""The invariants of the design, on N = 1..8 workers in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from conftest import every_method
from in_process import ExchangeWorld
from torch import Tensor

from hvdcomp import simulation
from hvdcomp.compressors import DGC, Compressor, NoCompression, PowerSGD, RandomK, TopK
from hvdcomp.compressors.sparsifier import kept_elements
from hvdcomp.rounds import BucketRun
from hvdcomp.schedules import GraVAC, Static, Warmup
from hvdcomp.schedules import create as create_schedule
from hvdcomp.simulation import World

Grads = Sequence[Mapping[str, Tensor]]
MakeGrads = Callable[..., list[dict[str, Tensor]]]

WITH_FEEDBACK = [c for c in every_method() if c.error_feedback]
SPARSIFIERS = [c for c in every_method() if c.has_levels]
CHECKED = [c for c in every_method() if c.checks_finite]
LOSS_FREE = [NoCompression(), TopK(cf=1), RandomK(cf=1), PowerSGD(rank=99, small_matrix_rule=False)]
BAD = [math.nan, math.inf, -math.inf]


def by_name(compressor: Compressor) -> str:
    return compressor.name


def granularities(compressor: Compressor) -> list[str]:
    return ["tensor"] if compressor.needs_matrices else ["tensor", "bucket", "model"]


def keeps_a_residual(compressor: Compressor) -> bool:
    return compressor.error_feedback or compressor.residual_state is not None


METHODS_AND_UNITS = [pytest.param(c, g, id=f"{c.name}-{g}") for c in every_method() for g in granularities(c)]


def plain_means(grads: Grads) -> dict[str, Tensor]:
    return {name: torch.stack([g[name].double() for g in grads]).mean(0) for name in grads[0]}


def residuals(world: World, grads: Grads) -> list[dict[str, Tensor]]:
    return [{name: world.residual(worker, name) for name in grads[0]} for worker in range(world.size)]


def poisoned(grads: Grads, worker: int, name: str, value: float) -> list[dict[str, Tensor]]:
    spoilt = [dict(g) for g in grads]
    tensor = spoilt[worker][name].clone()
    tensor.view(-1)[-1] = value
    spoilt[worker][name] = tensor
    return spoilt


# -- what was applied and what is left is what was given


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize(("compressor", "granularity"), METHODS_AND_UNITS)
def test_applied_and_left_is_what_was_given(
    compressor: Compressor, granularity: str, workers: int, random_grads: MakeGrads
) -> None:
    """Summed over steps: means + the mean of the residuals = the mean gradients. Without feedback, step by step."""
    world = World(workers, compressor, granularity=granularity, bucket_mb=0.0003)
    applied: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for step in range(5):
        grads = random_grads(workers, seed=step)
        means = world.step(grads)
        for name, plain in plain_means(grads).items():
            applied[name] = applied.get(name, 0) + means[0][name].double()
            given[name] = given.get(name, 0) + plain
    precision = {"fp16": 2e-2, "bf16": 1e-1}.get(compressor.name, 2e-5)
    for name in given:
        left = sum(world.residual(worker, name).double() for worker in range(workers)) / workers
        assert torch.allclose(applied[name] + left, given[name], rtol=0, atol=precision), name
    if compressor.error_feedback:
        assert any(residual.any() for residual in residuals(world, [given])[0].values())


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("compressor", LOSS_FREE, ids=by_name)
def test_a_loss_free_setting_equals_the_plain_mean(
    compressor: Compressor, workers: int, random_grads: MakeGrads
) -> None:
    for granularity in granularities(compressor):
        world = World(workers, compressor, granularity=granularity)
        for step in range(3):
            grads = random_grads(workers, seed=step)
            mean = world.step(grads)[0]
            for name, plain in plain_means(grads).items():
                assert torch.allclose(mean[name].double(), plain, rtol=0, atol=1e-5), name


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("compressor", "granularity"), METHODS_AND_UNITS)
def test_means_are_bitwise_equal_on_all_workers(
    compressor: Compressor, granularity: str, workers: int, random_grads: MakeGrads
) -> None:
    world = World(workers, compressor, granularity=granularity)
    for step in range(3):
        means = world.step(random_grads(workers, seed=step))
        for mean in means[1:]:
            assert mean.keys() == means[0].keys()
            assert all(torch.equal(mean[name], means[0][name]) for name in mean)


@pytest.mark.parametrize("compressor", WITH_FEEDBACK, ids=by_name)
def test_a_tensor_that_is_not_compressed_has_no_residual_and_its_plain_mean(
    compressor: Compressor, random_grads: MakeGrads
) -> None:
    world = World(3, compressor, exclude=("1d", "conv*"))
    for step in range(3):
        grads = random_grads(3, seed=step)
        mean = world.step(grads)[0]
    plain = plain_means(grads)
    for name in ("bias", "scalar", "conv"):
        assert torch.allclose(mean[name].double(), plain[name], atol=1e-6)
        assert not any(residual[name].any() for residual in residuals(world, grads))
    assert world.residual(0, "weight").any()


@pytest.mark.parametrize("compressor", [TopK(cf=1), RandomK(cf=1), PowerSGD(rank=50)], ids=by_name)
@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_sent_dense_under_feedback_leaves_exactly_nothing(
    compressor: Compressor, workers: int, random_grads: MakeGrads
) -> None:
    grads = random_grads(workers)
    world = World(workers, compressor)
    world.step(grads)
    assert not any(tensor.any() for residual in residuals(world, grads) for tensor in residual.values())


@pytest.mark.parametrize(("compressor", "granularity"), METHODS_AND_UNITS)
def test_gradients_are_neither_changed_nor_kept(
    compressor: Compressor, granularity: str, random_grads: MakeGrads
) -> None:
    for workers in (1, 2):
        world = World(workers, compressor, granularity=granularity)
        for step in range(2):
            grads = random_grads(workers, seed=step)
            before = [{name: tensor.clone() for name, tensor in g.items()} for g in grads]
            means = world.step(grads)
            assert all(torch.equal(g[name], b[name]) for g, b in zip(grads, before, strict=True) for name in g)
            left = residuals(world, grads)
            for tensors in (*means, *grads):
                for tensor in tensors.values():
                    tensor.fill_(1e9)  # neither of them is a view of what we keep, or of each other
            assert all(torch.equal(a[n], b[n]) for a, b in zip(residuals(world, grads), left, strict=True) for n in a)


@pytest.mark.parametrize("compressor", [*every_method(), *LOSS_FREE], ids=repr)
def test_what_travels_is_contiguous(compressor: Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod refuses anything else, and gradients of a strided or expanded vector are not."""
    original = simulation.collective

    def collective(requests: list[Any]) -> list[Tensor]:
        assert all(request.buffer.is_contiguous() for request in requests)
        return original(requests)

    monkeypatch.setattr(simulation, "collective", collective)
    for gradient in (torch.randn(20)[::2], torch.ones(1).expand(10), torch.randn(4, 6, 2)[..., 0]):
        world = World(2, compressor)
        for _ in range(2):
            world.step([{"w": gradient}] * 2)


def test_means_of_workers_do_not_share_memory() -> None:
    for compressor in every_method():
        means = World(2, compressor).step([{"w": torch.ones(4, 6)}] * 2)
        means[0]["w"].fill_(7)
        assert not (means[1]["w"] == 7).any()


@pytest.mark.parametrize(("compressor", "granularity"), METHODS_AND_UNITS)
def test_a_world_of_one_equals_a_world_of_equal_workers(
    compressor: Compressor, granularity: str, random_grads: MakeGrads
) -> None:
    alone = World(1, compressor, granularity=granularity)
    four = World(4, compressor, granularity=granularity)
    three = World(3, compressor, granularity=granularity)
    for step in range(4):
        grads = random_grads(1, seed=step)
        mean, equal, near = alone.step(grads)[0], four.step(grads * 4)[0], three.step(grads * 3)[0]
        for name in mean:
            if compressor.name == "oktopk" and alone.residual(0, name).any():
                continue  # what an owner accepts depends on what else it owns
            exact = compressor.name != "powersgd"  # a mean of four equals is exact, what BLAS makes of it is not
            assert torch.allclose(mean[name], equal[name], rtol=0, atol=0 if exact else 1e-5)
            assert torch.allclose(mean[name], near[name], rtol=1e-2 if "16" in compressor.name else 1e-4, atol=1e-5)
            assert mean[name].any() or not grads[0][name].any() or keeps_a_residual(compressor)


@pytest.mark.parametrize("compressor", WITH_FEEDBACK, ids=by_name)
def test_an_order_of_names_changes_nothing(compressor: Compressor, random_grads: MakeGrads) -> None:
    worlds = World(2, compressor), World(2, compressor)
    for step in range(3):
        grads = random_grads(2, seed=step)
        turned = [dict(reversed(g.items())) for g in grads]
        mean, other = worlds[0].step(grads)[0], worlds[1].step([turned[0], grads[1]])[0]
        assert all(torch.equal(mean[name], other[name]) for name in mean)


# -- missing gradients


@pytest.mark.parametrize(("compressor", "granularity"), METHODS_AND_UNITS)
@pytest.mark.parametrize("how", ["none", "left out"])
def test_a_missing_gradient_counts_as_zero(
    compressor: Compressor, granularity: str, how: str, random_grads: MakeGrads
) -> None:
    worlds = World(3, compressor, granularity=granularity), World(3, compressor, granularity=granularity)
    for step in range(3):
        grads = random_grads(3, seed=step)
        zeros = [dict(g) for g in grads]
        missing: list[dict[str, Any]] = [dict(g) for g in grads]
        for worker, name in ((0, "weight"), (1, "conv"), (2, "weight"), (1, "bias")):
            zeros[worker][name] = torch.zeros_like(grads[worker][name])
            missing[worker][name] = None
            if how == "left out":
                del missing[worker][name]
        mean, other = worlds[0].step(zeros)[0], worlds[1].step(missing)[0]
        assert mean.keys() == other.keys()
        assert all(torch.equal(mean[name], other[name]) for name in mean)


def test_a_gradient_that_no_worker_has_gives_zero_and_what_is_left_of_it_is_still_sent() -> None:
    world = World(2, TopK(cf=2))
    world.step([{"w": torch.tensor([4.0, 1.0])}] * 2)
    assert world.step([{"w": None}] * 2)[0]["w"].tolist() == [0.0, 1.0]
    assert world.step([{}] * 2)[0]["w"].tolist() == [0.0, 0.0]


# -- not finite


def step_that_is_skipped(world: World, good: Grads, bad: Grads, worker: int, name: str) -> None:
    """A skipped step leaves the residuals within one rounding of residual + gradient, which is subtracted again;
    bitwise from the bad value's block of 64 on, where nothing was added."""
    before = residuals(world, good)
    means = world.step(bad)
    assert world.skipped
    for mean in means:
        assert mean.keys() == bad[0].keys()
        assert all(torch.isnan(tensor).all() for tensor in mean.values())
    after = residuals(world, good)
    where = int((~torch.isfinite(bad[worker][name].reshape(-1))).nonzero()[0]) // 64 * 64
    assert torch.equal(after[worker][name].view(-1)[where:], before[worker][name].view(-1)[where:])
    for w in range(world.size):
        for n in before[w]:
            rounding = (before[w][n].abs() + good[w][n].abs()) * 2**-23
            assert ((after[w][n] - before[w][n]).abs() <= rounding).all(), (w, n)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("compressor", CHECKED, ids=by_name)
def test_a_value_that_is_not_finite_anywhere_makes_all_skip(
    compressor: Compressor, workers: int, value: float, random_grads: MakeGrads
) -> None:
    for granularity in granularities(compressor):
        for worker in range(workers):
            for name in ("weight", "scalar"):
                world = World(workers, compressor, granularity=granularity, exclude=("scalar",))
                good = random_grads(workers)
                world.step(good)
                step_that_is_skipped(world, good, poisoned(good, worker, name, value), worker, name)
                means = world.step(good)
                assert not world.skipped
                assert all(torch.isfinite(t).all() for mean in means for t in mean.values())


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["weight", "scalar"])
@pytest.mark.parametrize("compressor", SPARSIFIERS, ids=by_name)
def test_a_value_that_is_not_finite_makes_all_skip_under_gravac(
    compressor: Compressor, name: str, value: float, random_grads: MakeGrads
) -> None:
    schedule = GraVAC(cf_min=2, cf_max=8, epsilon=0, window=2)
    world = World(3, compressor, schedule=schedule, exclude=("1d",))
    good = random_grads(3)
    world.step(good)
    state = schedule.state_dict()
    step_that_is_skipped(world, good, poisoned(good, 1, name, value), 1, name)
    assert world.decision is not None
    assert world.decision.skip
    assert schedule.state_dict() == state | {"pending": None}
    assert all(torch.isfinite(t).all() for t in world.step(good)[0].values())
    assert not world.decision.skip


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("bucket_mb", [1e-9, 25.0])
def test_all_workers_learn_of_it_in_every_bucket_of_theirs(
    value: float, bucket_mb: float, random_grads: MakeGrads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker decides by itself whether to skip, from what its own collectives brought."""
    verdicts: list[list[bool]] = []
    original = World._exchange

    def exchange(self: World, workers: list[BucketRun], level: int) -> None:
        original(self, workers, level)
        verdicts.append([run.settled() for run in workers])

    monkeypatch.setattr(World, "_exchange", exchange)
    for compressor in CHECKED:
        for name in ("weight", "scalar"):
            verdicts.clear()
            world = World(3, compressor, bucket_mb=bucket_mb, exclude=("scalar",))
            world.step(poisoned(random_grads(3), 2, name, value))
            assert all(len(set(verdict)) == 1 for verdict in verdicts), (compressor, name)
            assert any(verdict == [False] * 3 for verdict in verdicts)


@pytest.mark.parametrize("compressor", CHECKED, ids=by_name)
def test_a_skipped_step_differs_from_none_at_all_by_rounding_only(compressor: Compressor) -> None:
    """Whole numbers are restored exactly, so that the next step must be the same, Q and random positions too."""
    good = [{"w": torch.randint(-50, 50, (8, 9)).float()} for _ in range(2)]
    bad = poisoned(good, 1, "w", math.nan)
    spoilt, clean = World(2, compressor), World(2, compressor)
    for world in (spoilt, clean):
        world.step(good)
    spoilt.step(bad)
    if compressor.name in ("randomk", "artopk", "oktopk"):  # positions, or whose they are, depend on the step
        clean.step_count += 1
    for _ in range(3):
        mean, other = spoilt.step(good)[0]["w"], clean.step(good)[0]["w"]
        assert torch.allclose(mean, other, rtol=1e-5, atol=1e-4 if compressor.name == "powersgd" else 0)


@pytest.mark.parametrize("scale", [1e-25, 1e-15, 1e15, 1e25])
def test_powersgd_finds_a_matrix_of_any_size_with_the_last_q(scale: float) -> None:
    """Q = M^T P is as large as M: its product with M must not leave float32's range."""
    matrix = torch.outer(torch.randn(9), torch.randn(11)) * scale
    world = World(2, PowerSGD(rank=1))
    for _ in range(3):
        mean = world.step([{"w": matrix}] * 2)[0]["w"]
        assert not world.skipped
        assert torch.allclose(mean / scale, matrix / scale, atol=1e-5)


def test_a_skipped_step_leaves_q_as_it_was(random_grads: MakeGrads) -> None:
    world = World(2, "powersgd", rank=2)
    good = random_grads(2)
    world.step(good)

    def q_of(worker: int) -> Tensor:
        parts = [part for bucket in world._buckets[worker] for part in bucket.parts]
        return next(part.unit.state["q"] for part in parts if part.unit.name == "weight")

    before = [q_of(worker).clone() for worker in range(2)]
    for name in ("weight", "bias"):
        world.step(poisoned(good, 1, name, math.nan))
        assert all(torch.equal(q_of(worker), before[worker]) for worker in range(2))
    world.step(good)
    assert not torch.equal(q_of(0), before[0])


@pytest.mark.parametrize("compressor", WITH_FEEDBACK, ids=by_name)
@pytest.mark.parametrize("schedule", [False, True])
def test_a_sum_of_residual_and_gradient_that_overflows_is_not_finite(compressor: Compressor, schedule: bool) -> None:
    if schedule and not compressor.has_levels:
        pytest.skip("no levels")
    world = World(2, compressor, schedule=GraVAC(cf_min=4, cf_max=4, epsilon=0) if schedule else None)
    for _ in range(2):  # the first step of some methods is dense
        good = [{"w": torch.randn(8, 8) * 4e37, "v": torch.ones(3)} for _ in range(2)]
        world.step(good)
    left = residuals(world, good)
    bad = [dict(good[0]), {"w": torch.sign(left[1]["w"]) * 3.4e38, "v": torch.ones(3)}]
    assert left[1]["w"].abs().max() > 1e37, "the residual must be large for this test"
    world.step(bad)
    assert world.skipped
    after = residuals(world, good)
    assert torch.equal(after[1]["w"], left[1]["w"])
    assert all(torch.isfinite(t).all() for r in after for t in r.values())


def test_large_finite_gradients_are_no_reason_to_skip() -> None:
    for compressor in CHECKED:
        if compressor.name in ("fp16", "bf16"):
            continue
        world = World(2, compressor)
        mean = world.step([{"w": torch.eye(8) * 1e30}] * 2)[0]["w"]
        assert not world.skipped, compressor
        assert torch.isfinite(mean).all()


def test_without_compression_a_nan_travels_as_with_plain_horovod() -> None:
    world = World(2, "none")
    means = world.step([{"w": torch.tensor([1.0, math.nan])}, {"w": torch.tensor([3.0, 1.0])}])
    assert not world.skipped
    assert means[0]["w"][0] == 2.0
    assert torch.isnan(means[1]["w"][1])


# -- GraVAC


@pytest.mark.parametrize("name", ["topk", "mstopk", "randomk", "dgc", "powersgd"])
def test_gains_from_a_sample_are_near_those_of_a_selection(name: str) -> None:
    if name == "powersgd":
        with pytest.raises(ValueError, match="exact=False estimates the gain of the largest elements"):
            World(2, name, schedule=GraVAC(exact=False))
        return
    gains: dict[bool, tuple[float, float]] = {}
    for exact in (True, False):
        schedule = GraVAC(cf_min=10, cf_max=20, epsilon=0.0, omega=0, window=1, exact=exact)
        world = World(2, name, schedule=schedule)
        schedule.prepare(100)
        for step in range(4):
            generator = torch.Generator().manual_seed(step // 2)
            means = world.step([{"w": torch.randn(50_000, generator=generator)} for _ in range(2)])
        assert world.decision is not None
        assert world.decision.cf == 20.0
        assert int((means[0]["w"] != 0).sum()) <= 2 * 2 * 2500
        gains[exact] = world.decision.gains
    assert gains[False] == pytest.approx(gains[True], rel=0.25)


def test_a_step_obeys_the_decision_on_the_last_one_where_it_is_not_exact() -> None:
    """Candidates 2, 64; the candidate's gain is below epsilon, that of 2 above, so that 2 is sent throughout."""
    schedule = GraVAC(cf_min=2, cf_max=64, policy="geometric", ratio=32, epsilon=0.5, omega=0, window=1, exact=False)
    world = World(2, TopK(), schedule=schedule)
    schedule.prepare(100)
    for step in range(4):
        world.step([{"w": torch.randn(4096)} for _ in range(2)])
        assert world.decision is not None
        assert int((world.residual(0, "w") == 0).sum()) == 2048, step
        assert world.decision.cf == 2.0
    assert world.decision.levels == (2.0, 64.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_makes_all_skip_where_decisions_come_later(bad: float) -> None:
    schedule = GraVAC(cf_min=2, cf_max=64, epsilon=0.0, omega=0, window=1, exact=False)
    world, plain = (
        World(2, TopK(), schedule=schedule),
        World(2, TopK(), schedule=create_schedule(**schedule.describe())),
    )
    poisoned = torch.randn(64)
    poisoned[5] = bad
    for step in range(4):
        grads = [{"w": torch.randn(64, generator=torch.Generator().manual_seed(10 * step + w))} for w in range(2)]
        if step == 2:
            world.step([grads[0], {"w": poisoned}])
            assert world.skipped
        assert torch.equal(world.step(grads)[1]["w"], plain.step(grads)[1]["w"])


def kept_share(accs: list[dict[str, Tensor]], cf: float) -> float:
    """sum ||top-k||^2 / sum ||acc||^2 over tensors and workers."""
    kept = whole = 0.0
    for acc in accs:
        for tensor in acc.values():
            squares = tensor.double().flatten().square()
            kept += float(squares.topk(kept_elements(squares.numel(), cf)).values.sum())
            whole += float(squares.sum())
    return kept / whole


def test_gains_are_those_by_hand_and_decisions_are_obeyed() -> None:
    """cf_min 2; candidates 2, 4, 8, 32, 64; window 1, gains as they are."""
    schedule = GraVAC(cf_min=2, cf_max=64, epsilon=0.5, omega=0, window=1)
    world = World(4, TopK(), schedule=schedule)
    schedule.prepare(100)  # a hundred workers' average is the newest gain
    visited = []
    left = [{"a": torch.zeros(64), "b": torch.zeros(16, 8)} for _ in range(4)]
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        grads = [
            {"a": torch.randn(64, generator=generator), "b": torch.randn(16, 8, generator=generator)} for _ in left
        ]
        accs = [{name: g[name] + r[name] for name in g} for g, r in zip(grads, left, strict=True)]
        levels = schedule.levels
        means = world.step(grads)
        decision = world.decision
        assert decision is not None
        assert decision.gains == pytest.approx(tuple(kept_share(accs, cf) for cf in levels), rel=1e-5)
        level = 1 if decision.gains[1] >= 0.5 else 0 if decision.gains[0] >= 0.5 else -1
        assert decision.level == level
        assert decision.cf == (1.0 if level == -1 else levels[level])
        left = residuals(world, grads)
        for name, numel in (("a", 64), ("b", 128)):
            sent = numel if level == -1 else kept_elements(numel, decision.cf)
            assert int((left[0][name] == 0).sum()) == sent
            mean_left = sum(r[name] for r in left) / 4
            mean_acc = sum(acc[name] for acc in accs) / 4
            assert torch.allclose(means[0][name] + mean_left, mean_acc, atol=1e-5)
        visited.append(levels[1])
    assert visited == [2, 4, 8, 32, 64, 64]


def test_level_minus_one_is_the_plain_mean_and_leaves_exactly_nothing(random_grads: MakeGrads) -> None:
    for compressor in SPARSIFIERS:
        for workers in (1, 3):
            world = World(workers, compressor, schedule=GraVAC(cf_min=4, cf_max=16, epsilon=1))
            grads = random_grads(workers)
            mean = world.step(grads)[0]
            assert world.decision is not None
            assert world.decision.level == -1
            for name, plain in plain_means(grads).items():
                assert torch.allclose(mean[name].double(), plain, atol=1e-6)
            assert not any(t.any() for r in residuals(world, grads) for t in r.values())


def test_a_dense_step_sends_what_was_left_too() -> None:
    schedule = GraVAC(cf_min=2, cf_max=2, epsilon=0.7)
    world = World(1, TopK(), schedule=schedule)
    assert world.step([{"w": torch.tensor([3.0, 1.0])}])[0]["w"].tolist() == [3.0, 0.0]  # gain .9
    world.schedule.load_state_dict(schedule.state_dict() | {"gains": [None, None]})  # type: ignore[union-attr]
    assert world.step([{"w": torch.tensor([2.0, 1.0])}])[0]["w"].tolist() == [2.0, 2.0]  # gain .5: dense
    assert world.residual(0, "w").tolist() == [0.0, 0.0]


def test_a_cf_of_one_under_gravac_is_dense(random_grads: MakeGrads) -> None:
    world = World(2, TopK(), schedule=GraVAC(cf_min=1, cf_max=1, epsilon=0))
    grads = random_grads(2)
    mean = world.step(grads)[0]
    assert world.decision is not None
    assert world.decision.level == -1
    assert torch.allclose(mean["weight"].double(), plain_means(grads)["weight"], atol=1e-6)
    assert not world.residual(0, "weight").any()


@pytest.mark.parametrize("granularity", ["tensor", "bucket", "model"])
@pytest.mark.parametrize("compressor", SPARSIFIERS, ids=by_name)
def test_levels_change_with_the_residual_carried_over(
    compressor: Compressor, granularity: str, random_grads: MakeGrads
) -> None:
    schedule = GraVAC(cf_min=2, cf_max=32, epsilon=0, window=2)
    world = World(3, compressor, schedule=schedule, granularity=granularity)
    applied, given, cfs = torch.zeros(7, 12), torch.zeros(7, 12), set()
    for step in range(12):
        grads = random_grads(3, seed=step)
        means = world.step(grads)
        schedule.observe(1.0, 0.1)
        applied += means[0]["weight"]
        given += sum(g["weight"] for g in grads) / 3
        assert world.decision is not None
        cfs.add(world.decision.cf)
        assert all(torch.equal(m["weight"], means[0]["weight"]) for m in means)
    assert len(cfs) >= 3
    left = sum(world.residual(worker, "weight") for worker in range(3)) / 3
    assert torch.allclose(applied + left, given, atol=1e-4)


def test_excluded_tensors_do_not_count_in_the_gain() -> None:
    world = World(3, TopK(), schedule=GraVAC(cf_min=5, cf_max=5, epsilon=0), exclude=("bias",))
    world.step([{"w": torch.tensor([4.0, -3.0, 2.0, -1.0, 0.5]), "bias": torch.full((9,), 50.0)}] * 3)
    assert world.decision is not None
    assert world.decision.gains[0] == pytest.approx(0.528926, abs=5e-7)


@pytest.mark.parametrize(("gain", "value"), [("squared", 0.528926), ("norm", 0.727273), ("raw", 0.727273)])
def test_each_definition_of_the_gain(gain: str, value: float) -> None:
    world = World(2, TopK(), schedule=GraVAC(cf_min=5, cf_max=5, epsilon=0, gain=gain))
    world.step([{"w": torch.tensor([4.0, -3.0, 2.0, -1.0, 0.5])}] * 2)
    assert world.decision is not None
    assert world.decision.gains[0] == pytest.approx(value, abs=5e-7)


def test_a_zero_gradient_under_gravac(random_grads: MakeGrads) -> None:
    world = World(2, TopK(), schedule=GraVAC(cf_min=2))
    assert world.step([{"w": torch.zeros(8), "e": torch.zeros(0)}] * 2)[0]["w"].tolist() == [0.0] * 8
    assert not world.skipped


# -- warm-up


def test_warmup_sends_the_factor_in_force() -> None:
    world = World(2, TopK(), schedule=Warmup(steps_each=2, cfs=[1, 4, 8]))
    kept = []
    for _ in range(7):
        gradient = torch.randn(64)
        kept.append(int((world.step([{"w": gradient}] * 2)[0]["w"] != 0).sum()))
    assert kept == [64, 64, 16, 16, 8, 8, 8]


@pytest.mark.parametrize("method", [*SPARSIFIERS, DGC(momentum=0.9)], ids=repr)
def test_warmup_is_the_same_as_changing_the_factor_by_hand(method: Compressor) -> None:
    """So DGC's u and v, residuals, and SIDCo's stages go on when the factor changes."""
    world = World(2, method, schedule=Warmup(steps_each=2, cfs=[1, 4, 16]))
    by_hand = World(2, method.with_parameters(cf=1))
    by_hand._cf_at = lambda step: None
    for step in range(8):
        grads = [{"w": torch.randn(24, 16)} for _ in range(2)]
        if step in (2, 4):
            for part in (p for buckets in by_hand._buckets for bucket in buckets for p in bucket.parts):
                part.compressor = method.with_parameters(cf={2: 4, 4: 16}[step])
        expected = by_hand.step(grads)
        assert all(torch.equal(a["w"], b["w"]) for a, b in zip(world.step(grads), expected, strict=True))
    states = [w._buckets[1][0].parts[0].unit.state for w in (world, by_hand)]
    assert {k: v.tolist() for k, v in states[0].items()} == {k: v.tolist() for k, v in states[1].items()}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_warmup_of_the_exchange_equals_the_world(workers: int) -> None:
    schedule = Warmup(steps_each=1, cfs=[1, 4, 16])
    compressor = DGC(momentum=0.5)
    world = World(workers, compressor, schedule=schedule)
    grads = [[{"w": torch.randn(24, 16)} for _ in range(workers)] for _ in range(5)]
    real = ExchangeWorld(workers, compressor, grads[0][0], cf_at=schedule.cf_at)
    for step in range(5):
        for mine, theirs in zip(real.step(grads[step]), world.step(grads[step]), strict=True):
            assert torch.allclose(mine["w"], theirs["w"], atol=1e-6)
        assert {record.cf for record in real.records} == {[1, 4, 16, 16, 16][step]}
        assert real.records[0].bytes_sent == world.nbytes


# -- the world itself


def test_a_static_schedule_gives_the_factor() -> None:
    world = World(1, TopK(cf=2), schedule=Static(cf=5))
    assert world.step([{"w": torch.arange(1.0, 6.0)}])[0]["w"].tolist() == [0, 0, 0, 0, 5]


@pytest.mark.parametrize("schedule", [GraVAC(), Static(cf=10), Warmup(5), "gravac"])
def test_a_schedule_needs_a_method_with_levels(schedule: Any) -> None:
    with pytest.raises(ValueError, match=r"'qsgd' does not have.*use a sparse method such as topk"):
        World(2, "qsgd", schedule=schedule)


def test_a_world_checks_what_it_is_given() -> None:
    with pytest.raises(ValueError, match="size must be a whole number >= 1"):
        World(0)
    with pytest.raises(ValueError, match="expected the gradients of 2 workers, got 1"):
        World(2).step([{}])
    with pytest.raises(ValueError, match=r"\['cf'\] go with a compressor's name"):
        World(2, TopK(), cf=3)
    with pytest.raises(ValueError, match="did you mean 'topk'"):
        World(2, "topkk")
    with pytest.raises(ValueError, match="sequence of name globs"):
        World(2, "topk", exclude="1d")
    with pytest.raises(ValueError, match="needs granularity='tensor'"):
        World(2, "powersgd", granularity="model")
    world = World(1)
    with pytest.raises(KeyError):
        world.residual(0, "w")
    world.step([{"w": torch.ones(2)}])
    with pytest.raises(KeyError):
        world.residual(0, "v")
    with pytest.raises(ValueError, match="first step had no gradients of v"):
        world.step([{"w": torch.ones(2), "v": torch.ones(2)}])


def test_gradients_that_require_grad_are_taken_as_values() -> None:
    weight = torch.ones(3, requires_grad=True)
    mean = World(1, TopK(cf=3)).step([{"w": weight * 2}])[0]["w"]
    assert not mean.requires_grad
    assert int(mean.count_nonzero()) == 1


def test_two_worlds_with_the_same_names_are_independent(random_grads: MakeGrads) -> None:
    compressor = PowerSGD(rank=1)  # one object
    first, second = World(2, compressor), World(2, compressor)
    grads = random_grads(2)
    mean = first.step(grads)[0]["weight"]
    first.step(grads)
    assert torch.equal(second.step(grads)[0]["weight"], mean)


# -- the optimizer's exchange


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("compressor", "granularity"), METHODS_AND_UNITS)
def test_exchanges_between_threads_equal_the_simulation_bitwise(
    compressor: Compressor, granularity: str, workers: int, random_grads: MakeGrads
) -> None:
    options: dict[str, Any] = {"granularity": granularity, "bucket_mb": 0.0003, "exclude": ("scalar",)}
    world = World(workers, compressor, **options)
    real = ExchangeWorld(workers, compressor, random_grads(1)[0], **options)
    for step in range(4):
        grads = random_grads(workers, seed=step)
        if step == 2:
            grads = poisoned(grads, workers - 1, "weight", math.nan)
        expected, means = world.step(grads), real.step(grads)
        if compressor.checks_finite and step == 2:
            assert [record.skipped for record in real.records] == [True] * workers
            continue
        for mean, other in zip(means, expected, strict=True):
            assert mean.keys() == other.keys()
            assert all(torch.equal(mean[name].nan_to_num(9), other[name].nan_to_num(9)) for name in mean)
        assert real.records[0].bytes_sent == world.nbytes
    assert all(sorted(t.names) == sorted(real.transports[0].names) for t in real.transports)


@pytest.mark.parametrize("granularity", ["tensor", "model"])
@pytest.mark.parametrize("compressor", SPARSIFIERS, ids=by_name)
def test_exchanges_between_threads_equal_the_simulation_under_gravac(
    compressor: Compressor, granularity: str, random_grads: MakeGrads
) -> None:
    def gravac() -> GraVAC:
        return GraVAC(cf_min=2, cf_max=32, epsilon=0.5, window=2)

    world = World(3, compressor, schedule=gravac(), granularity=granularity)
    real = ExchangeWorld(
        3, world.compression, random_grads(1)[0], schedules=[gravac() for _ in range(3)], granularity=granularity
    )
    for step in range(8):
        grads = random_grads(3, seed=step)
        if step == 3:
            grads = poisoned(grads, 1, "conv", math.inf)
        expected, means = world.step(grads), real.step(grads)
        assert world.decision is not None
        assert {(r.cf, r.level, r.skipped) for r in real.records} == {
            (world.decision.cf, world.decision.level, world.skipped)
        }
        if not world.skipped:
            assert all(
                torch.equal(mean[n], other[n]) for mean, other in zip(means, expected, strict=True) for n in mean
            )


@pytest.mark.parametrize(("compressor", "granularity"), METHODS_AND_UNITS)
def test_one_worker_alone_equals_a_world_of_one(
    compressor: Compressor, granularity: str, random_grads: MakeGrads
) -> None:
    """Its collectives return the very buffer that they were given, which may be a view of the residual."""
    for single in ({"weight"}, set(random_grads(1)[0])):
        for made in (compressor, *(c for c in LOSS_FREE if granularity in granularities(c))):
            world = World(1, made, granularity=granularity)
            first = {name: g for name, g in random_grads(1)[0].items() if name in single}
            alone = ExchangeWorld(1, made, first, alone=True, granularity=granularity)
            for step in range(3):
                grads = [{name: random_grads(1, seed=step)[0][name] for name in first}]
                expected, means = world.step(grads)[0], alone.step(grads)[0]
                assert all(torch.equal(means[name], expected[name]) for name in expected), (made, step)


@pytest.mark.parametrize("compressor", [TopK(cf=4), PowerSGD(rank=1)], ids=by_name)
def test_residuals_are_kept_without_the_loss_scale(compressor: Compressor, random_grads: MakeGrads) -> None:
    """The scale is a power of two, so that this is exact, also where it changes."""
    plain = ExchangeWorld(2, compressor, random_grads(1)[0])
    scaled = ExchangeWorld(2, compressor, random_grads(1)[0])
    for step, scale in enumerate((2.0**10, 2.0**10, 2.0**9, 2.0**15)):
        grads = random_grads(2, seed=step)
        expected = plain.step(grads)[0]
        means = scaled.step([{n: t * scale for n, t in g.items()} for g in grads], scale=scale)[0]
        assert all(torch.equal(means[name] / scale, expected[name]) for name in expected)


def test_a_sum_is_the_mean_times_the_workers(method: Compressor, random_grads: MakeGrads) -> None:
    mean, total = (ExchangeWorld(2, method, random_grads(1)[0]) for _ in range(2))
    for step in range(2):
        grads = random_grads(2, seed=step)
        means, sums = mean.step(grads)[0], total.step(grads, summed=True)[0]
        assert all(torch.equal(sums[name], means[name] * 2) for name in means)


def test_sparse_gradients_travel_as_rows(method: Compressor) -> None:
    dense = [torch.zeros(5, 3) for _ in range(3)]
    dense[0][[1, 4]] = torch.randn(2, 3)
    dense[1][[4]] = torch.randn(1, 3)
    others = [torch.randn(6, 8) for _ in range(3)]
    grads: list[dict[str, Any]] = [{"e": d.to_sparse(1), "w": w} for d, w in zip(dense, others, strict=True)]
    grads[2]["e"] = None
    world = ExchangeWorld(3, method, {"e": dense[0], "w": others[0]}, sparse=["e"])
    means = world.step(grads)
    for mean in means:
        assert mean["e"].is_sparse
        assert torch.allclose(mean["e"].to_dense(), sum(dense) / 3, atol=1e-6)
        assert torch.equal(mean["w"], means[0]["w"])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("compressor", CHECKED, ids=by_name)
def test_a_sparse_gradient_that_is_not_finite_makes_all_skip(compressor: Compressor, value: float) -> None:
    good = {"e": torch.ones(5, 3).to_sparse(1), "w": torch.ones(6, 8)}
    bad = {"e": torch.full((5, 3), value).to_sparse(1), "w": torch.ones(6, 8)}
    for bucket_mb in (25.0, 1e-9):
        world = ExchangeWorld(
            2, compressor, {n: t.to_dense() for n, t in good.items()}, sparse=["e"], bucket_mb=bucket_mb
        )
        world.step([good, bad])
        assert [record.skipped for record in world.records] == [True, True]
        world.step([good, good])
        assert [record.skipped for record in world.records] == [False, False]


def test_a_step_makes_as_few_exchanges_as_it_can() -> None:
    grads = {f"l{i}.weight": torch.randn(10, 12) for i in range(25)} | {
        f"l{i}.bias": torch.randn(10) for i in range(25)
    }
    for compressor, exchanges in ((PowerSGD(rank=2), 2), (TopK(cf=10), 2), (NoCompression(), 1), (RandomK(cf=10), 1)):
        world = ExchangeWorld(2, compressor, grads, exclude=("1d",))
        world.step([grads, grads])
        assert world.records[0].exchanges == exchanges, compressor


def test_shapes_must_stay_and_agree() -> None:
    with pytest.raises(ValueError, match=r"worker 1.*shape \(3,\).*\(6,\)"):
        World(2, "topk").step([{"w": torch.ones(6)}, {"w": torch.ones(3)}])


@pytest.mark.parametrize("wrong", [3, TopK, None])
def test_a_world_takes_a_compressor_or_a_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match="compression must be"):
        World(2, wrong)


def test_an_exclusion_that_matches_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    World(1, "topk", exclude=("layer.*",)).step([{"w": torch.ones(6)}])
    assert "layer.*" in caplog.text


def test_a_mean_that_a_half_cannot_hold_is_its_largest() -> None:
    """Two steps' worth of what was left behind: Inf would reach the parameters, and nothing would say so."""
    world = World(2, TopK(cf=2))
    grads = [{"w": torch.tensor([-60_000.0, 65_504.0], dtype=torch.float16)}] * 2
    assert world.step(grads)[0]["w"].tolist() == [0.0, 65_504.0]
    assert world.step(grads)[0]["w"].tolist() == [-65_504.0, 0.0]
    assert not world.skipped


# -- PowerSGD by rank ------------------------------------------------------------------------------------------------


def test_a_factor_gives_powersgd_its_rank() -> None:
    """At most n1 n2 / cf floats travel, and one column more would be too many."""
    world = World(2, "powersgd", schedule=Warmup(1, cfs=[2, 4, 16], cf=1000))
    for cf in (2, 4, 16, 1000, 1000):
        grads = [{"w": torch.randn(60, 40)} for _ in range(2)]
        means = world.step(grads)
        rank = max(1, int(2400 / (100 * cf)))
        assert world.nbytes == 4 * 100 * rank
        assert torch.linalg.matrix_rank(means[0]["w"]) == rank


def test_gains_of_powersgds_ranks_are_those_by_hand() -> None:
    """Of one worker what is sent is what was measured, at either rank."""
    for epsilon, level in ((0.01, 1), (0.9999, -1)):
        schedule = GraVAC(cf_min=3, cf_max=12, window=1, epsilon=epsilon, omega=0, policy="geometric", ratio=4)
        world = World(1, "powersgd", schedule=schedule)
        matrix = torch.randn(60, 40) @ torch.diag(torch.arange(40) + 1.0)
        for step in range(3):
            whole = matrix if step == 0 else matrix + world.residual(0, "w")
            mean = world.step([{"w": matrix}])[0]["w"]
            decision = world.decision
            assert decision is not None
            assert decision.level == (level if step or level < 0 else 1)
            share = float(mean.double().square().sum() / whole.double().square().sum())
            if decision.level < 0:
                assert torch.allclose(mean, whole)
            elif step == 0:
                assert decision.gains[1] == pytest.approx(share, rel=1e-4)
            torch.testing.assert_close(mean + world.residual(0, "w"), whole, rtol=1e-4, atol=1e-3)


def test_powersgd_under_gravac_keeps_the_columns_that_a_lower_rank_does_not_use() -> None:
    schedule = GraVAC(cf_min=3, cf_max=12, window=1, epsilon=0.0, omega=0, policy="geometric", ratio=4)
    world = World(2, "powersgd", schedule=schedule)
    for _ in range(4):
        world.step([{"w": torch.randn(60, 40)} for _ in range(2)])
        assert world._buckets[0][0].parts[0].unit.state["q"].shape == (40, 8)
    assert world.nbytes == 4 * 100 * 2


@pytest.mark.parametrize("shape", [(7,), (2, 2), (0, 5), ()])
def test_what_powersgd_sends_dense_needs_no_decision(shape: tuple[int, ...]) -> None:
    world = World(2, "powersgd", schedule=GraVAC(window=1))
    grads = [{"w": torch.randn(shape)} for _ in range(2)]
    assert torch.allclose(world.step(grads)[0]["w"], (grads[0]["w"] + grads[1]["w"]) / 2)


def test_powersgd_under_gravac_may_start_dense() -> None:
    schedule = GraVAC(cf_min=1, cf_max=12, window=1, epsilon=0.99, omega=0, policy="geometric", ratio=12)
    world = World(2, "powersgd", schedule=schedule)
    sent = []
    for _ in range(4):
        matrix = torch.randn(60, 40)
        means = world.step([{"w": matrix}] * 2)
        assert world.decision is not None
        sent.append(world.decision.cf)
        assert torch.allclose(means[0]["w"], matrix, atol=1e-5)
    assert sent == [1] * 4
    assert world.schedule is not None
    assert world.schedule.levels == (1, 12)
    assert world.decision.gains[0] == pytest.approx(1, abs=1e-6)
    assert 0 < world.decision.gains[1] < 1
