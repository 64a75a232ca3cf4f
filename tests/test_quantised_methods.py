"""Each quantised method: values worked by hand, bytes, unbiasedness, feedback, awkward tensors, state."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from test_checkpointing import flat, grads, load, states, through_a_file, trained, world
from test_compressors import AWKWARD, drive
from torch import Tensor

from hvdcomp.compressors import ATOMO, QSGD, Compressor, Int8, Natural, TernGrad, create, signsgd
from hvdcomp.compressors.quantised import Deterministic
from hvdcomp.compressors.requests import Unit, Volume
from hvdcomp.compressors.stochastic import Stochastic
from hvdcomp.errors import WireError
from hvdcomp.kernels import codes
from hvdcomp.kernels.codes import add_levels_, add_lookup_, codes_nbytes, pack_codes, unpack_codes
from hvdcomp.simulation import World

T = TypeVar("T")

METHODS: list[Compressor] = [
    *(create(name) for name in ("signsgd", "signum", "efsignsgd", "onebit", "int8", "qsgd", "terngrad", "natural")),
    Int8(error_feedback=False),
    QSGD(levels=4, bucket=7),
    TernGrad(shared_scale=True),
    TernGrad(clip=None),
]
EVERY = [*METHODS, ATOMO(budget=1)]
WITH_FEEDBACK = [method for method in METHODS if method.error_feedback]
VOTES = [method for method in METHODS if method.name in ("signsgd", "signum")]
ALONE = [method for method in METHODS if isinstance(method, Deterministic)]
"""Methods whose payload follows from the tensor alone."""
STOCHASTIC = [method for method in METHODS if isinstance(method, Stochastic)]

Y = torch.tensor([1.0, -2.0, 3.0, -4.0])


def each(methods: list[Compressor]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("method", methods, ids=repr)


def step(method: Compressor | str, *tensors: Tensor, **parameters: Any) -> Tensor:
    """The first step's mean of one tensor a worker."""
    return World(len(tensors), method, **parameters).step([{"w": tensor} for tensor in tensors])[0]["w"]


# -- codes


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 8, 9, 17, 1000])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_codes_come_back_packed_least_significant_first(count: int, width: int) -> None:
    given = torch.randint(0, 2**width, (count,), dtype=torch.uint8)
    packed = pack_codes(given, width)
    assert packed.numel() == codes_nbytes(count, width)
    assert torch.equal(unpack_codes(packed, count, width), given)
    as_number = sum(int(byte) << 8 * place for place, byte in enumerate(packed))
    assert as_number == sum(int(code) << width * place for place, code in enumerate(given))


# -- the compiled loops against the torch operations

LENGTHS = [0, 1, 63, 64, 65, 127, 255, 256, 257, 1000, 70_001]
"""Around whole blocks, and one that several threads share."""


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def spread(count: int) -> Tensor:
    """Values of many magnitudes, some of them zero, negative zero, or subnormal."""
    values = torch.randn(count) * torch.exp2(torch.randint(-12, 12, (count,)))
    for step, special in ((7, 0.0), (11, -0.0), (13, 1e-40), (17, -1e-45)):
        values[step::step] = special
    return values


def with_torch(monkeypatch: pytest.MonkeyPatch, run: Callable[[], T]) -> T:
    """What the torch operations make of it."""
    with monkeypatch.context() as patch:
        patch.setattr(codes, "is_compiled", lambda values: False)
        return run()


