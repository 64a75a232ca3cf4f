"""The hot loops against numpy and plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp.kernels import Collected, add_mean_, largest, orthogonalise, squared_norm

FLOATS = st.floats(-1e6, 1e6, width=32)


# -- squared_norm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_squared_norm_is_a_float64_scalar(dtype: torch.dtype) -> None:
    total = squared_norm(torch.tensor([3.0, -4.0], dtype=dtype))
    assert total.dtype == torch.float64
    assert total.shape == ()
    assert float(total) == 25.0


def test_squared_norm_of_nothing_is_zero() -> None:
    assert float(squared_norm(torch.zeros(0))) == 0.0


def test_squared_norm_of_finite_values_is_finite_where_float32_overflows() -> None:
    assert float(squared_norm(torch.tensor([3e38, 3e38]))) == pytest.approx(1.8e77, rel=1e-6)
    assert float(squared_norm(torch.full((2,), 65504.0, dtype=torch.float16))) == pytest.approx(2 * 65504.0**2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_squared_norm_tells_a_non_finite_element(bad: float) -> None:
    assert not math.isfinite(float(squared_norm(torch.tensor([1.0, bad, 2.0]))))


# -- largest


@given(st.lists(FLOATS, min_size=1, max_size=60), st.integers(1, 70))
@settings(deadline=None)
def test_largest_selects_exactly_k_and_nothing_smaller_than_what_it_leaves(values: list[float], k: int) -> None:
    tensor = torch.tensor(values)
    chosen = largest(tensor, k).positions
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert chosen.numel() == min(k, len(values))
    magnitudes = np.abs(tensor.numpy())
    left = np.delete(magnitudes, chosen.numpy())
    if chosen.numel() and left.size:
        assert magnitudes[chosen.numpy()].min() >= left.max()


@pytest.mark.parametrize("values", [[-5.0, -1.0, -3.0, -2.0], [5.0, 1.0, 3.0, 2.0], [5.0, -1.0, -3.0, 2.0]])
def test_largest_goes_by_magnitude_whatever_the_sign(values: list[float]) -> None:
    assert largest(torch.tensor(values), 2).positions.tolist() == [0, 2]


def test_ties_are_spread_evenly_and_alike_each_time() -> None:
    ones = torch.ones(12)
    assert largest(ones, 4).positions.tolist() == [0, 3, 6, 9]
    assert largest(-ones, 4).positions.tolist() == [0, 3, 6, 9]
    assert largest(torch.zeros(6), 2).positions.tolist() == [0, 3]


def test_only_the_missing_are_taken_from_ties() -> None:
    assert largest(torch.tensor([1.0, 9.0, 1.0, -1.0, -8.0, 1.0]), 4).positions.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_largest_survives_non_finite_values(bad: float) -> None:
    assert largest(torch.tensor([bad, 1.0, bad, bad]), 2).positions.numel() <= 2
    assert largest(torch.full((4,), bad), 2).positions.numel() <= 2


def test_largest_does_not_change_its_input() -> None:
    values = torch.randn(50)
    before = values.clone()
    largest(values, 5)
    assert torch.equal(values, before)


# -- add_mean_


def test_add_mean_adds_overlapping_indices_and_divides_by_workers() -> None:
    out = torch.tensor([10.0, 0.0, 0.0])
    first = Collected(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2.0, 4.0]))
    second = Collected(torch.tensor([2], dtype=torch.int32), torch.tensor([-2.0]))
    assert add_mean_(out, [first, second]).tolist() == [11.0, 0.0, 1.0]


def test_add_mean_does_not_overflow_where_the_mean_is_finite() -> None:
    share = Collected(torch.tensor([0], dtype=torch.int32), torch.tensor([3e38]))
    assert add_mean_(torch.zeros(1), [share] * 3).item() == pytest.approx(3e38)


def test_add_mean_takes_workers_without_anything_to_send() -> None:
    nothing = Collected(torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    share = Collected(torch.tensor([1], dtype=torch.int32), torch.tensor([4.0]))
    assert add_mean_(torch.zeros(2), [nothing, share]).tolist() == [0.0, 2.0]


# -- orthogonalise


@pytest.mark.parametrize(("rows", "columns"), [(5, 1), (5, 3), (4, 4), (1, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_orthogonalise_gives_an_orthonormal_basis_of_the_columns(rows: int, columns: int, scale: float) -> None:
    matrix = torch.randn(rows, columns, dtype=torch.float64) * scale
    basis = orthogonalise(matrix)
    assert torch.allclose(basis.t() @ basis, torch.eye(columns, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(basis @ (basis.t() @ matrix), matrix, rtol=1e-10, atol=0)


@pytest.mark.parametrize("matrix", [torch.zeros(4, 2), torch.ones(4, 2), torch.eye(4, 2) * 1e-40])
def test_orthogonalise_stays_finite_for_zero_and_dependent_columns(matrix: torch.Tensor) -> None:
    basis = orthogonalise(matrix)
    assert torch.allclose(basis.t() @ basis, torch.eye(2), atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_orthogonalise_of_a_non_finite_matrix_is_nan(bad: float) -> None:
    assert torch.isnan(orthogonalise(torch.tensor([[1.0, bad], [0.0, 1.0]]))).all()
