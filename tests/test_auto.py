"""The auto schedule: what it chooses where the truth is known, that it resumes, and the echoes that it lives on."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvdcomp import schedules
from hvdcomp.buckets import Part, Spec
from hvdcomp.compressors import Compressor, create
from hvdcomp.compressors.requests import Unit
from hvdcomp.evidence import Watch
from hvdcomp.feedback import ErrorFeedback
from hvdcomp.schedules import Auto, Echo, Evidence, UnitForm
from hvdcomp.schedules.auto import WINDOW, Arm
from hvdcomp.simulation import World

NUMEL = 1_000_000
CURVES = {"topk": (100.0, 1.2), "powersgd": (20.0, 1.0), "fp16": (math.inf, 2.0)}
"""By method: the factor at which half of a step is worth something, and bytes over those of the bare factor."""


def schedule(compression: str = "topk", **parameters: Any) -> Auto:
    made = Auto(**parameters)
    made.suit(create(compression))
    made.prepare(4)
    made.prepare_units([UnitForm("a", (NUMEL // 2,)), UnitForm("b", (NUMEL // 2,))])
    return made


class Truth:
    """A network and a model: what a step with an arm takes and is worth."""

    def __init__(self, bandwidth: float, compute_s: float = 0.01, codec_s: float = 0.001, noise: float = 0.05) -> None:
        self.bandwidth, self.compute_s, self.codec_s, self.noise = bandwidth, compute_s, codec_s, noise
        self.random = random.Random(0)

    def factor(self, arm: Arm) -> float:
        if arm.family == "powersgd":
            return 100 * arm.factor
        return CURVES[arm.family][1] if arm.exact and arm.family != "none" else arm.factor

    def nbytes(self, arm: Arm) -> float:
        overhead = 1.2 if arm.family == "topk" else 1.0
        return 4 * NUMEL / self.factor(arm) * (overhead if arm.factor > 1 else 1.0)

    def seconds(self, arm: Arm) -> float:
        return self.compute_s + (arm.family != "none") * self.codec_s + 8 * self.nbytes(arm) / self.bandwidth

    def worth(self, arm: Arm) -> float:
        if arm.exact:
            return 1.0
        return 1 / (1 + (self.factor(arm) / CURVES[arm.family][0]) ** 0.6)

    def cost(self, arm: Arm) -> float:
        """Seconds to what a dense step reaches."""
        return self.seconds(arm) * (1 + (1 / self.worth(arm) - 1) / 2)

    def evidence(self, step: int, arm: Arm) -> Evidence:
        noise = [1 + self.noise * self.random.gauss(0, 1) for _ in range(3)]
        echo = Echo(self.worth(arm) * noise[0], noise[1]) if step else None
        return Evidence(
            step,
            seconds=self.seconds(arm) * noise[2],
            bytes_sent=int(self.nbytes(arm)),
            bytes_dense=4 * NUMEL,
            echo=echo,
        )


def drive(auto: Auto, truth: Truth, steps: int, first: int = 0) -> list[Arm]:
    """The arm of each step."""
    taken, index = [], auto._visit.arm
    for step in range(first, first + steps):
        taken.append(auto.arms[index])
        answer = auto.assign(truth.evidence(step, auto.arms[index]))
        assert len(set(answer)) == 1
        assert len(answer) == 2
        index = answer[0]
    return taken


def mostly(taken: list[Arm]) -> Arm:
    """The arm of most of the last half's steps."""
    counted = Counter((arm.family, arm.factor) for arm in taken[len(taken) // 2 :])
    family, factor = counted.most_common(1)[0][0]
    return next(arm for arm in taken if (arm.family, arm.factor) == (family, factor))


@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e9, 3e9])
def test_it_takes_the_arm_of_the_least_time_to_a_loss(bandwidth: float) -> None:
    auto, truth = schedule(), Truth(bandwidth)
    found = mostly(drive(auto, truth, 600))
    best = min(auto.arms, key=truth.cost)
    assert truth.cost(found) <= 1.05 * truth.cost(best), (found, best)


def test_a_slower_network_gets_a_higher_factor() -> None:
    factors = [mostly(drive(schedule(), Truth(bandwidth), 600)).factor for bandwidth in (1e7, 1e8, 1e9, 1e12)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] >= 100
    assert factors[-1] == 1


