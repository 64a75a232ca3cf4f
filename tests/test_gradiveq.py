"""GradiVeQ: values worked by hand, its phases, and what it learns from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import ExchangeWorld
from torch import Tensor

from hvdcomp import checkpointing
from hvdcomp.compressors import GradiVeQ
from hvdcomp.compressors.gradiveq import principal_components
from hvdcomp.compressors.requests import Volume
from hvdcomp.simulation import World

FAMILY = torch.tensor([3.0, 4.0, 6.0, 8.0])
"""Two slices, both multiples of (.6, .8)."""


def small(**changed: Any) -> GradiVeQ:
    return GradiVeQ(**{"slice_size": 2, "components": 1, "training_steps": 1, "quantised_steps": 2, **changed})


def step(world: World, *gradients: Tensor) -> Tensor:
    return world.step([{"w": gradient} for gradient in gradients])[0]["w"]


def state(world: World, worker: int = 0) -> dict[str, Tensor]:
    return world._buckets[worker][0].parts[0].unit.state


# -- values


def test_slices_of_one_direction_are_exact_with_one_component() -> None:
    world = World(1, small())
    assert step(world, FAMILY).tolist() == FAMILY.tolist()
    assert state(world)["basis"].abs().flatten().tolist() == pytest.approx([0.6, 0.8])
    gradient = torch.tensor([6.0, 8.0, -1.5, -2.0])
    assert step(world, gradient).tolist() == pytest.approx(gradient.tolist())
    assert world.nbytes == 4 * 2
    assert world.residual(0, "w").tolist() == pytest.approx([0] * 4, abs=1e-6)


def test_what_lies_outside_the_basis_is_left_behind_and_sent_by_the_next_training() -> None:
    world = World(1, small(quantised_steps=1))
    step(world, FAMILY)
    mean = step(world, torch.tensor([1.0, 0.0, 0.0, 1.0]))  # coordinates .6 and .8
    assert mean.tolist() == pytest.approx([0.36, 0.48, 0.48, 0.64])
    left = world.residual(0, "w")
    assert left.tolist() == pytest.approx([0.64, -0.48, -0.48, 0.36])
    assert torch.equal(step(world, FAMILY), FAMILY + left)
    assert not world.residual(0, "w").any()


def test_without_feedback_it_is_lost() -> None:
    world = World(1, small(error_feedback=False))
    step(world, FAMILY)
    assert step(world, torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist() == pytest.approx([0.36, 0.48, 0.48, 0.64])
    assert step(world, torch.zeros(4)).tolist() == [0] * 4


def test_the_last_slice_is_filled_with_zeros() -> None:
    world = World(1, small())
    step(world, torch.tensor([3.0, 4.0, 6.0, 8.0, 0.0]))
    assert step(world, torch.tensor([3.0, 4.0, 0.0, 0.0, 1.0])).tolist() == pytest.approx([3, 4, 0, 0, 0.36])
    assert world.nbytes == 4 * 3
    assert world.residual(0, "w").tolist() == pytest.approx([0, 0, 0, 0, 0.64], abs=1e-6)


def test_the_basis_is_of_the_mean_gradient() -> None:
    """Each worker's own part is far larger, and cancels."""
    world = World(2, small())
    own = torch.tensor([-40.0, 30.0, 80.0, -60.0])
    assert step(world, FAMILY + own, FAMILY - own).tolist() == FAMILY.tolist()
    assert state(world)["basis"].abs().flatten().tolist() == pytest.approx([0.6, 0.8])


def test_moments_of_all_training_steps_add_up() -> None:
    world = World(1, small(training_steps=2))
    for gradient in ([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]):  # 1 along the second axis, 4 along the first
        step(world, torch.tensor(gradient))
    assert state(world)["basis"].abs().flatten().tolist() == [1, 0]


def test_principal_components() -> None:
    columns = principal_components(torch.diag(torch.tensor([1.0, 9.0, 4.0], dtype=torch.float64)), 2)
    assert columns.abs().tolist() == [[0, 0], [1, 0], [0, 1]]
    rotation = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    first = principal_components(rotation @ torch.diag(torch.tensor([5.0, 1.0]).double()) @ rotation.t(), 1)
    assert first.abs().flatten().tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("fill", [0.0, torch.nan, torch.inf, 1e300, 1e-300])
def test_principal_components_are_orthonormal_whatever_they_are_of(fill: float) -> None:
    columns = principal_components(torch.full((5, 5), fill, dtype=torch.float64), 3)
    assert torch.allclose(columns.t() @ columns, torch.eye(3).double(), atol=1e-9)


def test_zero_gradients_stay_zero() -> None:
    world = World(3, small(training_steps=2))
    for _ in range(9):
        assert step(world, *[torch.zeros(7)] * 3).tolist() == [0.0] * 7
        assert not world.skipped


# -- phases


