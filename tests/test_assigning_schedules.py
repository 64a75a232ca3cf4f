"""Accordion, AdaQS, ScaDLES and the batch schedules: traces that pin their decisions."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hvdcomp import schedules
from hvdcomp.assignment import compressors_of
from hvdcomp.compressors import PowerSGD, TopK
from hvdcomp.schedules import (
    DENSE,
    Accordion,
    AccordionBatchSize,
    AdaQS,
    Assigning,
    Evidence,
    ScaDLES,
    Schedule,
    SmithBatchSize,
    Statistics,
    Sums,
    UnitForm,
)
from hvdcomp.schedules.adaqs import msdr
from hvdcomp.simulation import World
from hvdcomp.training.models import MODELS

LOW, HIGH = 0, 1


def accordion(units: int = 4, **given: Any) -> Accordion:
    schedule = Accordion(**{"low": {"rank": 2}, "high": {"rank": 1}, "steps_per_epoch": 1, "interval": 1, **given})
    schedule.prepare(2)
    schedule.prepare_units([UnitForm(f"layer.{n}", (4, 4)) for n in range(units)])
    return schedule


def feed(schedule: Assigning, norms: Sequence[float], *, lr: float = 0.1, next_lr: float | None = None) -> list[int]:
    """One step that ends with these norms, if a phase ends with it."""
    sums = tuple(Sums(0.0, norm**2) for norm in norms) if schedule.ends_phase() else ()
    return list(schedule.assign(Evidence(0, lr=lr, next_lr=lr if next_lr is None else next_lr, sums=sums)))


# -- Accordion ------------------------------------------------------------------------------------------------------


def test_accordion_compares_each_tensors_norm_with_that_of_the_last_look() -> None:
    schedule = accordion()
    assert feed(schedule, [1, 2, 0, 1]) == [LOW] * 4  # the first epoch has nothing to compare with
    assert feed(schedule, [0.4, 1.5, 5, 0.5]) == [LOW, HIGH, LOW, LOW]
    assert feed(schedule, [0.4, 3.1, 5, 0.5]) == [HIGH, LOW, HIGH, HIGH]


def test_accordion_sends_little_compressed_until_the_first_look_is_compared() -> None:
    assert accordion().first == LOW
    assert accordion().settings == ({"rank": 2}, {"rank": 1})


def test_a_zero_norm_is_critical_and_so_is_what_follows_it() -> None:
    schedule = accordion(units=1)
    assert [feed(schedule, [norm])[0] for norm in (1, 0, 0, 1, 1)] == [LOW, LOW, LOW, LOW, HIGH]


def test_accordion_looks_after_the_first_and_every_interval_th_epoch() -> None:
    schedule = accordion(units=1, steps_per_epoch=2, interval=3)
    looks = []
    for step in range(16):
        gathered = schedule.gathers
        looks.append(schedule.ends_phase())
        assert gathered == (step // 2 % 3 == 0)
        schedule.assign(Evidence(step, sums=(Sums(0, 1.0),) if looks[-1] else ()))
    assert [step for step, look in enumerate(looks) if look] == [1, 7, 13]


def test_between_looks_settings_stay() -> None:
    schedule = accordion(units=1, interval=2)
    assert [feed(schedule, [norm])[0] for norm in (1, 9, 1, 9, 5)] == [LOW, LOW, HIGH, HIGH, LOW]


def test_after_a_drop_of_the_rate_all_is_low_until_the_next_look() -> None:
    schedule = accordion(units=2, interval=3)
    assert feed(schedule, [1, 1]) == [LOW, LOW]
    feed(schedule, [1, 1]), feed(schedule, [1, 1])
    assert feed(schedule, [1, 1]) == [HIGH, HIGH]
    assert feed(schedule, [], next_lr=0.01) == [LOW, LOW]
    assert feed(schedule, [], lr=0.01) == [LOW, LOW]
    assert feed(schedule, [1, 1], lr=0.01) == [HIGH, HIGH]


def test_a_drop_that_nobody_told_is_seen_with_its_first_step() -> None:
    schedule = accordion(units=1)
    feed(schedule, [1])
    assert feed(schedule, [1]) == [HIGH]
    assert feed(schedule, [1], lr=0.01) == [LOW]
    assert feed(schedule, [1], lr=0.01) == [HIGH]


@pytest.mark.parametrize(("lr_drop", "expected"), [(0.75, HIGH), (0.999, LOW)])
def test_a_rate_that_falls_a_little_every_step_is_no_drop(lr_drop: float, expected: int) -> None:
    schedule = accordion(units=1, lr_drop=lr_drop)
    levels = [feed(schedule, [1], lr=math.cos(step / 100), next_lr=math.cos((step + 1) / 100)) for step in range(50)]
    assert levels[10:] == [[expected]] * 40


def test_eta_is_inclusive() -> None:
    schedule = accordion(units=2, eta=0.25)
    feed(schedule, [4, 4])
    assert feed(schedule, [3, 3.01]) == [LOW, HIGH]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"low": None}, "needs two settings"),
        ({"steps_per_epoch": None}, r"steps_per_epoch=len\(loader\)"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be a whole number >= 1"),
        ({"low": 2}, "low must be parameters"),
        ({"eta": 2}, "eta must be between 0 and 1, got 2"),
        ({"lr_drop": 1}, "lr_drop must be below 1"),
    ],
)
def test_accordion_refuses_what_it_cannot_use(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assert accordion(**given).settings


@pytest.mark.parametrize(("rank", "floats"), [(1, 45_935), (2, 82_260), (4, 154_910)])
def test_floats_of_an_iteration_are_the_papers(rank: int, floats: int) -> None:
    """From the compressor's own requests, for the settings that Accordion switches between."""
    schedule = accordion(low={"rank": rank}, high={"rank": 1})
    low, _ = compressors_of(schedule, PowerSGD())
    shapes = [p.shape for p in MODELS.find("resnet18-cifar10").factory().parameters()]
    assert sum(math.prod(shape) for shape in shapes) == 11_173_962
    sent = [volume.nbytes for shape in shapes for volume in low.requests(shape, 4)]
    assert sum(sent) == 4 * floats
    ratio = {1: 243.26, 2: 135.84, 4: 72.13}[rank]
    assert round(11_173_962 / floats, 2) == pytest.approx(ratio, abs=0.006)


