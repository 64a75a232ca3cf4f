"""Settings that a schedule assigns to units: levels and methods change mid-run, and nothing of a gradient is lost."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from in_process import ExchangeWorld
from scripted import Scripted
from torch import Tensor

from hvdcomp import checkpointing, compressors
from hvdcomp.assignment import compressors_of
from hvdcomp.buckets import Part, Spec
from hvdcomp.compressors import Compressor, PowerSGD, TopK
from hvdcomp.compressors.requests import Unit
from hvdcomp.evidence import SMALL, SampledSum, Watch
from hvdcomp.feedback import ErrorFeedback
from hvdcomp.plugin import layout_of
from hvdcomp.schedules import Setting, Warmup
from hvdcomp.simulation import World

MakeGrads = Callable[..., list[dict[str, Tensor]]]

METHODS: tuple[Setting, ...] = (
    {"name": "topk", "cf": 4},
    {"name": "powersgd", "rank": 1, "small_matrix_rule": False},
    {"name": "none"},
    {"name": "redsync", "cf": 3},
    {"name": "oktopk", "cf": 4},
    {"name": "randomk", "cf": 2},
    {"name": "onebit"},
    {"name": "gradiveq", "slice_size": 4, "components": 2, "training_steps": 1, "quantised_steps": 7},
    {"name": "dgc", "cf": 4, "correction": False},
)


def totals(stream: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The sum over steps of the workers' mean gradient."""
    names = stream[0][0]
    return {
        n: torch.stack([worker[n].double() for step in stream for worker in step]).sum(0) / len(stream[0])
        for n in names
    }


def assert_nothing_lost(world: World, stream: Sequence[Any], applied: Mapping[str, Tensor]) -> None:
    for name, given in totals(stream).items():
        left = torch.stack([world.residual(worker, name).double() for worker in range(world.size)]).mean(0)
        torch.testing.assert_close(applied[name] + left, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workers", [1, 3])
def test_methods_follow_each_other_and_nothing_is_lost(workers: int, random_grads: MakeGrads) -> None:
    """Every method after every other, one unit a step behind."""
    order = [index for pair in itertools.permutations(range(len(METHODS)), 2) for index in pair]
    plan = {step: [index, order[max(step - 1, 0)], index, index, index] for step, index in enumerate(order)}
    world = World(workers, TopK(cf=4), schedule=Scripted(METHODS, plan))
    applied = {name: torch.zeros(g.shape, dtype=torch.float64) for name, g in random_grads(1)[0].items()}
    stream = []
    for step in range(len(order)):
        stream.append(random_grads(workers, seed=step))
        means = world.step(stream[-1])
        assert all(torch.equal(means[0][n], other[n]) for other in means for n in other)
        for name, mean in means[0].items():
            applied[name] += mean
        assert_nothing_lost(world, stream, applied)


@pytest.mark.parametrize("lossy", ["fp16", "bf16", "qsgd", "natural", "none"])
def test_a_method_without_feedback_sends_what_was_left_and_keeps_nothing(lossy: str, random_grads: MakeGrads) -> None:
    world = World(2, TopK(cf=20), schedule=Scripted([{}, {"name": lossy}], {2: 1}))
    stream = [random_grads(2, seed=step) for step in range(4)]
    applied = torch.zeros(7, 12, dtype=torch.float64)
    for step, grads in enumerate(stream):
        held = torch.stack([world.residual(w, "weight") for w in range(2)]).mean(0) if step else None
        mean = world.step(grads)[0]["weight"]
        applied += mean
        if step == 3:
            assert held is not None
            assert held.abs().max() > 1
            given = held + (grads[0]["weight"] + grads[1]["weight"]) / 2
            assert (mean - given).abs().max() <= {"qsgd": 2.0, "natural": 4.0}.get(lossy, 0.05)
            assert not world.residual(0, "weight").any()


def test_a_level_changes_as_in_a_warm_up(random_grads: MakeGrads) -> None:
    """Bitwise: residuals and the method's own state go on."""
    for method in (TopK(cf=2), compressors.create("sidcoe", cf=2), compressors.create("dgc", cf=2, momentum=0.9)):
        by_hand = World(2, method, schedule=Warmup(2, cfs=[2, 4, 8]))
        assigned = World(2, method, schedule=Scripted([{"cf": 2}, {"cf": 4}, {"cf": 8}], {1: 1, 3: 2}))
        for step in range(6):
            grads = random_grads(2, seed=step)
            expected, means = by_hand.step(grads), assigned.step(grads)
            assert all(torch.equal(means[0][name], expected[0][name]) for name in means[0]), (method, step)


def test_the_factor_of_different_levels_is_that_of_all_elements_together(random_grads: MakeGrads) -> None:
    """And not of bytes, of which 99 % of a tensor, with indices, are more than the tensor."""
    settings = [{"cf": 1.25}, {"cf": 4}, {"name": "none"}, {"name": "powersgd", "rank": 1}]
    numel = {n: g.numel() for n, g in random_grads(1)[0].items()}
    others = list(numel)[1:]
    plan = {step: [index, *[other] * len(others)] for step, (index, other) in enumerate([(1, 0), (2, 1), (3, 0)])}
    real = ExchangeWorld(1, TopK(), random_grads(1)[0], schedules=[Scripted(settings, plan)])
    found = []
    for step in range(4):
        real.step(random_grads(1, seed=step))
        found.append(real.records[0])
    units = [unit.name for unit in real.exchanges[0].assignment.schedule.units]  # type: ignore[union-attr]
    one, rest = numel[units[0]], sum(numel[name] for name in units[1:])
    assert [record.cf for record in found[:3]] == pytest.approx(
        [1.25, (one + rest) / (one / 4 + rest / 1.25), (one + rest) / (one + rest / 4)]
    )
    assert found[1].bytes_sent > found[1].bytes_dense, "bytes would have told a factor below 1"
    assert found[3].cf == found[3].bytes_dense / found[3].bytes_sent, "PowerSGD has no factor"


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2)])
def test_powersgd_goes_on_from_the_columns_that_it_has(before: int, after: int) -> None:
    matrix, q = torch.randn(6, 5), torch.randn(5, before)
    found = PowerSGD(rank=after)._q(matrix, after, Unit("w", matrix.shape, state={"q": q}))
    same = min(before, after)
    torch.testing.assert_close(found[:, :same], (q / q.abs().amax(dim=0))[:, :same])
    assert torch.linalg.matrix_rank(found) == after


