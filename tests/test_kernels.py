"""The hot loops against numpy and plain torch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp import kernels
from hvdcomp.kernels import (
    Collected,
    add_mean_,
    advance,
    checksum,
    largest,
    moments,
    orthogonalise,
    peak,
    running,
    squared_norm,
)

FLOATS = st.floats(-1e6, 1e6, width=32)


# -- compilation

WARMED = """
import re
from pathlib import Path
from hvdcomp.kernels import codes, cpu, cpu_codes, warm_up
warm_up()
for module, users in ((cpu, [Path(codes.__file__).with_name("__init__.py")]), (cpu_codes, [Path(codes.__file__)])):
    used = {name for path in users for name in re.findall(r"_cpu\\(\\)\\.(\\w+)", path.read_text())}
    assert len(used) > 10
    print(*(name for name in sorted(used) if not getattr(module, name).signatures))
"""


def test_every_loop_is_compiled_before_the_first_step() -> None:
    done = subprocess.run([sys.executable, "-c", WARMED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


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


# -- passes over whole gradients


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


LENGTHS = [0, 1, 63, 64, 65, 255, 256, 257, 1000, 300_001]


@pytest.mark.parametrize("count", LENGTHS)
def test_moments_and_peak_are_those_of_float64(count: int, threads: int) -> None:
    values = torch.randn(count)
    exact, found = values.double(), moments(values)
    assert found.count == count
    assert found.total == pytest.approx(float(exact.sum()), abs=1e-5 * math.sqrt(count))
    assert found.total_abs == pytest.approx(float(exact.abs().sum()), rel=1e-6)
    assert found.total_sq == pytest.approx(float(exact.square().sum()), rel=1e-6)
    assert found.largest == peak(values) == (float(values.abs().max()) if count else 0)


def test_moments_do_not_depend_on_threads() -> None:
    values, before = torch.randn(1_000_003), torch.get_num_threads()
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(moments(values))
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 300, 999])
def test_moments_tell_a_non_finite_element(bad: float, place: int) -> None:
    values = torch.randn(1000)
    values[place] = bad
    assert not math.isfinite(moments(values).total_sq)
    assert not math.isfinite(peak(values))


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_advance_is_what_the_torch_operations_make(
    count: int, nesterov: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, v, gradient = (torch.randn(count) for _ in range(3))
    copies = [tensor.clone() for tensor in (u, v, gradient)]
    ours, theirs = ((torch.empty(count), torch.empty(count)) for _ in range(2))
    top = advance(u, v, gradient, 0.9, nesterov, ours, count // 100)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_is_compiled", lambda values: False)
        assert advance(u, v, gradient, 0.9, nesterov, theirs, count // 100) is None
    assert all(torch.allclose(a, b, atol=2e-6) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((u, v, gradient), copies, strict=True))
    assert (top is not None) == (count > 100_000)
    if top is not None:
        expected = (ours[1].abs() >= top.bound).nonzero().flatten()
        assert top.found.positions.tolist() == expected.tolist()
        assert torch.equal(top.found.values, ours[1][expected])
        assert count // 100 <= expected.numel() <= count // 30


@pytest.mark.parametrize("count", [3, 4, 64, 1001])
def test_checksums_are_the_weighted_sum_modulo_2_to_the_64(count: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (count,))
    exact = sum(int(word) * (2 * i + 1) for i, word in enumerate(words) if i != 2) % 2**64
    assert checksum(words, 2) % 2**64 == exact
    assert torch.tensor([checksum(words, 2)]).item() == checksum(words, 2)  # it fits into an int64


@pytest.mark.parametrize("numel", [0, 1, 100, 70_000, 1_000_001])
@pytest.mark.parametrize("step", [64, 7, 512, 10**9])
def test_ranges_and_segments_cover_all_once(numel: int, step: int, threads: int) -> None:
    for bounds in (running.ranges(numel, step), running.segments(numel)):
        assert bounds[0][0] == 0
        assert bounds[-1][1] == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(start % step == 0 for start, _ in running.ranges(numel, step))
    assert len(running.ranges(numel, step)) <= threads