def test_accordion_over_topk_switches_tensors_as_their_gradients_settle() -> None:
    schedule = Accordion({"cf": 2}, {"cf": 20}, steps_per_epoch=2, interval=1)
    world = World(2, TopK(), schedule=schedule)
    changes = []
    for step in range(8):
        settled = {"moving": torch.full((40,), 2.0**-step), "steady": torch.ones(40)}
        world.step([settled, settled], lr=0.1, next_lr=0.1)
        changes.append(world.switched)
    assert changes[3] == {"steady": {"cf": 20}}
    assert all(not change for step, change in enumerate(changes) if step != 3)


# -- batch sizes ----------------------------------------------------------------------------------------------------


def test_the_batch_grows_once_the_gradient_settles_and_never_shrinks() -> None:
    sizes = AccordionBatchSize(512, 4096, interval=2)
    trace = [(1.0, 512), (9.0, 512), (0.4, 512), (9.0, 512), (0.3, 4096), (0.3, 4096), (9.0, 4096)]
    assert [sizes.after_epoch(norm, 0.1) for norm, _ in trace] == [batch for _, batch in trace]
    assert sizes.factor == 8
    assert sizes.passes(512) == 8
    assert sizes.after_epoch(9.0, 0.1, 0.01) == 4096


def test_the_batch_may_shrink_where_that_is_wanted() -> None:
    sizes = AccordionBatchSize(512, 4096, interval=1, shrinks=True)
    assert [sizes.after_epoch(norm, 0.1) for norm in (1, 1, 9, 9)] == [512, 4096, 512, 4096]
    assert sizes.after_epoch(9, 0.1, 0.01) == 512