def test_a_basis_of_another_size_is_not_gone_on_with() -> None:
    part = Part(Unit("w", torch.Size([8]), state={"basis": torch.eye(4)}), [], compressors.create("gradiveq"), None)
    part.switch(compressors.create("gradiveq", slice_size=128, components=16))
    assert part.unit.state == {}
    part.unit.state = {"q": torch.eye(2)}
    part.switch(PowerSGD(rank=1))
    assert part.unit.state == {}


def test_units_change_alone(random_grads: MakeGrads) -> None:
    schedule = Scripted([{"cf": 1}, {"cf": 1000}], {0: [0, 1, 0, 0, 1]})
    world = World(2, TopK(cf=50), schedule=schedule)
    world.step(random_grads(2))
    assert [unit.name for unit in schedule.units] == ["bias", "conv", "empty", "scalar", "weight"]
    assert schedule.units[4].numel == 84
    assert world.switched == {"conv": {"cf": 1000}, "weight": {"cf": 1000}}
    means = world.step(random_grads(2, seed=1))
    assert (means[0]["bias"] != 0).sum() == 7
    assert 1 <= (means[0]["weight"] != 0).sum() <= 2
    assert world.switched == {}


def test_excluded_tensors_stay_dense_by_the_rules_of_all_methods(random_grads: MakeGrads) -> None:
    schedule = Scripted([{"name": "none"}, {"name": "topk", "cf": 4}], {})
    layout = layout_of(schedule, compressors.NoCompression(), "tensor", 25.0, None)
    (bucket,) = layout.buckets([Spec.of(name, g) for name, g in random_grads(1)[0].items()])
    assert [part.unit.name for part in bucket.parts if part.assigned] == ["conv", "empty", "weight"]
    assert all(part.feedback is not None for part in bucket.parts if part.assigned)


