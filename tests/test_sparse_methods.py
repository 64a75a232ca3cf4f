"""The sparse methods beside top-k and random-k: values worked by hand, awkward tensors, state, invariants."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hvdcomp.checkpointing import _states_for_all
from hvdcomp.compressors import DGC, GaussianK, MSTopK, RedSync, SIDCoE, SIDCoGP, SIDCoP, Threshold, create
from hvdcomp.compressors.artopk import largest_norm
from hvdcomp.compressors.gaussiank import corrected, first_threshold
from hvdcomp.compressors.mstopk import bracket
from hvdcomp.compressors.redsync import bisected
from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.sidco import (
    Fit,
    SIDCo,
    Stages,
    estimate,
    exponential,
    gamma,
    gamma_quantile,
    most_stages,
    pareto,
    stage_shares,
)
from hvdcomp.compressors.sparsifier import GatheredSparsifier, Sparsifier, kept_elements
from hvdcomp.errors import WireError
from hvdcomp.kernels import Collected, collect_above, count_at_least, mean_log, moments, tail
from hvdcomp.simulation import World

SIDCOS = ["sidcoe", "sidcogp", "sidcop"]
HUNDRED = torch.arange(1.0, 101.0)
ESTIMATING = ["dgc", "redsync", "gaussiank", *SIDCOS]
EXACT = ["mstopk"]

AWKWARD = {
    "constant": torch.full((1000,), 0.1),
    "all negative": -torch.rand(1000) - 5,
    "zero": torch.zeros(1000),
    "one-hot": torch.nn.functional.one_hot(torch.tensor(7), 1000).float(),
    "two values": torch.tensor([1.0, -2.0]).repeat(500),
    "one element": torch.tensor([-3.0]),
    "subnormal": torch.full((1000,), 1e-42),
    "huge": 3e38 * torch.linspace(-1, 1, 1000),
    "tiny": 1e-30 * torch.linspace(-1, 1, 1001),
    "far outlier": torch.cat([torch.full((9999,), 1e-3), torch.tensor([1e6])]),
    "float64": torch.linspace(-1, 1, 999, dtype=torch.float64),
    "strided": torch.linspace(-1, 1, 2000)[::2],
}


def chosen(compressor: GatheredSparsifier, values: Tensor, k: int, unit: Unit | None = None) -> Collected:
    return compressor.select(values, k, unit or Unit("w", values.shape), level=0)


def count_in(values: Tensor):  # type: ignore[no-untyped-def]
    return lambda threshold: int((values.abs() >= threshold).sum())


# -- kernels


@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD)
def test_moments(values: Tensor) -> None:
    found = moments(values)
    exact = values.double()
    assert found.total_abs == pytest.approx(float(exact.abs().sum()), rel=1e-6)
    assert found.total == pytest.approx(float(exact.sum()), rel=1e-5, abs=1e-6 * found.total_abs)
    assert found.total_sq == pytest.approx(float(exact.square().sum()), rel=1e-6)
    assert found.largest == float(values.abs().max())
    assert found.mean_abs <= found.largest
    expected = float(exact.abs().var()) if values.numel() > 1 else 0.0
    assert found.variance_abs == pytest.approx(expected, rel=1e-4, abs=2e-6 * found.total_sq / values.numel())


def test_moments_of_nothing_and_of_many_blocks() -> None:
    nothing = moments(torch.zeros(0))
    assert (nothing.mean_abs, nothing.variance_abs, nothing.largest) == (0.0, 0.0, 0.0)
    values = torch.randn(70_001)
    assert moments(values).variance_abs == pytest.approx(float(values.abs().double().var()), rel=1e-6)
    assert moments(values).variance == pytest.approx(float(values.double().var()), rel=1e-6)


def test_mean_log_leaves_zeros_out() -> None:
    assert mean_log(torch.tensor([0.0, math.e, -math.e, 1.0])) == pytest.approx(2 / 3)
    assert math.isnan(mean_log(torch.zeros(5)))
    assert math.isnan(mean_log(torch.zeros(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_and_collects_at_and_above_a_threshold(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.0, 2.0, 3.0, -0.5], dtype=dtype)
    assert [count_at_least(values, t) for t in (0.0, 2.0, 2.5, 4.0)] == [5, 3, 1, 0]
    assert collect_above(values, 2.0, 3).positions.tolist() == [3]
    assert collect_above(values, 1.9999999999, 3).positions.tolist() == [1, 2, 3]
    assert collect_above(torch.zeros(5, dtype=dtype), 0.0, 3).positions.tolist() == []
    assert collect_above(values, 1e300, 3).positions.tolist() == []


@pytest.mark.parametrize("values", [torch.randn(50_000), torch.randn(50_000).double(), torch.ones(50_000), HUNDRED])
def test_tail_holds_all_beyond_its_bound_and_counts_them(values: Tensor) -> None:
    top = tail(values, 500)
    assert top.found.values.numel() >= min(500, values.numel())
    assert top.found.values.numel() == int((values.abs() >= top.bound).sum())
    for threshold in (top.bound, 2.0, 2.5, 3.0, 9.0):
        if threshold >= top.bound:
            assert top.count(threshold) == int((values.abs() >= threshold).sum())
            assert torch.equal(top.at_least(threshold).values, values[values.abs() >= threshold])


# -- RedSync


def test_redsync_bisects_as_worked_by_hand() -> None:
    tried = []

    def count(threshold: float) -> int:
        tried.append(threshold)
        return count_in(HUNDRED)(threshold)

    assert bisected(50.5, 100.0, 10, count, 20) == 87.625
    assert tried == [75.25, 87.625]  # ratios .5 (25 selected) and .75 (13)
    assert [count_in(HUNDRED)(t) for t in tried] == [25, 13]


def test_redsync_selects_those() -> None:
    for values in (HUNDRED, -HUNDRED):
        assert chosen(RedSync(), values, 10).positions.tolist() == list(range(87, 100))
        assert chosen(RedSync(variant="trimmed"), values, 10).positions.tolist() == list(range(90, 100))
        assert chosen(RedSync(bisections=1), values, 10).positions.tolist() == list(range(90, 100))  # 25 are cut to k


@pytest.mark.parametrize("k", [5, 50, 500])
def test_redsync_is_between_k_and_2k_whatever_the_tail(k: int) -> None:
    heavy = torch.from_numpy(np.random.default_rng(0).standard_t(3, 50_000)).float()
    for values in (torch.randn(50_000), heavy, torch.randn(50_000).double()):
        kept = chosen(RedSync(), values, k)
        assert k < kept.values.numel() < 2 * k
        assert kept.values.numel() == int((values.abs() >= kept.values.abs().min()).sum())


def test_redsync_quantised_alternates_between_the_signs_and_sends_means() -> None:
    """The k = 2 largest of the step's sign; the difference to their mean is left behind."""
    given = torch.tensor([8.0, -6.0, 5.0, -2.0, 1.0, 0.0, 0.0, 0.0])
    world = World(1, RedSync(cf=4, variant="trimmed", quantise=True))
    steps = [(given, [6.5, 0, 6.5, 0, 0, 0, 0, 0]), (0 * given, [0, -4, 0, -4, 0, 0, 0, 0])]
    lefts = [[1.5, -6, -1.5, -2, 1, 0, 0, 0], [1.5, -2, -1.5, 2, 1, 0, 0, 0]]
    for (gradient, mean), left in zip(steps, lefts, strict=True):
        assert world.step([{"w": gradient}])[0]["w"].tolist() == mean
        assert world.residual(0, "w").tolist() == left
    assert world.step([{"w": 0 * given}])[0]["w"].tolist() == [1.75, 0, 0, 1.75, 0, 0, 0, 0]