def test_a_batch_schedule_resumes() -> None:
    norms = [random.Random(1).uniform(0.1, 3) for _ in range(20)]
    whole = AccordionBatchSize(interval=2, shrinks=True)
    expected = [whole.after_epoch(norm, 0.1) for norm in norms]
    for at in range(20):
        first, second = (AccordionBatchSize(interval=2, shrinks=True) for _ in range(2))
        before = [first.after_epoch(norm, 0.1) for norm in norms[:at]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + [second.after_epoch(norm, 0.1) for norm in norms[at:]] == expected


def test_a_batch_is_whole_passes() -> None:
    with pytest.raises(ValueError, match="high must be a multiple of low, got 1000 of 512"):
        AccordionBatchSize(512, 1000)
    with pytest.raises(ValueError, match="per_pass must divide the batch of 512, got 100"):
        AccordionBatchSize().passes(100)


def test_smiths_batch_is_multiplied_where_the_rate_would_be_divided() -> None:
    sizes = SmithBatchSize(128, high=1280)
    assert [sizes.at(lr, 0.1) for lr in (0.1, 0.02, 0.01)] == [(128, 0.1), (640, 0.1), (1280, 0.1)]
    assert sizes.at(0.001, 0.1) == (1280, pytest.approx(0.01))
    assert SmithBatchSize(128).at(0.001, 0.1) == (12800, pytest.approx(0.1))
    assert sizes.at(0.2, 0.1) == (128, 0.2)


def test_smiths_batch_waits_for_the_end_of_a_warm_up_and_resumes() -> None:
    rates = [0.1, 0.2, 0.4, 0.4, 0.1, 0.1, 0.01]
    whole = SmithBatchSize(128, high=1280)
    batches = [whole.after_epoch(1.0, *pair) for pair in itertools.pairwise(rates)]
    assert batches == [128, 128, 128, 512, 512, 1280]
    assert (whole.factor, whole.passes(256), whole.gathers) == (10, 5, False)
    assert SmithBatchSize(128).after_epoch(1.0, 0.1) == 128
    for at in range(6):
        first, second = (SmithBatchSize(128, high=1280) for _ in range(2))
        pairs = list(itertools.pairwise(rates))
        before = [first.after_epoch(1.0, *pair) for pair in pairs[:at]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + [second.after_epoch(1.0, *pair) for pair in pairs[at:]] == batches
    with pytest.raises(ValueError, match="high must be a whole number >= 512, got 128"):
        SmithBatchSize(512, 128)


# -- AdaQS and ScaDLES ----------------------------------------------------------------------------------------------


def test_the_ratio_is_of_mean_and_deviation() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    sums = Sums(float(values.sum()), float(values.square().sum()))
    assert msdr(sums, 4) == pytest.approx(float(values.mean().abs() / values.std(correction=0)))
    assert msdr(Sums(-8.0, 16.0), 4) == math.inf
    assert msdr(Sums(0.0, 0.0), 4) == msdr(Sums(0.0, 0.0), 0) == 0


def test_adaqs_takes_the_next_setting_each_time_the_ratio_has_fallen() -> None:
    schedule = AdaQS(window=2, fall=0.5)
    schedule.prepare_units([UnitForm("w", (100,)), UnitForm("still", (100,))])

    def sums(ratio: float) -> Sums:  # of elements with mean `ratio` and deviation 1
        return Sums(100 * ratio, 100 * (1 + ratio**2))

    rungs = []
    for ratio in (1.0, 0.8, 0.5, 0.4, 0.25, 0.1, 0.01):
        assert not schedule.ends_phase()
        schedule.assign(Evidence(0))
        assert schedule.ends_phase()
        rungs.append(list(schedule.assign(Evidence(0, sums=(sums(ratio), sums(1.0))))))
    assert [first for first, _ in rungs] == [0, 0, 1, 1, 2, 2, 2]
    assert all(second == 0 for _, second in rungs)


@pytest.mark.parametrize(
    ("gain", "expected"), [(0.71, (10.0, 0)), (0.75, (10.0, 0)), (0.69, (1.0, DENSE)), (1.0, (10.0, 0))]
)
def test_scadles_compresses_where_little_is_lost(gain: float, expected: tuple[float, int]) -> None:
    schedule = ScaDLES(cf=10, delta=0.3)
    decision = schedule.decide(Statistics(2.0, (2 * gain, 2 * gain), 1.0, (1.0, 1.0), finite=True))
    assert (decision.cf, decision.level) == expected
    assert decision.gains[0] == gain
    assert not decision.skip


def test_scadles_skips_what_is_not_finite_and_loses_nothing_of_nothing() -> None:
    assert ScaDLES().decide(Statistics(math.nan, (1.0, 1.0), 1.0, (1.0, 1.0), finite=True)).skip
    assert ScaDLES().decide(Statistics(1.0, (1.0, 1.0), 1.0, (1.0, 1.0), finite=False)).skip
    assert ScaDLES().decide(Statistics(0.0, (0.0, 0.0), 0.0, (0.0, 0.0), finite=True)).level == 0


def test_scadles_in_a_world_sends_dense_where_much_would_be_lost() -> None:
    for delta, dense in ((0.01, True), (0.99, False)):
        world = World(2, TopK(), schedule=ScaDLES(cf=10, delta=delta))
        means = world.step([{"w": torch.ones(40)}, {"w": torch.ones(40)}])
        assert ((means[0]["w"] != 0).sum() == 40) == dense


# -- all ------------------------------------------------------------------------------------------------------------


def _prepared(name: str) -> Schedule:
    given: dict[str, Any] = {"accordion": {"low": {}, "high": {}, "steps_per_epoch": 3, "interval": 2}}.get(name, {})
    schedule = schedules.create(name, **given | {"window": 2} if name in ("gravac", "adaqs") else given)
    schedule.prepare(3)
    if isinstance(schedule, Assigning):
        schedule.prepare_units([UnitForm(f"w{n}", (3, 4)) for n in range(3)])
    return schedule


def _outcome(schedule: Schedule, rng: random.Random) -> Any:
    """What a step of a random trace leads to."""
    if isinstance(schedule, Assigning):
        lr = rng.choice([0.1, 0.1, 0.1, 0.01])
        sums = tuple(Sums(rng.gauss(0, 1), rng.uniform(0.2, 4)) for _ in schedule.units)
        return list(schedule.assign(Evidence(0, lr=lr, next_lr=lr, sums=sums if schedule.ends_phase() else ())))
    if not schedule.adaptive:
        return schedule.cf_at(0) if schedule.name != "warmup" else None
    low = rng.uniform(0.5, 1)
    kept = (low, low * rng.uniform(0.5, 1))
    decision = schedule.decide(Statistics(1.0, kept, 1.0, kept, finite=True))
    schedule.observe(rng.uniform(0.1, 0.2), 0.01)
    return decision


@pytest.mark.parametrize("name", schedules.REGISTRY)
def test_every_schedule_resumes_bitwise(name: str) -> None:
    whole, rng = _prepared(name), random.Random(7)
    states, traces, outcomes = [], [], []
    for _ in range(60):
        states.append(json.dumps(whole.state_dict()))
        traces.append(rng.getstate())
        outcomes.append(_outcome(whole, rng))
    for at in range(0, 60, 7):
        resumed = _prepared(name)
        resumed.load_state_dict(json.loads(states[at]))
        assert json.dumps(resumed.state_dict()) == states[at]
        rng.setstate(traces[at])
        assert [_outcome(resumed, rng) for _ in range(at, 60)] == outcomes[at:]
        with pytest.raises(ValueError, match="unknown: other"):
            resumed.load_state_dict({**whole.state_dict(), "other": 1})