# -- what cannot be assigned ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "settings", "message"),
    [
        (TopK(), [], "no settings"),
        (TopK(), [{"rank": 2}], "unknown parameter of compression 'topk'.*'rank'"),
        (TopK(), [{"cf": 0.5}], "cf must be >= 1, got 0.5"),
        (TopK(), [{"name": "topkk"}], "did you mean 'topk'"),
        (TopK(), [{}, {"name": "dgc"}], r"cannot switch between DGC.*TopK.*momentum.*correction=False"),
        (compressors.DGC(), [{"name": "none"}], "cannot switch between DGC"),
        (compressors.DGC(), [{}, {"correction": False}], "cannot switch between DGC"),
        (compressors.Signum(), [{}, {"name": "topk"}], "cannot switch between Signum"),
    ],
)
def test_settings_that_do_not_fit_are_refused(own: Compressor, settings: list[Setting], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compressors_of(Scripted(settings), own)


def test_matrices_cannot_be_cut_from_a_bucket() -> None:
    with pytest.raises(ValueError, match="powersgd works on matrices"):
        World(2, TopK(), schedule=Scripted([{}, {"name": "powersgd"}]), granularity="model")


@pytest.mark.parametrize("wrong", [[0], [0, 0, 0, 0, 2], [0, 0, 0, 0, -1], [0, 0, 0, 0, 0.5]])
def test_an_assignment_that_is_none_is_refused(wrong: list[Any], random_grads: MakeGrads) -> None:
    world = World(2, TopK(), schedule=Scripted([{}, {"cf": 4}], {0: wrong}))
    with pytest.raises(ValueError, match="each of 5 units an index below 2"):
        world.step(random_grads(2))


def test_a_schedule_that_fails_fails_on_every_worker(random_grads: MakeGrads) -> None:
    schedules = [Scripted([{}], fails_at=1) for _ in range(3)]
    real = ExchangeWorld(3, TopK(), random_grads(1)[0], schedules=schedules)
    real.step(random_grads(3))
    faults = []
    for exchange in real.exchanges:
        conclude = exchange.conclude

        def catching(*arguments: Any, conclude: Any = conclude) -> None:
            try:
                conclude(*arguments)
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")

        exchange.conclude = catching  # type: ignore[method-assign]
    real.step(random_grads(3))
    assert sorted(faults)[0] == "ArithmeticError: as planned"
    assert len(faults) == 3
    assert all("failed on worker 0" in fault for fault in sorted(faults)[1:])


# -- real exchanges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["tensor", "bucket"])
def test_exchanges_between_threads_equal_the_simulation(granularity: str, random_grads: MakeGrads) -> None:
    methods = [m for m in METHODS if m["name"] != "powersgd" or granularity == "tensor"]

    def scripted() -> Scripted:
        plan = {0: 1, 1: 2, 3: 3, 4: 0, 5: 2, 6: 2, 7: 4}
        return Scripted(methods, plan, phase=2)

    options: dict[str, Any] = {"granularity": granularity, "bucket_mb": 0.0003}
    world = World(2, TopK(cf=4), schedule=scripted(), **options)
    schedules = [scripted(), scripted()]
    real = ExchangeWorld(2, TopK(cf=4), random_grads(1)[0], schedules=schedules, **options)
    for step in range(9):
        grads = random_grads(2, seed=step)
        if step == 5:
            grads[1]["weight"][3, 3] = math.nan
        expected, means = world.step(grads), real.step(grads)
        assert [record.skipped for record in real.records] == [step == 5] * 2
        assert [record.switched for record in real.records] == [world.switched] * 2
        if step != 5:
            assert all(
                torch.equal(mean[n], other[n]) for mean, other in zip(means, expected, strict=True) for n in mean
            )
            assert real.records[0].bytes_sent == world.nbytes
    assert schedules[1].seen == []
    assert [e.step for e in schedules[0].seen] == [0, 1, 2, 3, 4, 6, 7, 8]


@pytest.mark.parametrize("now", [0, 1, 2])
def test_a_skipped_step_changes_nothing_whatever_is_assigned(now: int, random_grads: MakeGrads) -> None:
    """Also where the mean is written over the gradient before anybody knows of the NaN."""
    settings = [{"cf": 4}, {"name": "none"}, {"name": "powersgd", "rank": 1}]

    def run(with_nan: bool) -> tuple[ExchangeWorld, Scripted]:
        schedule = Scripted(settings, {0: now}, phase=5)
        real = ExchangeWorld(2, TopK(cf=4), random_grads(1)[0], schedules=[schedule, Scripted(settings)])
        for step in range(5):
            if step == 3 and with_nan:
                for name in ("weight", "bias"):
                    grads = random_grads(2, seed=99)
                    grads[1][name].view(-1)[0] = math.nan
                    real.step(grads)
                    assert [record.skipped for record in real.records] == [True] * 2
                    assert all(record.switched == {} for record in real.records)
            real.step(random_grads(2, seed=step))
        return real, schedule

    (left, watched), (right, other) = run(True), run(False)
    for a, b in zip(left.exchanges, right.exchanges, strict=True):
        for one, two in zip(a.buckets, b.buckets, strict=True):
            for mine, its in zip(one.parts, two.parts, strict=True):
                assert mine.feedback is not None
                assert its.feedback is not None
                torch.testing.assert_close(mine.feedback.residual, its.feedback.residual, rtol=0, atol=1e-5)
    for sums, expected in zip(watched.seen[-1].sums, other.seen[-1].sums, strict=True):
        assert sums.total == pytest.approx(expected.total, abs=1e-4)
        assert sums.squares == pytest.approx(expected.squares, abs=1e-4)
    for overlap, wanted in zip(watched.seen[-1].overlaps, other.seen[-1].overlaps, strict=True):
        assert overlap.sum_squares == wanted.sum_squares


def test_a_resumed_run_equals_an_unbroken_one_bitwise(random_grads: MakeGrads) -> None:
    def make() -> tuple[ExchangeWorld, list[Scripted]]:
        schedules = [Scripted(METHODS, {0: 1, 2: [0, 1, 2, 3, 4], 5: 1}, phase=4) for _ in range(2)]
        return ExchangeWorld(2, TopK(cf=4), random_grads(1)[0], schedules=schedules), schedules

    unbroken, expected = make()
    for before in range(7):
        saving, _ = make()
        for step in range(before):
            saving.step(random_grads(2, seed=step))
        resumed, schedules = make()
        for exchange, old, schedule in zip(resumed.exchanges, saving.exchanges, schedules, strict=True):
            file = io.BytesIO()
            torch.save(checkpointing.state_of(old), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            specs = {spec.name: spec for bucket in exchange.buckets for spec in bucket.members}
            chosen = checkpointing.choose(state, exchange.transport, specs, "error")
            checkpointing.load_schedule(schedule, chosen)
            checkpointing.restore(exchange, chosen)
        for step in range(before, 9):
            means = resumed.step(random_grads(2, seed=step))
        if before == 0:
            for step in range(9):
                unbroken.step(random_grads(2, seed=step))
            reference = means
        assert all(torch.equal(means[0][name], reference[0][name]) for name in means[0]), before
        assert repr(schedules[0].seen[-1]) == repr(expected[0].seen[-1])  # nan is not equal to itself
        states = [checkpointing.state_of(world.exchanges[0]) for world in (resumed, unbroken)]
        assert states[0]["assignment"]["indices"] == states[1]["assignment"]["indices"]
        for name, residual in states[0]["residuals"].items():
            assert torch.equal(residual, states[1]["residuals"][name])


# -- evidence -------------------------------------------------------------------------------------------------------


def test_evidence_is_of_the_first_workers_own_raw_gradients_over_the_phase(random_grads: MakeGrads) -> None:
    schedule = Scripted([{"cf": 10}], phase=3)
    world = World(2, TopK(), schedule=schedule)
    stream = [random_grads(2, seed=step) for step in range(6)]
    for step, grads in enumerate(stream):
        world.step(grads, lr=0.1, loss=float(step))
        if step in (2, 5):
            evidence = schedule.seen[-1]
            assert (evidence.phase_steps, evidence.lr, evidence.loss) == (3, 0.1, float(step))
            for unit, sums, overlap in zip(schedule.units, evidence.sums, evidence.overlaps, strict=True):
                total = torch.stack([stream[s][0][unit.name].double() for s in range(step - 2, step + 1)]).sum(0)
                left = world.residual(0, unit.name).double()
                assert sums.total == pytest.approx(float(total.sum()), abs=1e-4)
                assert sums.norm == pytest.approx(float(total.norm()), rel=1e-5)
                assert overlap.residual_sum == pytest.approx(float((left * total).sum()), rel=1e-4, abs=1e-4)
                assert overlap.sum_squares == pytest.approx(float(total.square().sum()), rel=1e-5)
                assert overlap.residual_squares == pytest.approx(float(left.square().sum()), rel=1e-5)
        else:
            assert (schedule.seen[-1].phase_steps, schedule.seen[-1].sums, schedule.seen[-1].overlaps) == (0, (), ())


def test_a_loss_scale_is_no_part_of_the_sums(random_grads: MakeGrads) -> None:
    seen = []
    for scale in (1.0, 1024.0):
        schedule = Scripted([{"cf": 4}, {"name": "none"}], {1: 1}, phase=4)
        real = ExchangeWorld(1, TopK(), random_grads(1)[0], schedules=[schedule])
        for step in range(4):
            real.step([{n: g * scale for n, g in random_grads(1, seed=step)[0].items()}], scale=scale)
        seen.append(schedule.seen[-1])
    assert seen[0].sums == seen[1].sums
    assert seen[0].overlaps == seen[1].overlaps


def test_what_nobody_wants_costs_no_memory(random_grads: MakeGrads) -> None:
    for phase, expected in ((0, 0), (2, 2 * 4 * (7 + 108 + 1 + 84))):
        real = ExchangeWorld(2, TopK(), random_grads(1)[0], schedules=[Scripted([{}], phase=phase) for _ in range(2)])
        first, second = (exchange.assignment for exchange in real.exchanges)
        assert first is not None
        assert second is not None
        assert (first.nbytes, second.nbytes) == (expected, 0)


@pytest.mark.parametrize("numel", [0, 1, 100, SMALL, SMALL + 1, 100_001, 2_000_003])
def test_a_sample_is_small_and_of_all_places(numel: int) -> None:
    sample = SampledSum(numel)
    taken = sample.of(torch.arange(numel, dtype=torch.float64)).long()
    assert taken.numel() == sample.total.numel() == (numel if numel <= SMALL else max(SMALL, numel // 100) // 64 * 64)
    assert taken.unique().numel() == taken.numel()
    if numel > SMALL:
        blocks = taken.view(-1, 64)
        assert (blocks.diff(dim=1) == 1).all()
        assert blocks.diff(dim=0).max() <= 2 * numel / len(blocks) + 64
        columns = (taken % 64_000 // 64).unique()  # a fixed stride would meet few places in rows of so many elements
        assert columns.numel() > 0.6 * min(1000, len(blocks))


def test_a_watch_adds_up_takes_back_and_begins_anew() -> None:
    part = Part(
        Unit("w", torch.Size([6])), [Spec("w", torch.Size([6]), torch.float32, torch.device("cpu"))], TopK(), None
    )
    part.feedback = ErrorFeedback(6, torch.float32, torch.device("cpu"))
    watch = Watch(sums=True, overlaps=True)
    first, second = torch.arange(6.0), torch.ones(6)
    for gradient, made in ((first, True), (second, False), (torch.full((6,), math.nan), True), (second, True)):
        watch.see(part, [(0, gradient)], 1.0)
        watch.keep() if made else watch.undo()
    saved = copy.deepcopy(watch.state_dict())
    part.feedback.residual.fill_(2.0)
    total = first + second
    steps, (sums,), (overlap,) = watch.end_phase([part])
    assert (steps, sums.total, sums.squares) == (3, float(total.sum()), float(total.square().sum()))
    assert (overlap.residual_sum, overlap.sum_squares) == (2 * sums.total, sums.squares)
    assert overlap.residual_squares == 24
    assert watch.end_phase([part])[1][0].squares == 0
    again = Watch(sums=True, overlaps=True)
    again.load_state_dict(saved, [part])
    assert again.end_phase([part]) == (3, (sums,), (overlap,))