def test_redsync_quantised_by_threshold() -> None:
    unit = Unit("w", torch.Size([200]))
    both = torch.cat([HUNDRED, -HUNDRED])
    for unit.step, first in ((0, 0), (1, 100), (2, 0)):
        kept = chosen(RedSync(quantise=True), both, 10, unit)
        assert 10 < kept.values.numel() < 20
        assert kept.positions.tolist() == list(range(first + 100 - kept.values.numel(), first + 100))


@pytest.mark.parametrize("sign", [1, -1])
def test_redsync_quantised_of_one_sign_does_not_stall(sign: int) -> None:
    """Where nothing has the step's sign, the other is sent; fewer than k where fewer have it; a zero if all are."""
    method, k = RedSync(variant="trimmed", quantise=True), 3
    for step in (0, 1):
        unit = Unit("w", torch.Size([5]), step=step)
        assert chosen(method, sign * torch.tensor([1.0, 2, 3, 4, 0]), k, unit).positions.tolist() == [1, 2, 3]
        assert chosen(method, torch.tensor([0, sign, 0, 0, 0.0]), k, unit).positions.tolist() == [1]
        assert chosen(method, torch.zeros(5), k, unit).values.tolist() == [0]
    workers = World(2, RedSync(cf=2, quantise=True))
    mean = workers.step([{"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([-1.0, -5.0])}])[0]["w"]
    assert mean.tolist() == [0, -1]  # each its own sign: (3 - 5) / 2


@pytest.mark.parametrize("variant", ["threshold", "trimmed"])
@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD)
def test_redsync_quantised_selects_something_of_one_sign(values: Tensor, variant: str) -> None:
    method, k = RedSync(variant=variant, quantise=True), kept_elements(values.numel(), 100)
    for step in (0, 1):
        kept = chosen(method, values, k, Unit("w", values.shape, step=step))
        assert 1 <= kept.values.numel() <= method.most(k)
        assert len(set(kept.values.sign().tolist())) == 1
        assert torch.equal(kept.values, values[kept.positions])


def test_redsync_quantised_needs_the_values_as_they_are_and_a_step() -> None:
    with pytest.raises(ValueError, match=r"quantise sends no values, so that their type must be 'fp32', got 'fp16'"):
        RedSync(quantise=True, values="fp16")
    with pytest.raises(ValueError, match="quantise must be True or False, got 1"):
        RedSync(quantise=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the step"):
        RedSync(quantise=True).compress(torch.ones(3))
    with pytest.raises(ValueError, match=r"does not fit an adaptive schedule.*use quantise=False"):
        World(2, RedSync(quantise=True), schedule="gravac")


def test_redsync_quantised_sends_positions_and_a_header() -> None:
    world = World(2, RedSync(cf=100, quantise=True))
    world.step([{"w": torch.randn(100_000)} for _ in range(2)])
    frame = 32
    assert world.nbytes <= frame + RedSync(cf=100, quantise=True).requests((100_000,), 2)[0].nbytes == frame + 24 + 7996


# -- MSTopK


def test_mstopk_brackets_as_worked_by_hand() -> None:
    above, below = bracket(50.5, 100.0, 10, count_in(HUNDRED), 4)
    assert (above, below) == (90.71875, 87.625)
    assert (count_in(HUNDRED)(above), count_in(HUNDRED)(below)) == (10, 13)


def test_mstopk_takes_what_is_missing_from_between_the_thresholds() -> None:
    # one bisection of [50.5, 100]: t1 = inf, t2 = 75.25, so that 10 of the 25 from 76 on are taken at even distances
    kept = chosen(MSTopK(bisections=1), HUNDRED, 10)
    assert kept.values.tolist() == [76.0, 78.0, 81.0, 83.0, 86.0, 88.0, 91.0, 93.0, 96.0, 98.0]
    assert chosen(MSTopK(bisections=4), HUNDRED, 10).values.tolist() == list(range(91, 101))


@pytest.mark.parametrize("k", [1, 5, 50, 500, 30_000, 49_999])
def test_mstopk_sends_exactly_k_and_nearly_the_largest(k: int) -> None:
    values = torch.randn(50_000)
    kept = chosen(MSTopK(), values, k)
    assert kept.values.numel() == k
    assert torch.equal(kept.values, values[kept.positions])
    if k <= 500:  # beyond the mean magnitude nothing is searched
        best = values.abs().topk(k).values.double().square().sum()
        assert float(kept.values.double().square().sum() / best) > 0.9999


# -- Gaussian-k


def test_gaussiank_threshold() -> None:
    # mean 0, unbiased sigma sqrt(10/4), k/n = 2/5: Phi^-1(.8) = .841621
    assert first_threshold(moments(torch.tensor([-2.0, -1, 0, 1, 2])), 2) == pytest.approx(
        0.841621 * math.sqrt(2.5), 1e-5
    )
    with_mean = first_threshold(moments(HUNDRED), 10)
    assert with_mean == pytest.approx(50.5 + 29.011492 * 1.644854, rel=1e-6)
    assert first_threshold(moments(-HUNDRED), 10) == with_mean


@pytest.mark.parametrize(
    ("start", "threshold"),
    [(91.0, 91.0), (98.0, 49.0 * 1.5 * 1.5), (40.0, 90.0), (400.0, 50.0)],
)
def test_gaussiank_corrects_in_three_rounds(start: float, threshold: float) -> None:
    # 98 (3 reach it) -> 49 (52) -> 73.5 (27) -> 110.25;  40 -> 60 -> 90 (11 of 10);  400 -> 200 -> 100 -> 50
    assert corrected(start, 10, count_in(HUNDRED)) == threshold


def test_gaussiank_on_normal_values_is_near_k() -> None:
    kept = chosen(GaussianK(), torch.randn(50_000), 500)
    assert 400 < kept.values.numel() < 600


# -- SIDCo


@pytest.mark.parametrize(
    ("fit", "share", "threshold"),
    [(exponential, 0.25, 3.465736), (exponential, 0.1, 5.756463), (pareto, 0.1, 4.136086), (gamma, 0.1, 4.123034)],
)
def test_sidco_thresholds(fit: Fit, share: float, threshold: float) -> None:
    result = estimate(torch.tensor([1.0, -2.0, -3.0, 4.0]), share, 1, fit, fit)
    assert result.threshold == pytest.approx(threshold, abs=5e-7)
    assert result.found.positions.tolist() == ([3] if threshold < 4 else [])


QUANTILES = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1e6


@pytest.mark.parametrize("share", [0.1, 0.01, 0.001])
def test_sidco_e_is_right_for_laplace_at_any_number_of_stages(share: float) -> None:
    grid = -torch.log1p(-QUANTILES).float()
    for stages in (1, 2, 3, 5):
        found = estimate(grid, share, stages, exponential, exponential).found.values.numel()
        assert found / (1e6 * share) == pytest.approx(1, abs=5e-4)


def test_sidco_e_on_normal_values_by_stages() -> None:
    grid = torch.special.ndtri((1 + QUANTILES) / 2).float()
    ratios = [estimate(grid, 0.001, m, exponential, exponential).found.values.numel() / 1000 for m in range(1, 6)]
    assert ratios == pytest.approx([0, 0.099, 0.698, 1.056, 1.261], abs=1.1e-3)


def test_sidco_stages_multiply_to_the_share() -> None:
    assert stage_shares(0.001, 1) == [0.001]
    assert stage_shares(0.3, 4) == [0.3]
    assert stage_shares(0.001, 3) == pytest.approx([0.25, math.sqrt(0.004), math.sqrt(0.004)])
    assert [most_stages(share) for share in (0.9, 0.5, 0.25, 0.1, 0.01, 0.001)] == [1, 1, 2, 4, 7, 10]


def test_gamma_quantiles() -> None:
    assert gamma_quantile(1.0, 0.1) == pytest.approx(math.log(10))
    assert gamma_quantile(0.5, 0.01) == pytest.approx(2.5758293035489**2 / 2)  # chi-square of one degree: z^2 = 2 x


def test_sidco_stages_move_turn_and_rest() -> None:
    def windows(start: Stages, *ratios: float) -> list[int]:
        seen = []
        for ratio in ratios:
            for _ in range(5):
                start = start.observed(round(1000 * ratio), 1000)
            seen.append(start.stages)
        return seen

    begin = Stages(3, share=0.001)
    assert windows(begin, 0.1, 0.7, 1.1, 1.1) == [4, 5, 5, 5]  # too few: more stages, and on while it helps
    assert windows(begin, 4.7, 5.0, 3.0, 1.0) == [2, 3, 4, 4]  # fewer made it worse: turn, and on
    assert windows(Stages(1, share=0.001), 4.7, 3.0, 1.0) == [2, 3, 3]  # the plain rule would stick at one stage
    assert windows(Stages(1, share=0.5), 0.1, 9.0) == [1, 1]  # there is but one
    resting = Stages(3, error=0.0, share=0.001)
    assert windows(resting, 1.2, 1.25, 1.19, 1.22, 1.2) == [3] * 5  # noise at the edge
    assert windows(resting, 1.5, 1.5, 1.5, 1.5) == [3, 3, 3, 2]
    assert windows(begin, 0.0, 0.0) == [4, 3]
    assert Stages.from_tensor(begin.observed(3, 4).to_tensor()) == begin.observed(3, 4)


DISTRIBUTIONS = {
    "laplace": lambda rng: rng.laplace(size=200_000),
    "normal": lambda rng: rng.standard_normal(200_000),
    "student-t": lambda rng: rng.standard_t(3, 200_000),
    "gamma": lambda rng: rng.gamma(0.5, size=200_000) * rng.choice([-1, 1], 200_000),
}


@functools.cache
def recorded_gradients() -> list[Tensor]:
    """Those of a hidden layer of 512 x 512 units, every fifth of the first 50 steps on scikit-learn's digits."""
    digits = load_digits()
    inputs, targets = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(50):
        batch = torch.randint(len(inputs), (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        if step % 5 == 0:
            found.append(model[2].weight.grad.flatten().clone())
        optimizer.step()
    return found


def gradients_like(distribution: str) -> list[Tensor]:
    if distribution == "recorded":
        return recorded_gradients()
    rng = np.random.default_rng(0)
    return [torch.from_numpy(DISTRIBUTIONS[distribution](rng)).float() for _ in range(3)]


@pytest.mark.parametrize("distribution", [*DISTRIBUTIONS, "recorded"])
@pytest.mark.parametrize("cls", [SIDCoE, SIDCoGP, SIDCoP])
def test_sidco_reaches_the_band_and_stays(cls: type[SIDCo], distribution: str) -> None:
    pool = gradients_like(distribution)
    for share in (0.1, 0.01, 0.001):
        wanted = int(pool[0].numel() * share)
        found = functools.cache(lambda m, i, s=share: estimate(pool[i], s, m, *cls.fits).found.values.numel())
        stages, ratios = Stages().for_share(share), []
        for step in range(550):
            ratios.append(found(stages.stages, step % len(pool)) / wanted)
            stages = stages.observed(found(stages.stages, step % len(pool)), wanted)
        windows = np.mean(np.reshape(ratios[50:], (-1, 5)), axis=1)
        assert 0.8 <= windows.min() <= windows.max() <= 1.25, (share, stages)


def test_sidco_stays_where_neither_more_nor_fewer_stages_are_better() -> None:
    """It tries one side again every 100 steps, and goes on there once that helps."""
    ratios, stages, seen = {2: 0.2, 3: 1.24, 4: 1.8}, Stages(3, share=0.01), []
    for step in range(700):
        if step == 450:
            ratios |= {1: 1.0, 2: 1.1, 3: 1.3}
        seen.append(stages.stages)
        stages = stages.observed(round(1000 * ratios[stages.stages]), 1000)
    assert seen[:20:5] == [3, 2, 3, 4]
    assert np.mean(np.array(seen[20:450]) == 3) > 0.9
    assert {2, 4} < set(seen[20:450])
    assert stages.error == 0


@pytest.mark.parametrize("cls", [SIDCoE, SIDCoGP, SIDCoP])
def test_sidco_with_feedback_sends_about_k_on_average(cls: type[SIDCo]) -> None:
    """Residuals have short tails, which no number of stages may suit: here 3 stages find 1.24 k, 2 .2 k, 4 1.8 k."""
    world = World(1, cls(cf=100))
    drawn = torch.from_numpy(np.random.default_rng(1).standard_normal(20_000)).float().repeat(2)
    sent = [
        int(world.step([{"w": drawn[start : start + 20_000]}])[0]["w"].count_nonzero()) / 200
        for start in np.random.default_rng(2).integers(0, 20_000, 400)
    ]
    assert 0.75 <= np.median(sent[50:]) <= 1.35
    assert np.mean([0.7 < ratio < 1.4 for ratio in sent[50:]]) > 0.9


def test_sidco_keeps_stages_a_tensor_and_commits_them_with_the_step() -> None:
    world = World(1, "sidcoe", cf=1000, error_feedback=False)
    heavy = torch.from_numpy(np.random.default_rng(0).standard_t(3, 20_000)).float()
    grads = {"a": heavy, "b": torch.distributions.Laplace(0, 1).sample((20_000,))}

    def stages(name: str) -> Tensor:
        (unit,) = (part.unit for part in world._buckets[0][0].parts if part.unit.name == name)
        return unit.state["stages.0"]

    for _ in range(5):
        world.step([grads])
    assert (stages("a")[0], stages("b")[0]) == (2, 1)
    before = stages("a").clone()
    world.step([grads | {"b": torch.full((20_000,), torch.nan)}])
    assert world.skipped
    assert torch.equal(stages("a"), before)
    world.step([grads])
    assert stages("a")[4] == 1


def test_sidco_has_state_a_level() -> None:
    world = World(2, "sidcop", schedule="gravac")
    for _ in range(3):
        world.step([{"w": torch.randn(100, 100)} for _ in range(2)])
    keys = set(world._buckets[0][0].parts[0].unit.state)
    assert "stages.0" in keys


# -- threshold


def test_threshold_sends_what_reaches_it_and_bounds_how_much() -> None:
    values = torch.tensor([0.5, -1.0, 2.0, 0.0])
    assert chosen(Threshold(1.0, 1.0), values, 4).positions.tolist() == [1, 2]
    assert chosen(Threshold(5.0), values, 4).positions.tolist() == []
    world = World(2, "threshold", threshold=1.0, max_density=0.25)
    assert world.step([{"w": values}, {"w": torch.zeros(4)}])[0]["w"].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert world.residual(0, "w").tolist() == [0.5, -1.0, 0.0, 0.0]


def test_threshold_has_no_factor() -> None:
    with pytest.raises(ValueError, match="threshold"):
        World(1, "threshold", schedule="gravac")
    with pytest.raises(ValueError, match="max_density"):
        Threshold(max_density=0)
    with pytest.raises(ValueError, match="threshold must be"):
        Threshold(threshold=0)


# -- AR-Topk


def test_star_takes_turns() -> None:
    world = World(2, "artopk", cf=4)
    grads = [{"w": torch.tensor([4.0, 1.0, 0.0, 0.0])}, {"w": torch.tensor([2.0, 0.0, 0.0, 9.0])}]
    assert world.step(grads)[1]["w"].tolist() == [3.0, 0.0, 0.0, 0.0]  # worker 0's place, the mean of 4 and 2
    assert world.residual(1, "w").tolist() == [0.0, 0.0, 0.0, 9.0]
    assert world.step(grads)[0]["w"].tolist() == [0.0, 0.0, 0.0, 9.0]  # worker 1's: (0 + 18) / 2
    assert world.residual(0, "w").tolist() == [4.0, 2.0, 0.0, 0.0]
    assert world.nbytes == 4 + 4


def test_var_takes_the_largest_norm_of_what_would_be_sent() -> None:
    world = World(3, "artopk", cf=4, selection="var")
    last = torch.tensor([0.0, 0.0, -9.0, 0.0])
    grads = [{"w": torch.full((4,), 5.0)}, {"w": torch.full((4,), -5.0)}, {"w": last}]
    assert world.step(grads)[0]["w"].tolist() == [0.0, 0.0, -3.0, 0.0]
    assert largest_norm([torch.tensor([n], dtype=torch.float64).view(torch.uint8) for n in (1, math.nan, 2, 2)]) == 2
    with pytest.raises(WireError, match="8 from every"):
        largest_norm([torch.zeros(7, dtype=torch.uint8)])


def test_roots_that_differ_within_a_bucket_travel_apart() -> None:
    world = World(2, "artopk", cf=4, selection="var")
    small, large = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 7])
    mean = world.step([{"a": small, "b": large, "c": large}, {"a": large, "b": small, "c": small}])[0]
    assert [mean[name].tolist() for name in "abc"] == [[0.0, 0.0, 0.0, 3.5]] * 3


@pytest.mark.parametrize("selection", ["star", "var"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_without_feedback_too_a_broadcast_has_its_size_whatever_its_root_met(selection: str, bad: float) -> None:
    world = World(2, "artopk", cf=2, selection=selection, error_feedback=False)
    good = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for spoilt in (0, 1):
        world.step([{"w": torch.where(good == 2, bad, good) if w == spoilt else good} for w in (0, 1)])
        assert world.skipped
    assert world.step([{"w": good}] * 2)[0]["w"].tolist() == [0.0, 0.0, 3.0, 4.0]


# -- DGC


def dgc_state(world: World, worker: int = 0) -> dict[str, Tensor]:
    return world._buckets[worker][0].parts[0].unit.state


@pytest.mark.parametrize(("nesterov", "u", "v"), [(False, 1.9, 2.9), (True, 1.71, 4.61)])
def test_dgc_accumulates_as_worked_by_hand(nesterov: bool, u: float, v: float) -> None:
    world = World(1, "dgc", cf=2, momentum=0.9, nesterov=nesterov)
    for _ in range(2):
        world.step([{"w": torch.tensor([1.0, 100.0])}])
    state = dgc_state(world)
    assert state["own.u"].tolist() == pytest.approx([u, 0])  # what was sent is masked
    assert state["own.v"].tolist() == pytest.approx([v, 0])
    assert world.residual(0, "w").tolist() == pytest.approx([v, 0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_at_cf_1_is_momentum_sgd(nesterov: bool) -> None:
    world = World(2, "dgc", cf=1, momentum=0.9, nesterov=nesterov)
    weight = torch.nn.Parameter(torch.zeros(3))
    plain = torch.zeros(3)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        grads = [{"w": torch.randn(3)} for _ in range(2)]
        # SGD's buffer takes g first and m (u + g) is what Nesterov adds: the updates agree
        weight.grad = (grads[0]["w"] + grads[1]["w"]) / 2
        optimizer.step()
        plain -= world.step(grads)[0]["w"]
        assert torch.allclose(plain, weight.detach(), atol=1e-5)


def test_dgc_at_cf_1_keeps_the_momentum() -> None:
    world = World(1, "dgc", cf=1, momentum=0.9)
    means = [float(world.step([{"w": torch.ones(1)}])[0]["w"]) for _ in range(3)]
    assert means == pytest.approx([1, 1.9, 2.71])


def test_dgc_gives_excluded_tensors_momentum_after_the_allreduce() -> None:
    world = World(2, "dgc", cf=2, momentum=0.9, exclude=("1d",))
    means = [float(world.step([{"b": torch.ones(1)}, {"b": torch.zeros(1)}])[1]["b"]) for _ in range(3)]
    assert means == pytest.approx([0.5, 0.95, 1.355])


def test_dgc_clips_each_workers_gradient() -> None:
    world = World(4, "dgc", cf=2, momentum=0.0, clip=10.0)
    world.step([{"w": torch.tensor([30.0, 40.0])}] * 4)  # 10 / sqrt(4) = 5: [3, 4], of which 4 is sent
    assert world.residual(3, "w").tolist() == pytest.approx([3, 0])


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_dgc_applies_and_keeps_v_plus_u(workers: int, values: str) -> None:
    world = World(workers, "dgc", cf=10, momentum=0.5, values=values)
    v = u = [torch.zeros(40, 30)] * workers
    for _ in range(4):
        grads = [{"w": torch.randn(40, 30)} for _ in range(workers)]
        mean = world.step(grads)[0]["w"]
        acc = torch.stack([v[w] + 0.5 * u[w] + grads[w]["w"] for w in range(workers)]).mean(0)
        v = [world.residual(w, "w") for w in range(workers)]
        u = [dgc_state(world, w)["own.u"].view(40, 30) for w in range(workers)]
        assert torch.allclose(mean + torch.stack(v).mean(0), acc, atol=1e-5)


def test_dgc_builds_u_and_v_in_memory_that_it_has_and_leaves_them_alone_when_a_step_is_skipped() -> None:
    world, plain = (World(2, "dgc", cf=10, momentum=0.5, nesterov=True) for _ in range(2))
    held: list[set[int]] = []
    for step in range(9):
        good = torch.randn(40, 30)
        if step in (3, 4, 6):
            before = {key: tensor.clone() for key, tensor in dgc_state(world, 1).items()}
            world.step([{"w": good}, {"w": good * torch.nan}])
            assert world.skipped
            assert all(torch.equal(before[key], tensor) for key, tensor in dgc_state(world, 1).items())
        grads = [{"w": good}, {"w": good.flip(0)}]
        assert torch.equal(world.step(grads)[1]["w"], plain.step(grads)[1]["w"])
        held.append({tensor.data_ptr() for tensor in dgc_state(plain).values()})
        assert all(torch.equal(t, dgc_state(plain)[key]) for key, t in dgc_state(world).items())
    assert held[2] == held[4] == held[6] != held[3] == held[5] == held[7]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_never_enters_dgcs_velocity_or_momentum(bad: float, nesterov: bool) -> None:
    world = World(2, "dgc", cf=4, momentum=0.9, nesterov=nesterov)
    good = torch.randn(6, 8)
    world.step([{"w": good}] * 2)
    before = [{key: tensor.clone() for key, tensor in dgc_state(world, worker).items()} for worker in (0, 1)]
    for place in (0, 47):
        poisoned = good.clone()
        poisoned.view(-1)[place] = bad
        world.step([{"w": good}, {"w": poisoned}])
        assert world.skipped
        for worker in (0, 1):
            assert set(before[worker]) == {"own.u", "own.v"}
            assert all(torch.equal(dgc_state(world, worker)[key], kept) for key, kept in before[worker].items())
    assert torch.isfinite(world.step([{"w": good}] * 2)[0]["w"]).all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_takes_its_tail_from_the_pass_that_makes_v(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent and kept is the same where every element of v is looked at again."""
    world, again = (World(2, "dgc", cf=100, momentum=0.9, nesterov=nesterov) for _ in range(2))
    for _ in range(4):
        grads = [{"w": torch.randn(300, 200)} for _ in range(2)]
        mean = world.step(grads)[0]["w"]
        with monkeypatch.context() as patch:
            patch.setattr("hvdcomp.compressors.dgc.tail_of", lambda values, least, unit, level: tail(values, least))
            assert torch.equal(again.step(grads)[0]["w"], mean)
        assert all(torch.equal(t, dgc_state(again)[key]) for key, t in dgc_state(world).items())
        assert 0.8 * 600 <= mean.count_nonzero() <= 2 * 1.3 * 600


def test_dgc_selects_within_its_band() -> None:
    for values in (torch.randn(50_000), torch.from_numpy(np.random.default_rng(0).standard_t(3, 50_000)).float()):
        for k in (50, 500, 5000):
            kept = chosen(DGC(), values, k)
            assert 0.8 * k <= kept.values.numel() <= 1.3 * k
            assert kept.values.numel() == int((values.abs() >= kept.values.abs().min()).sum())


def test_dgc_sends_all_that_is_left_when_its_factor_falls_to_1() -> None:
    (unit,) = units = [Unit("w", torch.Size([4]))]
    unit.state = {"own.u": torch.ones(4), "own.v": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    generator = DGC(cf=1, momentum=0.5).rounds(torch.ones(4), units[0])
    request = next(generator)
    assert request.tensor.tolist() == [2.5, 3.5, 4.5, 5.5]  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as stop:
        generator.send(request.tensor)  # type: ignore[union-attr]
    assert stop.value.value.state == {}


def test_dgc_under_an_adaptive_schedule_is_a_selector() -> None:
    world = World(2, "dgc", schedule="gravac")
    world.step([{"w": torch.randn(100, 100)} for _ in range(2)])
    assert dgc_state(world) == {}
    assert world.compression == DGC(correction=False)
    assert world.compression.error_feedback


def test_a_change_of_workers_averages_what_is_each_workers_own() -> None:
    saved = [{"states": {"w": {"own.v": torch.tensor([v]), "q": torch.tensor([v])}}} for v in (1.0, 3.0)]
    mean = _states_for_all(saved, saved[0]["states"])
    assert {key: float(tensor) for key, tensor in mean["w"].items()} == {"own.v": 2.0, "q": 1.0}
    assert set(_states_for_all([], saved[0]["states"])["w"]) == {"q"}


# -- all of them


@pytest.mark.parametrize("name", ["topk", "dgc", "threshold", *EXACT, *SIDCOS, "artopk", "oktopk"])
def test_a_tensor_beyond_int32_is_refused_without_being_made(name: str) -> None:
    compressor = create(name)
    assert isinstance(compressor, Sparsifier)
    kept = Collected(torch.tensor([0], dtype=torch.int32), torch.ones(1))
    unit = Unit("w", torch.Size([2**31]), workers=4)
    with pytest.raises(ValueError, match=f"a tensor of {2**31} elements cannot be sent sparsely"):
        next(compressor.send(kept, torch.zeros(0), unit))


@pytest.mark.parametrize("name", [*ESTIMATING, *EXACT])
@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD)
def test_awkward_tensors_select_something_within_the_bound(name: str, values: Tensor) -> None:
    compressor = create(name)
    assert isinstance(compressor, GatheredSparsifier)
    k = kept_elements(values.numel(), 100)
    for sign in (1, -1):
        kept = chosen(compressor, values * sign, k)
        assert 1 <= kept.values.numel() <= compressor.most(k)
        assert torch.equal(kept.values, (values * sign)[kept.positions])
        assert kept.positions.tolist() == sorted(set(kept.positions.tolist()))
        assert float(kept.values.abs().max()) == float(values.abs().max())


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*ESTIMATING, *EXACT, "artopk", "threshold", "redsync quantised"])
def test_applied_and_left_are_what_there_was(name: str, workers: int) -> None:
    more: dict[str, object] = {"threshold": 1.0} if name == "threshold" else {"cf": 10}
    more |= {"quantise": True} if "quantised" in name else {}
    world = World(workers, name.split()[0], **more)
    for step in range(4):
        grads = [{"w": torch.randn(40, 30), "e": torch.zeros(0)} for _ in range(workers)]
        before = [world.residual(w, "w") if step else torch.zeros(40, 30) for w in range(workers)]
        mean = world.step(grads)[0]["w"]
        acc = torch.stack([b + g["w"] for b, g in zip(before, grads, strict=True)]).mean(0)
        left = torch.stack([world.residual(w, "w") for w in range(workers)]).mean(0)
        assert torch.allclose(mean + left, acc, atol=1e-6)
        assert 0 < int((mean != 0).sum()) <= workers * 240
