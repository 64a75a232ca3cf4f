"""What holds for every registered compressor, whatever its parameters, the shapes, types and contents of gradients.

``HYPOTHESIS_PROFILE=thorough`` (or ``--hypothesis-profile=thorough``) draws many more examples, other ones each time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process import ExchangeWorld
from test_checkpointing import flat, states, through_a_file
from torch import Tensor

from hvdcomp import checkpointing
from hvdcomp.buckets import Part, Spec
from hvdcomp.compressors import BF16, DGC, Compressor, GradiVeQ, NoCompression, available, create
from hvdcomp.compressors.artopk import SELECTIONS
from hvdcomp.compressors.redsync import VARIANTS
from hvdcomp.compressors.sparsifier import Sparsifier, ThresholdSparsifier, kept_elements
from hvdcomp.simulation import World
from hvdcomp.wire import VALUE_TYPES

NAMES = sorted(available())
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

FRAME_NBYTES = 40
"""What a frame adds to a payload at most: 24 of head, 4 of length, 7 + 7 of padding."""
ROUNDINGS = 16
"""Roundings of the type that sums are taken in, relative to the largest number that takes part."""

PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "bisections": st.integers(1, 25),
    "bucket": st.integers(1, 600),
    "budget": st.integers(1, 3),
    "cf": st.sampled_from([1, 1.001, 1.5, 2, 2.5, 7, 100, 1e6]) | st.floats(1, 300),
    "clip": st.none() | st.floats(1, 10),
    "components": st.integers(1, 20),
    "correction": st.booleans(),
    "error_feedback": st.booleans(),
    "levels": st.integers(1, 127),
    "max_density": st.floats(1e-3, 1),
    "momentum": st.sampled_from([0.0, 0.5, 0.9]),
    "nesterov": st.booleans(),
    "quantise": st.booleans(),
    "quantised_steps": st.integers(1, 3),
    "rank": st.integers(1, 5),
    "seed": st.integers(0, 2**40),
    "selection": st.sampled_from(SELECTIONS),
    "shared_scale": st.booleans(),
    "small_matrix_rule": st.booleans(),
    "slice_size": st.integers(1, 20),
    "threshold": st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    "training_steps": st.integers(1, 2),
    "values": st.sampled_from(sorted(VALUE_TYPES)),
    "variant": st.sampled_from(VARIANTS),
    "weight_decay": st.none(),  # hvdcomp.DistributedOptimizer's work
}
"""Of every compressor's parameters; a new one must be put here."""