@pytest.mark.parametrize("count", LENGTHS)
def test_signs_are_packed_alike_and_their_sums_agree(count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = spread(count)
    ours, theirs = (torch.full((codes_nbytes(count, 1) + 3,), 77, dtype=torch.uint8) for _ in range(2))
    sides = codes.pack_sides(values, ours[1:-2])
    expected = with_torch(monkeypatch, lambda: codes.pack_sides(values, theirs[1:-2]))
    assert torch.equal(ours, theirs)
    assert (sides.upper, sides.lower) == (expected.upper, expected.lower)
    assert sides.upper_sum == pytest.approx(expected.upper_sum, rel=1e-12)
    assert sides.lower_sum == pytest.approx(expected.lower_sum, rel=1e-12)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("scale", [1e-38, 1.0, 3e38])
def test_steps_are_rounded_alike(count: int, scale: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = (torch.rand(count) * 2 - 1) * scale
    ours, theirs = (torch.full((count + 3,), 77, dtype=torch.uint8) for _ in range(2))
    ends = codes.round_steps(values, ours[1:-2])
    assert ends == with_torch(monkeypatch, lambda: codes.round_steps(values, theirs[1:-2]))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("width", [1, 2, 8])
def test_lookups_add_alike(count: int, width: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (codes_nbytes(count, width) + 1,), dtype=torch.uint8)[1:]
    table, ours = torch.randn(2**width), torch.randn(count)
    theirs = ours.clone()
    add_lookup_(ours, data, width, table)
    with_torch(monkeypatch, lambda: add_lookup_(theirs, data, width, table))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("bucket", [1, 7, 64, 100, 512, 100_000])
def test_levels_add_alike(count: int, bucket: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    levels, scales = torch.randint(-127, 128, (count,), dtype=torch.int8), torch.randn(-(-count // bucket))
    ours = torch.randn(count)
    theirs = ours.clone()
    add_levels_(ours, levels, scales, bucket)
    with_torch(monkeypatch, lambda: add_levels_(theirs, levels, scales, bucket))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("out", [None, 3.0])
def test_momenta_blend_alike(count: int, out: float | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old, gradient = torch.randn(count), torch.randn(count)
    target = None if out is None else torch.full((count,), out)
    ours = codes.blended(old, gradient, 0.9, target)
    assert target is None or ours is target
    assert torch.allclose(ours, with_torch(monkeypatch, lambda: codes.blended(old, gradient, 0.9, None)), atol=1e-6)


# -- random numbers


def splitmix64(seed: int, first: int, count: int) -> np.ndarray:
    """Steele, Lea and Flood 2014, from number ``first`` on."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def drawn(key: int, count: int, bucket: int) -> np.ndarray:
    """The 32 random bits of each element, as int64; blocks of 64 begin anew with each bucket."""
    found = np.empty(count, dtype=np.int64)
    for begin in range(0, count, bucket):
        end = min(begin + bucket, count)
        for start in range(begin, end, 64):
            found[start : min(start + 64, end)] = splitmix64(key, start, 32).view(np.uint32)[: min(64, end - start)]
    return found


def test_the_reference_is_splitmix64() -> None:
    """The first numbers of seed 1234567, as printed by the published C code."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, 0, 4).tolist() == expected


KEY = 0xFEDCBA9876543210


@pytest.mark.parametrize("count", LENGTHS)
def test_ternary_codes_are_those_of_the_random_numbers(count: int, threads: int) -> None:
    values = spread(count)
    limit = float(values.abs().max()) / 2 if count else 0.0
    out = torch.full((codes_nbytes(count, 2) + 3,), 77, dtype=torch.uint8)
    codes.round_ternary(values, limit, 1.5 * limit, KEY, out[1:-2])
    shares = np.minimum(np.abs(values.numpy()), np.float32(limit)) / np.float32(1.5 * limit or 1)
    kept = ((shares * np.float32(2**30)).astype(np.int64) + (drawn(KEY, count, count or 1) >> 2)) >> 30
    expected = kept * np.where(values.numpy() < 0, 2, 1)
    assert unpack_codes(out[1:-2], count, 2).tolist() == expected.tolist()
    assert out[[0, -2, -1]].tolist() == [77] * 3


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("bucket", [3, 64, 100, 512])
def test_levels_are_those_of_the_random_numbers(
    count: int, bucket: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = spread(count)
    norms, exact = torch.empty(-(-count // bucket)), torch.empty(-(-count // bucket))
    out = torch.empty(count, dtype=torch.uint8)
    codes.round_levels(values, 127, bucket, KEY, norms, out)
    with_torch(monkeypatch, lambda: codes.round_levels(values, 127, bucket, KEY, exact, out.clone()))
    assert torch.allclose(norms, exact, rtol=1e-5, atol=1e-44)
    divisors = torch.where(norms > 0, norms, 1).repeat_interleave(bucket)[:count].numpy()
    scaled = np.minimum(np.abs(values.numpy()) / divisors, np.float32(1)) * np.float32(127)
    levels = ((scaled * np.float32(2**24)).astype(np.int64) + (drawn(KEY, count, bucket) >> 8)) >> 24
    assert out.view(torch.int8).tolist() == (levels * np.where(values.numpy() < 0, -1, 1)).tolist()


@pytest.mark.parametrize("count", LENGTHS)
def test_powers_are_those_of_the_random_numbers(count: int, threads: int) -> None:
    """Of normal numbers 23 random bits are added to the mantissa: the carry is the rounding."""
    values = torch.randn(count) + 1e-30
    out = torch.full((count + 3,), 77, dtype=torch.uint8)
    codes.round_powers(values, 4, KEY, out[1:-2])
    bits = (values.numpy().view(np.int32) & 0x7FFFFFFF).astype(np.int64)
    powers = ((bits + (drawn(KEY, count, count or 1) >> 9)) >> 23) - 127
    assert out[1:-2].tolist() == (4 - powers + 128 * (values.numpy() < 0)).tolist()
    assert out[[0, -2, -1]].tolist() == [77] * 3


@each(STOCHASTIC)
def test_payloads_do_not_depend_on_threads(method: Stochastic) -> None:
    values, before = torch.randn(300_001), torch.get_num_threads()
    payloads = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        payloads.append(method.encode(values, Unit("w", values.shape)))
    torch.set_num_threads(before)
    assert torch.equal(payloads[0], payloads[1])
    assert torch.equal(payloads[0], payloads[2])


@pytest.mark.parametrize("peak", [1e-45, 1e-42, 1.2e-38, 1e-20, 1.0, 1.9, 2.0**64, 3.4e38])
def test_natural_sends_a_neighbouring_power_of_every_magnitude(peak: float) -> None:
    """Every float32 has the powers of two next to it, and what is below the least that, or zero."""
    values = torch.randint(0, 2**31, (50_000,), dtype=torch.int32).view(torch.float32)
    values = torch.cat([values[values <= peak], torch.tensor([peak, 0.0])])
    sent = draws(Natural(), torch.cat([values, -values]), 1)[0].double()
    exact = values.double()
    least = 2.0 ** (math.frexp(peak)[1] - 126) if peak < 2.0**127 else 2.0
    lower = torch.where(exact >= least, torch.exp2(torch.frexp(exact)[1] - 1.0), 0.0)
    upper = torch.where(exact >= least, 2 * lower, least).clamp(max=2.0**127)
    for part, sign in ((sent[: values.numel()], 1), (sent[values.numel() :], -1)):
        part = part * sign
        assert ((part == lower) | (part == upper.float().double())).all()


@pytest.mark.parametrize("peak", [1e-42, 1e-38, 1.0, 1e38, 1.7e38])
@pytest.mark.parametrize("share", [0.9, 0.3, 1e-3, 1e-5])
@each([TernGrad(clip=None), TernGrad(clip=None, shared_scale=True), Natural(), QSGD(bucket=400_000), QSGD(4, 400_000)])
def test_every_magnitude_is_unbiased(method: Stochastic, share: float, peak: float) -> None:
    """Many elements alike beside the largest: rounding p steps of s has a variance of (p - p^2) s^2, p s^2 at most."""
    values = torch.full((400_000,), peak * share)
    values[::2] *= -1
    values[0] = peak
    (sent,) = draws(method, values, 1).double()
    magnitude = float(values[1].double())
    step_size, lost = peak, 1e-45
    if isinstance(method, QSGD):
        step_size = float(values.double().norm()) / method.levels
        lost *= method.levels  # of norm / levels, if that is subnormal
    elif isinstance(method, Natural):
        step_size = max(magnitude, 2.0 ** (math.frexp(peak)[1] - 126))
    mean = float((sent * values.sign())[1:].mean())
    assert abs(mean - magnitude) <= 5 * math.sqrt(magnitude * step_size / 400_000) + 1e-6 * magnitude + lost


# -- bytes


SHAPES = [(), (1,), (7,), (0,), (0, 3), (3, 0), (1, 1), (8, 6), (4, 3, 3, 3), (1, 50), (50, 1), (511,), (513, 2)]


@each(METHODS)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_requests_are_exactly_what_the_rounds_ask_for(method: Compressor, shape: tuple[int, ...], workers: int) -> None:
    _, volumes, _ = drive(method, [torch.randn(shape) for _ in range(workers)])
    assert volumes == method.requests(shape, workers)
    assert all(volume.kind == method.collective for volume in volumes)


@pytest.mark.parametrize(
    ("method", "nbytes"),
    [
        (create("signsgd"), 151),  # n = 1201: ceil(n / 8)
        (create("signum"), 151),
        (create("efsignsgd"), 151 + 4),
        (create("onebit"), 151 + 8),
        (QSGD(), 1201 + 4 * 3),  # n + 4 ceil(n / 512)
        (QSGD(bucket=100), 1201 + 4 * 13),
        (TernGrad(), 301 + 4),  # ceil(n / 4) + 4
        (TernGrad(shared_scale=True), 301 + 4),
        (Natural(), 1201 + 4),
        (Int8(), 1201 + 8),
    ],
    ids=repr,
)
def test_bytes_are_those_of_the_table(method: Compressor, nbytes: int) -> None:
    for workers in (1, 4):
        assert sum(volume.nbytes for volume in method.requests((1201,), workers)) == nbytes


@each(METHODS)
@pytest.mark.parametrize("change", [-1, 1, 8])
def test_a_payload_of_another_length_is_a_wire_error(method: Compressor, change: int) -> None:
    tensor = torch.randn(77)
    generator = method.rounds(tensor, Unit("w", tensor.shape, 0, 2))
    payload = next(generator).payload  # type: ignore[union-attr]
    wrong = torch.cat([payload, payload])[: payload.numel() + change]
    with pytest.raises(WireError, match=rf"worker 1 sent {wrong.numel()} bytes, expected {payload.numel()}"):
        generator.send([payload, wrong])


# -- signSGD and Signum


@each(VOTES)
def test_majority_vote_by_hand(method: Compressor) -> None:
    """[1, -2], [3, 4], [-1, -5] -> [+1, -1]; Signum's first momentum has the gradient's signs."""
    assert step(method, *(torch.tensor(x) for x in ([1.0, -2.0], [3.0, 4.0], [-1.0, -5.0]))).tolist() == [1.0, -1.0]


@each(VOTES)
def test_a_tie_is_zero_and_a_zero_is_sent_as_plus(method: Compressor) -> None:
    a, b = torch.tensor([1.0, 0.0, -0.0, 2.0, -3.0]), torch.tensor([-1.0, 0.0, 0.0, 9.0, -1.0])
    assert step(method, a, b).tolist() == [0.0, 1.0, 1.0, 1.0, -1.0]


def test_votes_of_each_number_of_workers_are_those_of_the_signs() -> None:
    for workers in range(1, 9):
        tensors = [torch.randn(1001) for _ in range(workers)]
        assert torch.equal(step("signsgd", *tensors), sum(t.sign() for t in tensors).sign())  # type: ignore[union-attr]


def test_a_vote_in_parts_is_that_of_all(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(signsgd, "_AT_ONCE", 8)
    tensors = [torch.randn(101, generator=torch.Generator().manual_seed(worker)) for worker in range(3)]
    expected = sum(torch.where(tensor >= 0, 1.0, -1.0) for tensor in tensors).sign()
    assert step("signsgd", *tensors).equal(expected)


def test_signum_follows_the_momentum_by_hand() -> None:
    """m = .9 m + .1 g of 1, -5, -5: .1, -.41, -.869; of 1, -.5, -.5: .1, .04, -.014."""
    made = World(1, "signum")
    applied = [made.step([{"w": torch.tensor([g, h])}])[0]["w"].tolist() for g, h in ((1, 1.0), (-5, -0.5), (-5, -0.5))]
    assert applied == [[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]]
    assert torch.allclose(momentum_of(made, 0), torch.tensor([-0.869, -0.014]))


def momentum_of(made: World, worker: int) -> Tensor:
    return made._buckets[worker][0].parts[0].unit.state["own.momentum"]


@pytest.mark.parametrize("method", [*VOTES, create("efsignsgd"), QSGD(), TernGrad(), Int8(False)], ids=repr)
def test_a_loss_scale_is_on_the_result_as_it_was_on_the_gradients(method: Compressor) -> None:
    """A GradScaler will divide by it, votes too."""
    plain, scaled = world(2, method), world(2, method)
    for number in range(3):
        given = grads(2, number)
        expected = plain.step(given)[0]
        means = scaled.step([{n: t * 1024 for n, t in worker.items()} for worker in given], scale=1024.0)[0]
        assert all(torch.equal(means[name], expected[name] * 1024) for name in means)


def test_signum_without_momentum_is_signsgd() -> None:
    plain, made = World(3, "signsgd"), World(3, "signum", momentum=0)
    for _ in range(3):
        grads = [{"w": torch.randn(33)} for _ in range(3)]
        assert torch.equal(plain.step(grads)[0]["w"], made.step(grads)[0]["w"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_leaves_signums_momentum(bad: float) -> None:
    made = World(2, "signum")
    for _ in range(3):  # from the third on a momentum is built in the memory of an older one
        made.step([{"w": Y}, {"w": -Y}])
    before = [momentum_of(made, worker).clone() for worker in (0, 1)]
    made.step([{"w": Y}, {"w": torch.tensor([1.0, bad, 1.0, 1.0])}])
    assert made.skipped
    assert all(torch.equal(momentum_of(made, worker), before[worker]) for worker in (0, 1))


def test_signums_momentum_survives_a_checkpoint() -> None:
    unbroken = trained(2, create("signum"))
    saved = through_a_file(states(unbroken))
    assert all(set(state["states"]["a.weight"]) == {"own.momentum"} for state in saved)
    resumed = world(2, create("signum"))
    for exchange, state in zip(resumed.exchanges, saved, strict=True):
        load(exchange, state)
    assert flat(states(resumed)) == flat(states(unbroken))
    assert flat(states(resumed)[0]) != flat(states(resumed)[1])


# -- EF-signSGD and 1-bit SGD


@pytest.mark.parametrize(
    ("name", "applied", "left"),
    [
        ("efsignsgd", [2.5, -2.5, 2.5, -2.5], [-1.5, 0.5, 0.5, -1.5]),
        ("onebit", [2.0, -3.0, 2.0, -3.0], [-1.0, 1.0, 1.0, -1.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_bit_methods_by_hand(name: str, applied: list[float], left: list[float], dtype: torch.dtype) -> None:
    made = World(1, name)
    assert made.step([{"w": Y.to(dtype)}])[0]["w"].tolist() == applied
    assert made.residual(0, "w").tolist() == left


def test_efsignsgd_second_step_by_hand() -> None:
    """p = [1,-2,3,-4] + [-1.5,.5,.5,-1.5] = [-.5,-1.5,3.5,-5.5]: mean magnitude 2.75."""
    made = World(1, "efsignsgd")
    made.step([{"w": Y}])
    assert made.step([{"w": Y}])[0]["w"].tolist() == [-2.75, -2.75, 2.75, -2.75]
    assert made.residual(0, "w").tolist() == [2.25, 1.25, 0.75, -2.75]


def test_each_workers_scale_is_its_own() -> None:
    """(2.5 * [+,-,+,-] + 1 * [+,+,+,+]) / 2."""
    assert step("efsignsgd", Y, torch.ones(4)).tolist() == [1.75, -0.75, 1.75, -0.75]
    assert step("onebit", Y, torch.ones(4)).tolist() == [1.5, -1.0, 1.5, -1.0]


@pytest.mark.parametrize("name", ["efsignsgd", "onebit"])
def test_a_zero_belongs_to_the_upper_side(name: str) -> None:
    tensor = torch.tensor([0.0, 0.0, -3.0, 3.0])
    expected = {"efsignsgd": [1.5, 1.5, -1.5, 1.5], "onebit": [1.0, 1.0, -3.0, 1.0]}[name]
    assert step(name, tensor).tolist() == expected


@pytest.mark.parametrize("name", ["efsignsgd", "onebit"])
def test_means_of_sides_do_not_overflow(name: str) -> None:
    tensor = torch.full((100,), 3e38)
    made = World(1, name)
    assert torch.allclose(made.step([{"w": tensor}])[0]["w"], tensor)
    assert not made.skipped
    made = World(1, name)
    made.step([{"w": torch.full((5,), torch.finfo(torch.float32).max)}])
    assert made.skipped or torch.isfinite(made.residual(0, "w")).all()


# -- int8


def test_int8_by_hand() -> None:
    """Between -1 and 254 codes are whole numbers: 2.4 and 2.6 are sent as 2 and 3."""
    made = World(1, "int8")
    assert made.step([{"w": torch.tensor([-1.0, 254.0, 2.4, 2.6])}])[0]["w"].tolist() == [-1.0, 254.0, 2.0, 3.0]
    assert torch.allclose(made.residual(0, "w"), torch.tensor([0.0, 0.0, 0.4, -0.4]), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3.4e38])
def test_int8_errs_by_half_a_step_at_most(scale: float) -> None:
    tensor = (torch.rand(1000) * 2 - 1) * scale
    sent = step("int8", tensor)
    half_step = (float(tensor.max()) - float(tensor.min())) / 510
    assert float((sent.double() - tensor.double()).abs().max()) <= half_step * 1.001
    assert sent.unique().numel() <= 256


# -- methods that round at random


def draws(method: Stochastic, values: Tensor, count: int) -> Tensor:
    """What ``count`` steps of one worker send."""
    sent = torch.zeros(count, values.numel())
    for number in range(count):
        method.add_(sent[number], method.encode(values, Unit("w", values.shape, step=number)), 1.0)
    return sent


def within(mean: Tensor, expected: Tensor, sigma: Tensor, count: int) -> bool:
    """Whether means of ``count`` draws are within 5 standard errors: a right one is not once in 1.7 million."""
    return bool(((mean - expected).abs() <= 5 * sigma / math.sqrt(count) + 1e-6 * expected.abs()).all())


SAMPLE = torch.tensor([0.0, 1.0, -1.5, 0.37, -0.01, 2.9, 1e-4, -2.2])


@pytest.mark.parametrize("levels", [1, 2, 5, 127])
@pytest.mark.parametrize("bucket", [3, 8, 512])
def test_qsgd_is_unbiased_with_the_variance_of_its_levels(levels: int, bucket: int) -> None:
    """|v| = norm / levels * (l + p): Bernoulli with variance p (1 - p) (norm / levels)^2."""
    sent = draws(QSGD(levels=levels, bucket=bucket), SAMPLE, 3000)
    norms = torch.cat([part.norm().expand(part.numel()) for part in SAMPLE.split(bucket)])
    unit = norms / levels
    p = (SAMPLE.abs() / unit).frac()
    sigma = (p * (1 - p)).sqrt() * unit
    assert within(sent.mean(0), SAMPLE, sigma, 3000)
    assert torch.allclose(sent.std(0), sigma, rtol=0.25, atol=float(unit.max()) * 0.03)


def test_terngrad_is_unbiased_with_the_variance_of_a_bernoulli() -> None:
    sent = draws(TernGrad(clip=None), SAMPLE, 3000)
    sigma = (SAMPLE.abs() * (2.9 - SAMPLE.abs())).sqrt()
    assert within(sent.mean(0), SAMPLE, sigma, 3000)
    assert torch.allclose(sent.std(0), sigma, rtol=0.25, atol=0.03)


def test_natural_is_unbiased_with_a_relative_variance_of_an_eighth_at_most() -> None:
    sent = draws(Natural(), SAMPLE, 3000)
    lower = torch.exp2(SAMPLE.abs().log2().floor())
    sigma = ((SAMPLE.abs() - lower) * (2 * lower - SAMPLE.abs())).clamp(min=0).sqrt()
    assert (sigma.square() <= SAMPLE.square() / 8 + 1e-12).all()
    assert within(sent.mean(0), SAMPLE, sigma, 3000)
    assert torch.allclose(sent.std(0), sigma, rtol=0.25, atol=1e-3)


@each(STOCHASTIC)
def test_means_over_workers_and_steps_are_unbiased(method: Stochastic) -> None:
    """Different tensors, other draws on each worker; no element strays by more than its payload's largest number."""
    made = World(3, method.with_parameters(clip=None) if isinstance(method, TernGrad) else method)
    grads = [{"w": torch.randn(2, 4)} for _ in range(3)]
    mean = torch.stack([made.step(grads)[0]["w"] for _ in range(1000)]).mean(0)
    expected = torch.stack([worker["w"] for worker in grads]).mean(0)
    largest = max(float(worker["w"].norm()) for worker in grads)
    assert within(mean, expected, torch.tensor(largest / 2 / math.sqrt(3)), 1000)


@each(STOCHASTIC)
def test_draws_depend_on_seed_step_name_and_worker(method: Stochastic) -> None:
    values = torch.rand(200)
    base = Unit("w", values.shape)
    others = [Unit("w", values.shape, step=1), Unit("v", values.shape), Unit("w", values.shape, worker=1)]
    payload = method.encode(values, base)
    assert torch.equal(payload, method.encode(values, base))
    assert all(not torch.equal(payload, method.encode(values, other)) for other in others)
    assert not torch.equal(payload, method.with_parameters(seed=1).encode(values, base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_qsgd_by_hand(dtype: torch.dtype) -> None:
    """[3, 4] has norm 5: five levels are exact, one sends 0 or 5."""
    tensor = torch.tensor([3.0, 4.0], dtype=dtype)
    for _ in range(20):
        assert step(QSGD(levels=5), tensor, tensor).tolist() == pytest.approx([3.0, 4.0])
    made = World(1, QSGD(levels=1))
    sent = torch.stack([made.step([{"w": tensor}])[0]["w"] for _ in range(100)])
    assert sent.unique().tolist() == [0.0, 5.0]


def test_qsgd_buckets_have_their_own_norms() -> None:
    """A zero bucket stays zero beside a large one, and a last bucket that is not full counts."""
    tensor = torch.cat([torch.zeros(512), torch.full((512,), 1e30), torch.tensor([1e-30])])
    sent = step(QSGD(), tensor)
    assert sent[:512].count_nonzero() == 0
    assert sent[1024] == tensor[1024]
    assert torch.isfinite(sent).all()


@pytest.mark.parametrize("shared", [False, True])
def test_terngrad_by_hand(shared: bool) -> None:
    """[2, -1, 0]: values in {0, +-2}, the mean is the input; 2.5 sigma does not clip."""
    tensor = torch.tensor([2.0, -1.0, 0.0])
    made = World(1, TernGrad(shared_scale=shared))
    sent = torch.stack([made.step([{"w": tensor}])[0]["w"] for _ in range(2000)])
    assert set(sent.unique().tolist()) == {-2.0, 0.0, 2.0}
    assert sent[:, 0].unique().tolist() == [2.0]
    assert within(sent.mean(0), tensor, torch.tensor([0.0, 1.0, 0.0]), 2000)


def test_terngrad_clips_at_sigmas_about_zero() -> None:
    """63 ones and a 100 have sigma = sqrt((63 + 10000) / 64) = 12.54: the 100 is sent as 31.35, always."""
    tensor = torch.ones(64)
    tensor[5] = 100.0
    limit = 2.5 * math.sqrt(10063 / 64)
    assert step("terngrad", tensor)[5].item() == pytest.approx(limit)
    assert step(TernGrad(clip=1), tensor)[5].item() == pytest.approx(limit / 2.5)
    assert step(TernGrad(clip=None), tensor)[5].item() == 100.0


def test_terngrad_with_a_shared_scale_uses_the_largest_of_the_clipped() -> None:
    """Scales 2 and 4: each sends 0 or 4, so that the mean of two is 0, 2 or 4; each worker's clipping is its own."""
    made = World(2, TernGrad(shared_scale=True, clip=None))
    grads = [{"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([4.0, 1.0])}]
    sent = torch.stack([made.step(grads)[0]["w"] for _ in range(2000)])
    assert set(sent.unique().tolist()) == {0.0, 2.0, 4.0}
    sigma = torch.tensor([2.0, math.sqrt(6)]) / 2
    assert within(sent.mean(0), torch.tensor([3.0, 1.0]), sigma, 2000)


def test_terngrad_with_a_shared_scale_clips_each_worker_at_its_own_limit() -> None:
    """The 100 among ones is clipped to 31.35 beside a worker of hundreds, and sent as 0 or 100: 65.7 on average."""
    tensor = torch.ones(64)
    tensor[5] = 100.0
    made = World(2, TernGrad(shared_scale=True))
    sent = torch.stack([made.step([{"w": tensor}, {"w": torch.full((64,), 100.0)}])[0]["w"][5] for _ in range(400)])
    assert set(sent.tolist()) == {50.0, 100.0}
    limit = 2.5 * math.sqrt(10063 / 64)
    assert within(sent.mean(), torch.tensor((limit + 100) / 2), torch.tensor(50 * 0.47), 400)


@pytest.mark.parametrize("shared", [False, True])
def test_a_ternary_code_of_three_is_a_wire_error(shared: bool) -> None:
    tensor = torch.randn(9)
    generator = TernGrad(shared_scale=shared).rounds(tensor, Unit("w", tensor.shape))
    payload = next(generator).payload  # type: ignore[union-attr]
    if shared:
        payload = generator.send([payload]).payload  # type: ignore[union-attr]
    payload = payload.clone()
    payload[-2] = 0b00001100
    with pytest.raises(WireError, match="worker 0 sent a ternary code of 3"):
        generator.send([payload])


def test_natural_sends_powers_of_two_next_to_the_number() -> None:
    for value, powers in ((3.0, {2.0, 4.0}), (-5.0, {-4.0, -8.0}), (0.3, {0.25, 0.5}), (8.0, {8.0}), (0.0, {0.0})):
        assert set(draws(Natural(), torch.tensor([value, 100.0]), 200)[:, 0].tolist()) == powers


@pytest.mark.parametrize("value", [3e-38, 1.5e-38, 1e-40, 2.0**-149])
def test_natural_is_unbiased_for_what_is_tiny_beside_the_largest(value: float) -> None:
    """Beside 1, the least power is 2^-125 = 2.35e-38: less is sent as that or as zero."""
    lowest = 2.0**-125
    sent = draws(Natural(), torch.tensor([value, 1.0]), 500)[:, 0]
    assert set(sent.tolist()) <= {0.0, lowest, 2 * lowest}
    assert abs(float(sent.double().mean()) - value) <= 5 * 0.5 * lowest / math.sqrt(500)
    alone = draws(Natural(), torch.tensor([value]), 500)[:, 0].double()
    assert float((alone.mean() - value).abs()) <= 5 * value / math.sqrt(500)


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "natural", "int8"])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_largest_numbers_do_not_overflow(name: str, workers: int) -> None:
    made = World(workers, name)
    for _ in range(5):
        mean = made.step([{"w": torch.tensor([3.4e38, -3e38, 1.0])}] * workers)[0]["w"]
        assert not made.skipped
        assert torch.isfinite(mean).all()


# -- ATOMO


def test_atomo_sends_all_of_a_diagonal_within_its_budget() -> None:
    """Rank 2 of equal singular values 3: p = min(1, 2 * 3 / 6) = 1."""
    matrix = torch.zeros(6, 7)
    matrix[1, 2], matrix[4, 0] = 3.0, -3.0
    assert torch.allclose(step(ATOMO(budget=2), matrix, matrix), matrix, atol=1e-6)


def test_atomo_scales_a_component_by_its_probability() -> None:
    """Singular values 3 and 1, budget 1: 3 / .75 = 4 with probability .75, else 1 / .25 = 4."""
    matrix = torch.zeros(6, 7)
    matrix[1, 2], matrix[4, 0] = 3.0, -1.0
    made = World(1, ATOMO(budget=1))
    sent = torch.stack([made.step([{"w": matrix}])[0]["w"] for _ in range(400)])
    assert torch.allclose(sent[:, 1, 2].abs() + sent[:, 4, 0].abs(), torch.tensor(4.0), rtol=1e-5)
    assert within(sent[:, 1, 2].mean(), torch.tensor(3.0), torch.tensor(4 * math.sqrt(0.75 * 0.25)), 400)
    assert within(sent[:, 4, 0].mean(), torch.tensor(-1.0), torch.tensor(4 * math.sqrt(0.75 * 0.25)), 400)


def test_atomo_is_unbiased_over_workers() -> None:
    grads = [{"w": torch.randn(6, 8)} for _ in range(2)]
    made = World(2, ATOMO(budget=2))
    sent = torch.stack([made.step(grads)[0]["w"] for _ in range(600)])
    expected = (grads[0]["w"] + grads[1]["w"]) / 2
    assert within(sent.mean(0), expected, sent.std(0) * 1.1, 600)


@pytest.mark.parametrize("shape", [(6, 8), (8, 6), (4, 3, 3, 3), (2, 2), (7,), (), (0, 3)], ids=str)
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_atomo_sends_its_budget_at_most_and_small_matrices_dense(shape: tuple[int, ...], budget: int) -> None:
    method = ATOMO(budget=budget)
    tensors = [torch.randn(shape) for _ in range(2)]
    _, (asked,), _ = drive(method, tensors)
    (bound,) = method.requests(shape, 2)
    assert asked.kind == bound.kind
    rows = shape[0] if shape else 1
    if len(shape) < 2 or not tensors[0].numel() or budget * (rows + tensors[0].numel() // rows) >= tensors[0].numel():
        assert asked == Volume(0, "allreduce", 4 * tensors[0].numel())
        assert torch.allclose(step(method, *tensors), (tensors[0] + tensors[1]) / 2)
    else:
        component = 4 * (rows + tensors[0].numel() // rows)
        assert bound == Volume(0, "allgather", budget * component)
        assert asked.nbytes in {count * component for count in range(budget + 1)}


def test_atomo_refuses_a_payload_that_is_no_whole_number_of_components() -> None:
    generator = ATOMO(budget=2).rounds(torch.randn(48), Unit("w", torch.Size([6, 8])))
    payload = next(generator).payload  # type: ignore[union-attr]
    with pytest.raises(WireError, match=r"worker 0 sent .* bytes, expected 0 to 2 components of 56"):
        generator.send([torch.cat([payload, payload[:4]])])


# -- feedback, awkward tensors, types


@each(WITH_FEEDBACK)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_what_was_applied_and_what_is_left_make_up_what_was_given(method: Compressor, workers: int) -> None:
    made = World(workers, method)
    applied, given = torch.zeros(7, 13), torch.zeros(7, 13)
    for _ in range(5):
        grads = [{"w": torch.randn(7, 13) * 10 ** random.uniform(-3, 3)} for _ in range(workers)]
        applied += made.step(grads)[0]["w"]
        given += torch.stack([worker["w"] for worker in grads]).mean(0)
    left = torch.stack([made.residual(worker, "w") for worker in range(workers)]).mean(0)
    assert torch.allclose(applied + left, given, rtol=1e-5, atol=1e-5 * float(given.abs().max()))


@each(EVERY)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("tensor", AWKWARD.values(), ids=AWKWARD)
def test_awkward_tensors(method: Compressor, tensor: Tensor, workers: int) -> None:
    made = World(workers, method)
    total = torch.zeros_like(tensor)
    for number in range(1, 4):
        means = made.step([{"w": tensor}] * workers)
        assert not made.skipped
        for mean in means:
            assert mean["w"].shape == tensor.shape
            assert torch.isfinite(mean["w"]).all()
            assert torch.equal(mean["w"], means[0]["w"])
        total += means[0]["w"]
        if method.error_feedback:
            assert torch.allclose(total + made.residual(0, "w"), number * tensor, rtol=1e-4, atol=1e-6)
    if method in VOTES:
        assert torch.equal(total, 3 * torch.where(tensor >= 0, 1.0, -1.0))
    elif method.name not in ("qsgd", "natural", "atomo") and (
        tensor.numel() == 0 or bool((tensor == tensor.reshape(-1)[0]).all())
    ):
        assert torch.allclose(total, 3 * tensor, rtol=0.02, atol=1e-7)  # nothing to lose in a constant tensor


@each(EVERY)
@pytest.mark.parametrize("granularity", ["tensor", "model"])
def test_mixed_shapes_and_types(method: Compressor, granularity: str) -> None:
    if method.needs_matrices and granularity != "tensor":
        pytest.skip("matrices only")
    types = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16, "d": torch.float64}
    shapes: dict[str, tuple[int, ...]] = {"m": (6, 8), "v": (5,), "s": (), "e": (0,)}
    grads = [
        {f"{t}.{s}": torch.randn(shape).to(dtype) for t, dtype in types.items() for s, shape in shapes.items()}
        for _ in range(3)
    ]
    made = World(3, method, granularity=granularity)
    for _ in range(2):
        means = made.step(grads)
    for name, gradient in grads[0].items():
        assert means[0][name].dtype == gradient.dtype
        assert means[0][name].shape == gradient.shape
        assert torch.isfinite(means[0][name]).all()
        assert all(torch.equal(mean[name], means[0][name]) for mean in means)


@each(WITH_FEEDBACK)
def test_float64_gradients_keep_their_precision(method: Compressor) -> None:
    made, gradient = World(1, method), torch.randn(6, 8, dtype=torch.float64) * 1e-200
    mean = made.step([{"w": gradient}])[0]["w"]
    assert made.residual(0, "w").dtype == torch.float64
    assert torch.allclose(mean + made.residual(0, "w"), gradient, rtol=1e-12, atol=0)
    assert mean.count_nonzero() == 48


@each(EVERY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(3, 5), (40, 50)], ids=str)
def test_a_step_that_is_not_finite_is_skipped_and_harms_nothing(
    method: Compressor, bad: float, shape: tuple[int, ...]
) -> None:
    made, sound = World(2, method), World(2, method)
    grads = [{"w": torch.randn(shape)} for _ in range(2)]
    poisoned = grads[1]["w"].clone()
    poisoned.view(-1)[1] = bad
    for each_world in (made, sound):
        each_world.step(grads)
    means = made.step([grads[0], {"w": poisoned}])
    sound.step_count += 1
    assert made.skipped
    assert all(torch.isnan(mean["w"]).all() for mean in means)
    again = [{"w": torch.randn(shape)} for _ in range(2)]
    rounding = 0.05 if method.name == "int8" else 1e-5  # a residual restored up to a rounding may change a code by one
    assert torch.allclose(made.step(again)[0]["w"], sound.step(again)[0]["w"], rtol=1e-5, atol=rounding)


@each(EVERY)
def test_no_method_touches_the_users_random_numbers_or_the_gradients(method: Compressor) -> None:
    grads = [{"w": torch.randn(6, 8), "b": torch.randn(9)} for _ in range(2)]
    copies = [{name: tensor.clone() for name, tensor in worker.items()} for worker in grads]
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    made = World(2, method)
    for _ in range(2):
        made.step(grads)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert repr(np.random.get_state()) == before[1]
    assert random.getstate() == before[2]
    assert all(torch.equal(w[name], c[name]) for w, c in zip(grads, copies, strict=True) for name in w)


# -- parameters


@pytest.mark.parametrize(
    ("name", "parameter", "bad", "message"),
    [
        (
            "signum",
            "momentum",
            [-0.1, 1.0, 1.5, math.nan, "0.9", True, None],
            "momentum must be (a number )?between 0 and 1",
        ),
        ("qsgd", "levels", [0, -1, 1.5, "4", True, None], "levels must be a whole number >= 1"),
        ("qsgd", "levels", [128, 1000], "levels must be <= 127"),
        ("qsgd", "bucket", [0, -1, 1.5, "4", True, None], "bucket must be a whole number >= 1"),
        ("terngrad", "clip", [0.5, 0, -1, math.nan, math.inf, "2", True], "clip must be (a number )?>= 1"),
        ("terngrad", "shared_scale", [1, "yes", None], "shared_scale must be True or False"),
        ("int8", "error_feedback", [1, "yes", None], "error_feedback must be True or False"),
        *[
            (name, "seed", [-1, 0.5, "0", True], "seed must be a whole number >= 0")
            for name in ("qsgd", "natural", "atomo")
        ],
        ("atomo", "budget", [0, 1.5, True, None], "budget must be a whole number >= 1"),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, parameter: str, bad: list[Any], message: str) -> None:
    for value in bad:
        with pytest.raises(ValueError, match=rf"{message}, got .* \(.+\)"):
            create(name, **{parameter: value})


# -- Horovod's interface


@each(ALONE)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_compress_and_decompress_are_one_workers_first_step(
    method: Compressor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape).to(dtype)
    payload, ctx = method.compress(tensor)
    back = method.decompress(payload, ctx)
    assert payload.dtype == torch.uint8
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, step(method, tensor))
    with pytest.raises(WireError, match="bytes, expected"):
        method.decompress(torch.cat([payload, payload.new_zeros(1)]), ctx)


@each([method for method in EVERY if method not in ALONE])
def test_methods_that_need_more_than_the_tensor_say_so(method: Compressor) -> None:
    with pytest.raises(TypeError, match=r"hvdcomp.DistributedOptimizer"):
        method.compress(torch.ones(3))