@pytest.mark.parametrize("codec_s", [0.0, 0.0001, 0.001, 0.01])
def test_where_compression_cannot_pay_it_costs_less_than_three_percent(codec_s: float) -> None:
    auto, truth = schedule(), Truth(1e13, codec_s=codec_s, noise=0.01)
    taken = drive(auto, truth, 2000)
    assert mostly(taken).family == "none"
    whole = sum(truth.cost(arm) for arm in taken)
    assert whole <= 1.03 * len(taken) * truth.cost(auto.arms[0])


def test_a_pinned_trace() -> None:
    """Without noise: two factors are timed, and dense where it has a chance; then the guess decides, then what it
    measures."""
    slow = drive(schedule(), Truth(1e8, noise=0.0), 60)
    assert [round(arm.factor, 1) for arm in slow[::3][:3]] == [100, 10, 100]
    assert {round(arm.factor, 1) for arm in slow[6:]} == {100}
    fast = drive(schedule(), Truth(3e9, noise=0.0), 60)
    assert [round(arm.factor, 1) for arm in fast[::3][:4]] == [100, 10, 1, 10]
    assert {round(arm.factor, 1) for arm in fast[9 : 9 + WINDOW]} == {10}


def test_worth_decides_beside_time() -> None:
    """On the same network a model that loses more by delays gets a lower factor."""

    class Steep(Truth):
        def worth(self, arm: Arm) -> float:
            return 1.0 if arm.exact else 1 / (1 + self.factor(arm) ** 0.6)

    assert mostly(drive(schedule(), Steep(3e8), 600)).factor < mostly(drive(schedule(), Truth(3e8), 600)).factor


def test_another_network_is_noticed() -> None:
    auto = schedule()
    assert mostly(drive(auto, Truth(1e7), 300)).factor >= 100
    assert mostly(drive(auto, Truth(1e13), 300, first=300)).family == "none"
    assert mostly(drive(auto, Truth(1e7), 600, first=600)).factor >= 100


def test_echoes_that_say_nothing_change_nothing() -> None:
    auto = schedule()

    class Noise(Truth):
        def evidence(self, step: int, arm: Arm) -> Evidence:
            seen = super().evidence(step, arm)
            return Evidence(
                step,
                seconds=seen.seconds,
                bytes_sent=seen.bytes_sent,
                bytes_dense=4 * NUMEL,
                echo=Echo(1.0, (-1.0) ** step),
            )

    drive(auto, Noise(1e8), 2000)
    assert auto._scale == {}
    assert len(auto._echo) <= 1024 + WINDOW


@pytest.mark.parametrize(
    ("compression", "methods", "family"),
    [("topk", ["powersgd", "fp16"], "topk"), ("powersgd", [], "powersgd"), ("fp16", [], "fp16")],
)
def test_methods(compression: str, methods: list[str], family: str) -> None:
    auto, truth = schedule(compression, methods=methods), Truth(1e8)
    taken = drive(auto, truth, 800)
    assert {arm.family for arm in taken} >= {compression, *methods}
    assert mostly(taken).family == family


def test_factors_beyond_the_tensors_are_not_taken() -> None:
    auto = Auto()
    auto.suit(create("topk"))
    auto.prepare_units([UnitForm("a", (40,)), UnitForm("b", (40,))])
    assert max(arm.factor for arm in drive(auto, Truth(1e7), 200)[3:]) < 40  # the first is taken before they are known


def test_nothing_to_choose() -> None:
    auto = schedule("none")
    assert {arm.family for arm in drive(auto, Truth(1e8), 50)} == {"none"}


def test_one_slow_step_makes_no_factor_free() -> None:
    auto = schedule()
    arm = auto.first
    for step in range(60):
        nbytes = 4e6 / (auto.arms[arm].factor if arm else 1)
        seconds = 0.02 + 1e-8 * nbytes + (5.0 if step == 4 else 0.0)
        (arm,) = set(
            auto.assign(
                Evidence(step, seconds=seconds, bytes_sent=int(nbytes), bytes_dense=4_000_000, echo=Echo(0.5, 1.0))
            )
        )
        assert all(auto._cost(n)[0] > 0 for n in range(len(auto.arms)) if auto._known and auto._knows(n))


def test_an_unknown_method() -> None:
    with pytest.raises(ValueError, match=r"unknown compression 'topp'.*did you mean"):
        schedule(methods=["topp"])