def every(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("name", NAMES)(test)


def made(name: str) -> st.SearchStrategy[Compressor]:
    known = available()[name].parameters()
    drawn = st.fixed_dictionaries({}, optional={p: PARAMETERS[p] for p in known})
    return drawn.map(lambda given: create(name, **fitting(given)))


def fitting(given: dict[str, Any]) -> dict[str, Any]:
    """Without what would be refused: parameters that do not fit each other."""
    if given.get("quantise"):
        given.pop("values", None)
    if "components" in given or "slice_size" in given:
        given["components"] = min(given.get("components", 1), given.get("slice_size", 256))
    return given


# -- gradients

SHAPES = st.one_of(
    st.sampled_from([(), (0,), (0, 3), (3, 0), (1,), (1, 1), (2,), (64,), (65,), (70, 90), (5000,)]),
    st.lists(st.integers(1, 13), min_size=1, max_size=2).map(tuple),
    st.lists(st.integers(1, 4), min_size=3, max_size=4).map(tuple),
)


def normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_hot(x: Tensor) -> Tensor:
    hot = torch.zeros(x.numel(), dtype=x.dtype)
    hot[-1:] = 3.0
    return hot.view(x.shape)


CONTENTS: dict[str, Callable[[Tensor, torch.finfo], Tensor]] = {
    "normal": lambda x, limits: x,
    "zero": lambda x, limits: x * 0.0,
    "minus zero": lambda x, limits: torch.full_like(x, -0.0),
    "constant": lambda x, limits: torch.full_like(x, 0.1),
    "negative constant": lambda x, limits: torch.full_like(x, -7.0),
    "one-hot": lambda x, limits: one_hot(x),
    "one-hot beside small": lambda x, limits: 1e4 * one_hot(x) + 1e-3 * x,
    "ties": lambda x, limits: x.round(),
    "two values": lambda x, limits: torch.where(x < 0, -2.0, 1.0),
    "one sign": lambda x, limits: -x.abs() - 0.01,
    "heavy tail": lambda x, limits: x * (3 * x).exp(),
    "whole range": lambda x, limits: x.sign() * limits.smallest_normal ** x.cos().abs(),
    "subnormal": lambda x, limits: x * limits.smallest_normal / 64,
    "least": lambda x, limits: x.sign() * limits.smallest_normal * limits.eps,
    "large": lambda x, limits: x * limits.max**0.6,
    "huge": lambda x, limits: x / 4 * limits.max,
    "largest": lambda x, limits: x.sign() * limits.max,
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x,
    "strided": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "expanded": lambda x: x.reshape(-1)[:1].expand(x.numel()).view(x.shape) if x.numel() else x,
    "offset": lambda x: torch.cat([torch.ones(1, dtype=x.dtype), x.reshape(-1)])[1:].view(x.shape),
    "wanting a gradient": lambda x: x.clone().requires_grad_(),
}


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    limits = torch.finfo(dtype)
    values = CONTENTS[draw(st.sampled_from(sorted(CONTENTS)))](normal(shape, draw(st.integers(0, 2**32 - 1))), limits)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](values.double().clamp(limits.min, limits.max).to(dtype))


Grads = list[dict[str, Tensor]]


@dataclass
class Case:
    """A world, and each step's gradients of each worker: "a" and "b", and "dense" which is not compressed."""

    compressor: Compressor
    workers: int
    granularity: str
    steps: list[Grads]

    def world(self) -> World:
        return World(self.workers, self.compressor, granularity=self.granularity, exclude=("dense",))


@st.composite
def cases(draw: st.DrawFn, name: str, content: Callable[..., st.SearchStrategy[Tensor]] = tensors) -> Case:
    compressor = draw(made(name))
    workers = draw(st.integers(1, 4) | st.just(8))
    by = ["tensor"] if compressor.needs_matrices else ["tensor", "bucket", "model"]
    forms = {n: (draw(SHAPES), draw(st.sampled_from(DTYPES))) for n in ("a", "b", "dense")}
    one = st.fixed_dictionaries({n: content(*form) for n, form in forms.items()})
    alike = draw(st.booleans())
    steps = [
        [draw(one)] * workers if alike else [draw(one) for _ in range(workers)] for _ in range(draw(st.integers(1, 3)))
    ]
    return Case(compressor, workers, draw(st.sampled_from(by)), steps)


# -- what a world keeps


def parts_of(world: World, worker: int) -> list[Part]:
    return [part for bucket in world._buckets[worker] for part in bucket.parts]


def states_of(world: World) -> list[dict[tuple[str, str], Tensor]]:
    """Each worker's compressor state, by unit and name."""
    return [
        {
            (part.unit.name, key): tensor.clone()
            for part in parts_of(world, w)
            for key, tensor in part.unit.state.items()
        }
        for w in range(world.size)
    ]


def residual(world: World, worker: int, name: str) -> Tensor | None:
    """None before the first step."""
    return world.residual(worker, name).double() if world._buckets else None