def test_it_trains_quantises_and_trains_again() -> None:
    world = World(2, GradiVeQ(slice_size=4, components=1, training_steps=2, quantised_steps=3))
    nbytes = []
    for _ in range(12):
        step(world, torch.randn(40), torch.randn(40))
        nbytes.append(world.nbytes)
    dense, basis, quantised = 4 * 40, 4 * 4, 4 * 10
    assert nbytes == [dense, dense + basis, quantised, quantised, quantised] * 2 + [dense, dense + basis]
    assert GradiVeQ(4, 1).requests((8, 5), 2) == [Volume(0, "allreduce", quantised)]


def test_a_skipped_step_is_none_of_its_steps() -> None:
    world = World(2, small(training_steps=2))
    for bad in (False, True, False, True):
        gradient = torch.full((4,), torch.nan) if bad else FAMILY
        before = dict(state(world)) if world._buckets else {}
        step(world, FAMILY, gradient)
        assert world.skipped == bad
        if bad:
            assert {key: tensor.tolist() for key, tensor in state(world).items()} == {
                key: tensor.tolist() for key, tensor in before.items()
            }
    assert int(state(world)["left"]) == 2
    assert state(world, 1)["basis"].abs().flatten().tolist() == pytest.approx([0.6, 0.8])


def test_all_its_components_lose_nothing() -> None:
    world = World(2, small(components=2))
    for _ in range(4):
        gradients = torch.randn(2, 10)
        assert torch.equal(step(world, *gradients), gradients.sum(0) / 2)
        assert world.nbytes == 4 * 10


def test_a_tensor_with_no_more_elements_than_coordinates_stays_dense() -> None:
    assert GradiVeQ(256, 32).requests((32,), 2) == [Volume(0, "allreduce", 128)]
    assert GradiVeQ(256, 32).requests((33,), 2) == [Volume(0, "allreduce", 128)]
    assert GradiVeQ(256, 32).requests((0,), 2) == [Volume(0, "allreduce", 0)]


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_applied_and_left_are_what_there_was(workers: int, dtype: torch.dtype) -> None:
    world = World(workers, GradiVeQ(slice_size=8, components=3, training_steps=2, quantised_steps=3))
    left = torch.zeros(13, 7, dtype=dtype)
    for _ in range(8):
        gradients = torch.randn(workers, 13, 7, dtype=dtype)
        mean = step(world, *gradients)
        acc = left + gradients.mean(0)
        left = torch.stack([world.residual(worker, "w") for worker in range(workers)]).mean(0)
        assert torch.allclose(mean + left, acc, atol=1e-5 if dtype == torch.float32 else 1e-12)
        bases = [state(world, worker).get("basis", torch.zeros(0)) for worker in range(workers)]
        assert all(torch.equal(basis, bases[0]) for basis in bases)


def test_correlated_gradients_are_kept_better_than_by_the_same_share_of_any_slice() -> None:
    world = World(2, GradiVeQ(slice_size=16, components=2, training_steps=3, quantised_steps=5, error_feedback=False))
    directions = torch.randn(2, 16)

    def gradient() -> Tensor:
        return (torch.randn(50, 2) @ directions + 0.1 * torch.randn(50, 16)).flatten()

    for _ in range(3):
        step(world, gradient(), gradient())
    ours = [gradient(), gradient()]
    mean = sum(ours) / 2
    assert (step(world, *ours) - mean).norm() < 0.1 * mean.norm()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_resumed_run_equals_an_unbroken_one_bitwise(after: int) -> None:
    """Saved while moments are summed up, with a new basis, and while it serves."""
    method = GradiVeQ(slice_size=8, components=3, training_steps=2, quantised_steps=3)
    grads = [[{"w": torch.randn(40)} for _ in range(2)] for _ in range(10)]
    unbroken, resumed = (ExchangeWorld(2, method, grads[0][0]) for _ in range(2))
    for given in grads[:after]:
        unbroken.step(given)
    for old, new in zip(unbroken.exchanges, resumed.exchanges, strict=True):
        checkpointing.restore(new, checkpointing.state_of(old))
    for given in grads[after:]:
        assert all(torch.equal(a["w"], b["w"]) for a, b in zip(unbroken.step(given), resumed.step(given), strict=True))
        assert unbroken.records[0].bytes_sent == resumed.records[0].bytes_sent


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"slice_size": 0}, r"slice_size must be a whole number >= 1, got 0 \(elements of a slice; the paper's M\)"),
        ({"components": 0}, "components must be a whole number >= 1, got 0"),
        ({"slice_size": 4, "components": 5}, "components must be <= slice_size, got 5 of 4"),
        ({"training_steps": 0}, "training_steps must be a whole number >= 1, got 0"),
        ({"quantised_steps": 0.5}, "quantised_steps must be a whole number >= 1, got 0.5"),
        ({"error_feedback": None}, "error_feedback must be True or False"),
    ],
)
def test_parameters_are_checked(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradiVeQ(**params)