@pytest.mark.parametrize("at", [1, 4, 11, 30, 57, 215, 230])
def test_it_resumes_bitwise(at: int) -> None:
    def unbroken(cut: Callable[[Auto], Auto]) -> list[Arm]:
        auto, truth = schedule(methods=["powersgd"]), Truth(1e8)
        before = drive(auto, truth, at)
        return before + drive(cut(auto), truth, 250 - at, first=at)

    def resumed(auto: Auto) -> Auto:
        again = schedule(methods=["powersgd"])
        again.load_state_dict(json.loads(json.dumps(auto.state_dict())))
        assert again.state_dict() == auto.state_dict()
        return again

    assert unbroken(resumed) == unbroken(lambda auto: auto)


def test_a_state_of_other_methods_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chose between \['none', 'powersgd\(rank=8\)'.*, not between"):
        schedule().load_state_dict(schedule("powersgd").state_dict())
    with pytest.raises(ValueError, match="this is no state of the auto schedule"):
        schedule().load_state_dict({})


# -- echoes


class Recorder(Auto):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Evidence] = []

    def assign(self, evidence: Evidence) -> list[int]:
        self.seen.append(evidence)
        return [1] * len(self.units)


@pytest.mark.parametrize("compression", [create("topk", cf=10.0), create("powersgd", rank=1)], ids=str)
def test_an_echo_is_what_was_sent_against_the_next_gradient(compression: Compressor) -> None:
    recorder = Recorder()
    world = World(2, compression, schedule=recorder)
    generator = torch.Generator().manual_seed(3)
    recorder.first = 1
    last = sent = None
    held = torch.zeros(30, 40)
    for step in range(6):
        grads = [{"w": torch.randn(30, 40, generator=generator)} for _ in range(2)]
        world.step(grads, seconds=1.0, bytes_sent=world.nbytes)
        own, after = grads[0]["w"], world.residual(0, "w")
        echo = recorder.seen[-1].echo
        if step == 0:
            assert echo is None
        else:
            assert echo is not None
            assert echo.sent == pytest.approx(float((sent * own).sum()), rel=1e-4)  # type: ignore[operator]
            assert echo.gradient == pytest.approx(float((last * own).sum()), rel=1e-4)  # type: ignore[operator]
        last, sent, held = own, own + held - after, after
    assert float(held.norm()) > 0


def test_a_skipped_step_leaves_no_echo() -> None:
    recorder = Recorder()
    world = World(2, "topk", schedule=recorder)
    good = [{"w": torch.ones(30, 40)} for _ in range(2)]
    bad = [{"w": torch.ones(30, 40)}, {"w": torch.full((30, 40), torch.nan)}]
    for grads in (good, good, bad, good):
        world.step(grads)
    assert [evidence.echo is None for evidence in recorder.seen] == [True, False, False]
    assert world.step(good)[0]["w"].isfinite().all()


def test_it_is_made_by_name_and_says_what_it_expects() -> None:
    auto = schedules.create("auto")
    assert isinstance(auto, Auto)
    assert auto.expected == {}
    made = schedule()
    drive(made, Truth(1e8), 50)
    assert min(made.expected, key=lambda name: made.expected[name]) == "topk(cf=100)"


def test_echoes_go_on_where_they_were_saved() -> None:
    part = Part(Unit("w", torch.Size([6])), [Spec("w", torch.Size([6]), torch.float32, torch.device("cpu"))],
                create("topk"), None)  # fmt: skip
    part.feedback = ErrorFeedback(6, torch.float32, torch.device("cpu"))
    watch, again = (Watch(sums=False, overlaps=False, echoes=True) for _ in range(2))
    for residual, gradient in ((1.0, torch.ones(6)), (3.0, torch.arange(6.0))):
        watch.see(part, [(0, gradient)], 1.0)
        part.feedback.residual.fill_(residual)
        watch.keep()
    assert watch.echo == Echo(sent=0.0, gradient=15.0)  # the first step kept all of its ones back
    again.load_state_dict(copy.deepcopy(watch.state_dict()), [part])
    for one in (watch, again):
        one.see(part, [(0, torch.ones(6))], 1.0)
        one.keep()
    assert again.echo == watch.echo == Echo(sent=15.0 - 6 * 2, gradient=15.0)