def momentum_state(world: World, worker: int, name: str) -> Tensor | None:
    """DGC's u of a tensor."""
    for part in parts_of(world, worker) if world._buckets else []:
        for offset, member in zip(part.offsets, part.members, strict=True):
            u = part.unit.state.get("own.u", part.unit.state.get("u"))
            if member.name == name and u is not None:
                return u[offset : offset + member.numel].view(member.shape).double()
    return None


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Alike to the last bit, so that a NaN equals itself, and -0 is not 0."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return left.shape == right.shape and left.dtype == right.dtype and bool((left.view(kind) == right.view(kind)).all())


def same_states(left: list[dict[Any, Tensor]], right: list[dict[Any, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What residuals are kept and sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def largest_of(found: Sequence[Tensor | None]) -> float:
    return max((float(t.detach().abs().max()) for t in found if t is not None and t.numel()), default=0.0)


# -- a step


def keeps_a_residual(compressor: Compressor) -> bool:
    return compressor.error_feedback or compressor.residual_state is not None


def sends_lossy_values(compressor: Compressor) -> bool:
    return getattr(compressor, "values", "fp32") != "fp32" or getattr(compressor, "quantise", False)


def sends_elements_as_they_are(compressor: Compressor) -> bool:
    return isinstance(compressor, Sparsifier) and not sends_lossy_values(compressor)


@dataclass
class Before:
    """What a step starts from."""

    case: Case
    grads: Grads
    residuals: dict[str, list[Tensor | None]]
    momenta: dict[str, list[Tensor | None]]
    states: list[dict[Any, Tensor]]

    @classmethod
    def of(cls, case: Case, world: World, grads: Grads) -> Before:
        workers = range(world.size)
        return cls(
            case,
            grads,
            {name: [residual(world, w, name) for w in workers] for name in grads[0]},
            {name: [momentum_state(world, w, name) for w in workers] for name in grads[0]},
            states_of(world) if world._buckets else [{} for _ in workers],
        )

    def may_overflow(self) -> bool:
        """Whether a sum over workers and over elements may leave the range of the type that it is taken in."""
        among = len(self.grads) * sum(gradient.numel() for gradient in self.grads[0].values())
        cast = isinstance(self.case.compressor, BF16) or sends_lossy_values(self.case.compressor)
        most = torch.finfo(torch.float32).max if cast else math.inf
        return any(
            among * (largest_of([g[name] for g in self.grads]) + largest_of(kept) + largest_of(self.momenta[name]))
            > 0.1 * min(torch.finfo(self.travels_as(name)).max, most)
            for name, kept in self.residuals.items()
        )

    def travels_as(self, name: str) -> torch.dtype:
        """What is not compressed has the gradient's own type."""
        dtype = self.grads[0][name].dtype
        return dtype if name == "dense" or isinstance(self.case.compressor, NoCompression) else wide(dtype)

    def unit_of(self, name: str) -> list[str]:
        """The tensors that the compressor sees as one with this."""
        alike = [n for n in ("a", "b") if self.grads[0][n].dtype == self.grads[0][name].dtype]
        return [name] if self.case.granularity == "tensor" else alike

    def accs(self, name: str) -> list[Tensor]:
        """Residual + gradient of each worker in float64; of DGC velocity + momentum + gradient."""
        compressor = self.case.compressor
        found = []
        for worker, gradients in enumerate(self.grads):
            acc = gradients[name].detach().double()
            kept, u = self.residuals[name][worker], self.momenta[name][worker]
            if isinstance(compressor, DGC) and compressor.correction:
                norm = math.hypot(*(float(gradients[n].detach().double().norm()) for n in self.unit_of(name)))
                limit = math.inf if compressor.clip is None else compressor.clip / math.sqrt(len(self.grads))
                acc = acc * (limit / norm) if norm > limit else acc
                m = compressor.momentum or 0.0
                u = torch.zeros_like(acc) if u is None else u
                acc = m * (u + acc) + acc if compressor.nesterov else m * u + acc
            found.append(acc if kept is None else acc + kept)
        return found

    def tolerance(self, name: str) -> Tensor:
        """How far applied + left may be from what there was.

        Every number is rounded a few times to the type that sums are taken in: relative to its own size where elements
        are sent as they are, to the unit's largest element where they share a scale, and of a matrix to its norm. The
        mean is then rounded to the gradient's type.
        """
        compressor, dtype = self.case.compressor, self.grads[0][name].dtype
        scale = torch.stack([acc.abs() for acc in self.accs(name)]).amax(0)
        if compressor.needs_matrices:
            scale = torch.full_like(scale, max(float(acc.norm()) for acc in self.accs(name)))
        elif not sends_elements_as_they_are(compressor):
            scale = torch.full_like(scale, largest_of([acc for n in self.unit_of(name) for acc in self.accs(n)]))
        sums, sent = torch.finfo(wide(dtype)), torch.finfo(dtype)
        least = len(self.grads) * sums.smallest_normal * sums.eps + sent.smallest_normal * sent.eps
        return (ROUNDINGS * sums.eps + (sent.eps if sent.bits < 32 else 0)) * scale + ROUNDINGS * least


def checked_step(case: Case, world: World, grads: Grads) -> list[dict[str, Tensor]]:
    """A step, and all that holds of each."""
    before = Before.of(case, world, grads)
    copies = [{name: tensor.detach().clone() for name, tensor in worker.items()} for worker in grads]
    randomness = random_states()
    means = world.step(grads)
    assert random_states() == randomness
    assert all(same_bits(worker[n].detach(), copy[n]) for worker, copy in zip(grads, copies, strict=True) for n in copy)
    for name, gradient in grads[0].items():
        assert all(mean[name].shape == gradient.shape and mean[name].dtype == gradient.dtype for mean in means)
        assert all(same_bits(mean[name], means[0][name]) for mean in means)
        assert not any(mean[name].requires_grad for mean in means)
    check_nothing_is_shared(world, grads, means)
    check_finite(before, world, means)
    if not world.skipped:
        assert world.nbytes <= stated_nbytes(world)
        check_conserved(before, world, means[0])
    return means


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return (torch.stack([tensor.double() for tensor in tensors]) / len(tensors)).sum(0)


def check_nothing_is_shared(world: World, grads: Grads, means: Grads) -> None:
    """Neither results nor what is kept lie in the caller's memory, or in each other's."""
    kept = [tensor for worker in range(world.size) for part in parts_of(world, worker) for tensor in memory_of(part)]
    given = {t.untyped_storage().data_ptr() for worker in grads for t in worker.values() if t.numel()}
    results = [t.untyped_storage().data_ptr() for worker in means for t in worker.values() if t.numel()]
    assert len(set(results)) == len(results)
    assert not given & set(results)
    assert not (given | set(results)) & {t.untyped_storage().data_ptr() for t in kept if t.numel()}


def memory_of(part: Part) -> list[Tensor]:
    return [*part.unit.state.values(), *([] if part.feedback is None else [part.feedback.residual])]


def gradients_in(part: Part) -> list[Tensor]:
    """What is kept of gradients: SIDCo's stages are none, and may hold Inf."""
    kept = [tensor for key, tensor in part.unit.state.items() if not key.startswith("stages.")]
    return [*kept, *([] if part.feedback is None else [part.feedback.residual])]


def check_finite(before: Before, world: World, means: Grads) -> None:
    """Finite gradients give finite means and leave finite residuals; a skip for an overflow leaves all as it was."""
    assert all(torch.isfinite(tensor).all() for part in every_part(world) for tensor in gradients_in(part))
    if not before.may_overflow():
        assert not world.skipped
        assert all(torch.isfinite(tensor).all() for mean in means for tensor in mean.values())
    if world.skipped:
        check_left_as_before(before, world)


def check_left_as_before(before: Before, world: World) -> None:
    """NaN everywhere; states bitwise as before the step, residuals within one rounding of what was added and taken."""
    assert same_states(states_of(world), before.states)
    for name, residuals in before.residuals.items():
        for worker, kept in enumerate(residuals):
            kept = torch.zeros_like(before.grads[worker][name], dtype=torch.float64) if kept is None else kept
            given = before.grads[worker][name].detach().double().nan_to_num(0.0, 0.0, 0.0)
            eps = torch.finfo(wide(before.grads[worker][name].dtype)).eps
            assert bool(((world.residual(worker, name) - kept).abs() <= eps * (kept.abs() + given.abs())).all())


def check_conserved(before: Before, world: World, mean: Mapping[str, Tensor]) -> None:
    """Applied mean + mean of the residuals = mean of residual + gradient, tensor by tensor."""
    assert not any(world.residual(worker, "dense").any() for worker in range(world.size))
    for name in ("a", "b") if keeps_a_residual(before.case.compressor) else ():
        left = mean_of([world.residual(worker, name) for worker in range(world.size)])
        saturates = isinstance(before.case.compressor, DGC) and before.may_overflow()
        if saturates or not torch.isfinite(mean[name]).all():
            assert before.may_overflow()
            continue
        error = (mean[name].double() + left - mean_of(before.accs(name))).abs()
        error[mean[name].abs() == torch.finfo(mean[name].dtype).max] = 0.0  # saturated, if a half
        assert bool((error <= before.tolerance(name)).all()), (name, error, before.tolerance(name))


def every_part(world: World) -> list[Part]:
    return [part for worker in range(world.size) for part in parts_of(world, worker)]


def stated_nbytes(world: World) -> int:
    """What ``requests`` of each unit states, twice for numbers of float64, and frames."""
    total = 0
    for part in parts_of(world, 0):
        method: Compressor = BF16() if part.dtype == torch.bfloat16 else part.compressor
        for volume in method.requests(part.unit.shape, world.size):
            total += volume.nbytes * (2 if part.dtype == torch.float64 else 1)
            total += FRAME_NBYTES * {"allgather": 1, "alltoall": world.size}.get(volume.kind, 0)
        if isinstance(method, GradiVeQ):  # it states what most steps send; others send all, and a basis
            total += 8 * (part.unit.numel + method.slice_size * method.components)
    return total


@every
@given(data=st.data())
def test_steps_of_finite_gradients(name: str, data: st.DataObject) -> None:
    """Form, agreement, bytes, conservation, and that nothing of the caller's is touched."""
    case = data.draw(cases(name))
    world = case.world()
    for grads in case.steps:
        checked_step(case, world, grads)


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 1e200])
@pytest.mark.parametrize("values", sorted(set(VALUE_TYPES) - {"fp32"}))
def test_no_number_of_a_type_is_too_large_for_a_residual(values: str, largest: float) -> None:
    dtype = torch.float32 if largest < 1e39 else torch.float64
    for factor in (1.0, 0.999, 0.99, 0.98):
        world = World(1, "topk", cf=1.5, values=values)
        world.step([{"w": torch.tensor([factor * largest, 1.0, 0.5], dtype=dtype)}])
        assert torch.isfinite(world.residual(0, "w")).all()


def test_dgcs_velocity_does_not_overflow() -> None:
    world = World(1, "dgc", cf=3, momentum=0.9)
    for _ in range(3):
        world.step([{"w": torch.tensor([3.0, 3.0, 3.0]) * 1e38}])
    assert torch.isfinite(world.residual(0, "w")).all()


# -- not finite

TAME = ["normal", "zero", "constant", "one-hot", "ties", "two values", "one sign", "subnormal"]


@st.composite
def tame(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """No sum of these overflows."""
    content = CONTENTS[draw(st.sampled_from(TAME))]
    return content(normal(shape, draw(st.integers(0, 2**32 - 1))), torch.finfo(dtype)).to(dtype)


@every
@given(data=st.data(), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_value_that_is_not_finite_on_any_worker_harms_nothing(name: str, data: st.DataObject, bad: float) -> None:
    case = data.draw(cases(name, tame))
    world = case.world()
    for grads in case.steps[:-1]:
        world.step(grads)
    grads = case.steps[-1]
    spoilt = data.draw(st.sampled_from(sorted(n for n, t in grads[0].items() if t.numel()) or ["none"]))
    if spoilt == "none":
        return
    worker = data.draw(st.integers(0, case.workers - 1))
    poisoned = [dict(given) for given in grads]
    poisoned[worker][spoilt] = grads[worker][spoilt].clone()
    place = data.draw(st.integers(0, grads[0][spoilt].numel() - 1))
    poisoned[worker][spoilt].view(-1)[place] = bad
    before = Before.of(case, world, poisoned)
    means = world.step(poisoned)
    if case.compressor.checks_finite:
        assert world.skipped
        assert all(torch.isnan(tensor).all() for mean in means for tensor in mean.values())
        check_left_as_before(before, world)
    else:
        assert not any(torch.isfinite(mean[spoilt].view(-1)[place]) for mean in means)
    for mean in checked_step(case, world, grads):
        assert all(torch.isfinite(tensor).all() for tensor in mean.values())


# -- checkpoints


@every
@given(data=st.data())
def test_a_resumed_run_goes_on_bitwise(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, tame))
    steps = [[{n: t.detach() for n, t in worker.items()} for worker in grads] for grads in [*case.steps, case.steps[0]]]
    options: dict[str, Any] = {"granularity": case.granularity, "exclude": ("dense",)}
    unbroken, resumed = (ExchangeWorld(case.workers, case.compressor, steps[0][0], **options) for _ in range(2))
    cut = data.draw(st.integers(0, len(steps) - 1))
    for grads in steps[:cut]:
        unbroken.step(grads)
    specs = {n: Spec.of(n, t) for n, t in steps[0][0].items()}
    saved = through_a_file(states(unbroken))
    for exchange, state in zip(resumed.exchanges, saved, strict=True):
        checkpointing.restore(exchange, checkpointing.choose(state, exchange.transport, specs, "error"))
    for grads in steps[cut:]:
        expected, means = unbroken.step(grads), resumed.step(grads)
        assert all(same_bits(m[n], e[n]) for m, e in zip(means, expected, strict=True) for n in e)
    assert flat(states(resumed)) == flat(states(unbroken))


# -- how many elements, and which

SPARSIFIERS = [name for name in NAMES if issubclass(available()[name], Sparsifier)]


def sending_as_it_is(compressor: Compressor) -> Compressor:
    """Float32 values on the wire, so that what was sent can be counted, and no momentum."""
    plain = {"values": "fp32", "momentum": 0.0, "clip": None, "threshold": 1e-30}
    return compressor.with_parameters(**{p: v for p, v in plain.items() if p in compressor.parameters()})


def is_exact(compressor: Compressor) -> bool:
    return not isinstance(compressor, ThresholdSparsifier | DGC) or getattr(compressor, "variant", "") == "trimmed"


@pytest.mark.parametrize("name", SPARSIFIERS)
@given(data=st.data(), numel=st.integers(1, 300) | st.sampled_from([4095, 4097, 20_000]), seed=st.integers(0, 2**32))
def test_k_elements_are_sent(name: str, data: st.DataObject, numel: int, seed: int) -> None:
    """Exactly k = max(1, floor(n / cf)), and at least one and fewer than 2k of methods that estimate a threshold."""
    compressor = sending_as_it_is(data.draw(made(name)))
    assert isinstance(compressor, Sparsifier)
    x = normal((numel,), seed).float()
    x = torch.where(x == 0, 1.0, x)
    sent = int(World(1, compressor).step([{"w": x}])[0]["w"].count_nonzero())
    k = numel if compressor.cf == 1 else min(numel, max(1, math.floor(numel / compressor.cf + 1e-9)))
    assert k == kept_elements(numel, compressor.cf)
    if is_exact(compressor):
        assert sent == k
    else:
        assert 1 <= sent < max(2, 2 * k)


@pytest.mark.parametrize("name", SPARSIFIERS)
@given(
    data=st.data(),
    numel=st.sampled_from([1000, 4096, 4097, 10_001]),
    cf=st.floats(1.5, 12),
    larger=st.integers(0, 3),
    value=st.sampled_from([0.1, -3.0, 1e-40, 1e30]),
)
def test_ties_are_broken_without_a_preferred_place_and_alike_on_all_workers(
    name: str, data: st.DataObject, numel: int, cf: float, larger: int, value: float
) -> None:
    """Both halves, and the outer and inner quarters, hold as many within 5 standard deviations of a fair draw."""
    compressor = sending_as_it_is(data.draw(made(name)))
    if "max_density" in compressor.parameters():
        compressor = compressor.with_parameters(max_density=1 / cf, threshold=1e-37)
    else:
        compressor = compressor.with_parameters(cf=cf)
    assert isinstance(compressor, Sparsifier)
    x = torch.full((numel,), value)
    x[:larger] *= 2
    means = World(3, compressor).step([{"w": x}] * 3)
    sent = means[0]["w"].nonzero().flatten()
    k = kept_elements(numel, compressor.cf)
    if name == "threshold" and abs(value) < 1e-37:
        return
    assert 1 <= sent.numel() <= (k if is_exact(compressor) else 2 * k - 1)
    if sent.numel() > larger:
        for here in (sent < numel / 2, (sent - numel / 2).abs() < numel / 4):
            inside = int(here.sum())
            assert abs(2 * inside - sent.numel()) <= 5 * math.sqrt(sent.numel()) + larger + 2


# -- without bias

UNBIASED = [
    create("randomk", cf=3, error_feedback=False),
    create("qsgd"),
    create("qsgd", levels=1, bucket=5),
    create("qsgd", levels=3, bucket=512),
    create("terngrad", clip=None),
    create("terngrad", clip=None, shared_scale=True),
    create("natural"),
    create("atomo", budget=1),
    create("atomo", budget=2),
]
SIZES = [(1,), (3,), (8,), (33,), (511,), (5, 7)]
DRAWS = 400
ALPHA = 1e-6
"""Chance that a method without bias fails, at most."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # compiled loops, torch operations
@pytest.mark.parametrize("method", UNBIASED, ids=repr)
def test_the_expectation_of_what_is_sent_is_the_mean(method: Compressor, dtype: torch.dtype) -> None:
    """Of each element by the empirical Bernstein bound (Audibert et al. 2009), and of each tensor's share along the
    mean, which is far sharper, by its standard error."""
    grads = [{str(size): normal(size, 7 * w + i).to(dtype) for i, size in enumerate(SIZES)} for w in range(2)]
    world = World(2, method)
    drawn = [world.step(grads)[0] for _ in range(DRAWS)]
    log = math.log(3 * sum(map(math.prod, SIZES)) / (ALPHA / 2))
    errors = NormalDist().inv_cdf(1 - ALPHA / 4 / len(SIZES))
    for size in map(str, SIZES):
        sent = torch.stack([mean[size].reshape(-1) for mean in drawn]).double()
        expected = mean_of([worker[size] for worker in grads]).view(-1)
        reach = sent.max() - sent.min()  # of all elements: what is rare may not have been drawn of one
        bound = (2 * sent.var(0, correction=0) * log / DRAWS).sqrt() + 3 * reach * log / DRAWS
        assert bool(((sent.mean(0) - expected).abs() <= bound + 1e-5 * expected.abs()).all()), size
        share = sent @ expected / expected.square().sum()
        assert abs(float(share.mean()) - 1) <= errors * float(share.std()) / math.sqrt(DRAWS) + 1e-5, size
