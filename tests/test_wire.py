"""Payloads and frames: round trips, sizes, and what becomes of bytes that are no payload."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvdcomp import indices as indices_code
from hvdcomp import kernels
from hvdcomp.errors import WireError
from hvdcomp.sparse_gradients import _decode as decode_rows
from hvdcomp.sparse_gradients import _encode as encode_rows
from hvdcomp.wire import (
    HEADER_NBYTES,
    MAX_INDEX,
    MEAN,
    VALUE_TYPES,
    VERSION,
    decode_frames,
    decode_sparse,
    encode_frame,
    encode_sparse,
    expected_sparse_nbytes,
    largest_sparse_nbytes,
)

QUICK = settings(deadline=None, max_examples=100)
FUZZ = settings(deadline=None, max_examples=150)


@st.composite
def sparse_vectors(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """(indices, values, numel)"""
    numel = draw(st.integers(0, 200))
    positions = sorted(draw(st.sets(st.integers(0, numel - 1), max_size=40))) if numel else []
    dtype, width = draw(st.sampled_from([(torch.float32, 32), (torch.float64, 64)]))
    values = [draw(st.floats(width=width)) for _ in positions]  # NaN and Inf too
    return torch.tensor(positions, dtype=torch.int64), torch.tensor(values, dtype=dtype), numel


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def as_payload(data: bytes | Sequence[int]) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def decoded_or_refused(payload: Tensor, numel: int) -> None:
    """Either a WireError, or indices that may be used without a further look."""
    try:
        found = decode_sparse(payload, numel)
    except WireError:
        return
    positions = found.positions.tolist()
    assert len(positions) == found.values.numel() <= numel
    assert all(0 <= i < numel for i in positions)
    assert positions == sorted(set(positions))


# -- payloads


@given(sparse_vectors())
@QUICK
def test_a_payload_comes_back_bitwise(vector: tuple[Tensor, Tensor, int]) -> None:
    indices, values, numel = vector
    payload = encode_sparse(indices, values, numel)
    assert payload.dtype == torch.uint8
    if values.dtype == torch.float32:
        assert payload.numel() <= largest_sparse_nbytes(indices.numel())
    back = decode_sparse(payload, numel)
    assert back.positions.dtype == torch.int32
    assert back.positions.tolist() == indices.tolist()
    assert back.values.dtype == values.dtype
    assert bits(back.values) == bits(values)


def test_a_payload_takes_at_most_eight_bytes_an_element_and_a_header() -> None:
    payload = encode_sparse(torch.tensor([1, 5, 70_000]), torch.tensor([1.0, 2.0, 3.0]), 100_000)
    assert payload.numel() <= HEADER_NBYTES + 16 + 4 * 3
    assert decode_sparse(payload, 100_000).positions.tolist() == [1, 5, 70_000]  # beyond int16


@given(st.binary(max_size=80), st.integers(0, 20))
@FUZZ
def test_random_bytes_are_refused(data: bytes, numel: int) -> None:
    decoded_or_refused(as_payload(data), numel)


@given(sparse_vectors(), st.data())
@FUZZ
def test_a_payload_with_a_flipped_bit_is_safe(vector: tuple[Tensor, Tensor, int], data: st.DataObject) -> None:
    indices, values, numel = vector
    payload = encode_sparse(indices, values, numel, data.draw(st.sampled_from(["fp32", MEAN])))
    position = data.draw(st.integers(0, payload.numel() - 1))
    payload[position] ^= 1 << data.draw(st.integers(0, 7))
    decoded_or_refused(payload, numel)


@given(sparse_vectors(), st.data())
@QUICK
def test_a_truncated_or_extended_payload_is_refused(vector: tuple[Tensor, Tensor, int], data: st.DataObject) -> None:
    indices, values, numel = vector
    payload = encode_sparse(indices, values, numel, data.draw(st.sampled_from(["fp32", MEAN])))
    with pytest.raises(WireError):
        decode_sparse(payload[: data.draw(st.integers(0, payload.numel() - 1))], numel)
    with pytest.raises(WireError):
        decode_sparse(torch.cat([payload, payload.new_zeros(data.draw(st.integers(1, 9)))]), numel)


@pytest.mark.parametrize(
    "wrong",
    [[-1], [3], [2**31 - 1], [1, 1], [2, 1], [0, 1, 1], [0, -5, 2]],
    ids=["negative", "too high", "huge", "twice", "descending", "twice at the end", "negative inside"],
)
def test_indices_are_checked(wrong: list[int]) -> None:
    """As int32 indices, which a payload may hold however short it is."""
    header = struct.pack("<HBBIQfBBH", 0xC0DE, VERSION, 0, len(wrong), 3, 1.0, 0, 0, 0)
    values = struct.pack(f"<{len(wrong)}f", *[1.0] * len(wrong)).ljust(-(-len(wrong) // 2) * 8, b"\0")
    with pytest.raises(WireError, match="ascending"):
        decode_sparse(as_payload(header + values + struct.pack(f"<{len(wrong)}i", *wrong)), 3)


def test_a_payload_for_another_tensor_is_refused() -> None:
    payload = encode_sparse(torch.tensor([0]), torch.ones(1), 4)
    with pytest.raises(WireError, match="expected a vector of 5"):
        decode_sparse(payload, 5)


@pytest.mark.parametrize("offset", [0, 2, 3])
def test_another_magic_version_or_type_is_refused(offset: int) -> None:
    payload = encode_sparse(torch.tensor([0]), torch.ones(1), 4)
    payload[offset] += 2
    with pytest.raises(WireError):
        decode_sparse(payload, 4)


def test_a_vector_beyond_int32_is_refused_without_being_made() -> None:
    assert MAX_INDEX == 2**31 - 1
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    assert encode_sparse(*nothing, 2**31 - 1).numel() == HEADER_NBYTES
    with pytest.raises(ValueError, match="int32"):
        encode_sparse(*nothing, 2**31)


# -- payloads of one value for all


def test_a_mean_stands_in_for_all_values() -> None:
    payload = encode_sparse(torch.tensor([1, 5]), torch.tensor([1.0, 4.0]), 9, MEAN)
    assert payload.numel() <= largest_sparse_nbytes(2, MEAN) == HEADER_NBYTES + 4 * 2
    back = decode_sparse(payload, 9)
    assert (back.positions.tolist(), back.values.tolist()) == ([1, 5], [2.5, 2.5])


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        (torch.tensor([]), None),
        (torch.zeros(3), 0.0),
        (torch.full((3,), 3e38), 3e38),  # their sum is beyond float32
        (torch.full((3,), -1e300, dtype=torch.float64), -torch.finfo(torch.float32).max),
        (torch.tensor([torch.nan, 1.0]), torch.nan),  # of a step that the frame's flag makes all skip
    ],
)
def test_means_at_the_edge(values: Tensor, mean: float | None) -> None:
    back = decode_sparse(encode_sparse(torch.arange(len(values)), values, 9, MEAN), 9)
    assert back.values.tolist() == pytest.approx([] if mean is None else [mean] * len(values), nan_ok=True)


@st.composite
def long_vectors(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, str]:
    """(indices, values, numel, value type), the last index among them: dense ones, and a few of up to 2^31 - 1."""
    numel = draw(st.sampled_from([1, 127, 128, 255, 256, 2**15, 2**16, 2**16 + 1, 10**6, 2**24 + 1, MAX_INDEX]))
    chosen = draw(st.sets(st.integers(0, numel - 1), max_size=30))
    run = draw(st.integers(0, min(numel, 300)))
    start = draw(st.integers(0, numel - run))
    positions = sorted({*chosen, *range(start, start + run), numel - 1})
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(len(positions), generator=generator) * 10.0 ** draw(st.integers(-20, 20))
    return torch.tensor(positions), values, numel, draw(st.sampled_from(sorted(VALUE_TYPES)))


@given(long_vectors())
@QUICK
def test_any_index_comes_back_beside_values_of_any_type(vector: tuple[Tensor, Tensor, int, str]) -> None:
    indices, values, numel, value_type = vector
    payload = encode_sparse(indices, values, numel, value_type)
    assert payload.numel() <= largest_sparse_nbytes(indices.numel(), value_type)
    back = decode_sparse(payload, numel)
    assert torch.equal(back.positions.long(), indices)
    least = {"fp32": 0.0, "fp16": 2.0**-25, "bf16": 0.0, "int8": float(values.abs().max()) / 254 * 1.00001}[value_type]
    relative = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-8, "int8": 0.0}[value_type]
    scale = max(1.0, float(values.abs().max()) / 65504) if value_type == "fp16" else 1.0
    assert bool(((back.values - values).abs() <= relative * values.abs() + least * scale * 1.00001).all())


@given(long_vectors(), st.data())
@FUZZ
def test_a_long_payload_with_a_flipped_bit_or_cut_short_is_safe(
    vector: tuple[Tensor, Tensor, int, str], data: st.DataObject
) -> None:
    indices, values, numel, value_type = vector
    payload = encode_sparse(indices, values, numel, value_type)
    place = data.draw(st.integers(0, payload.numel() - 1))
    with pytest.raises(WireError):
        decode_sparse(payload[:place], numel)
    payload[place] ^= 1 << data.draw(st.integers(0, 7))
    decoded_or_refused(payload, numel)


@given(st.binary(max_size=80), long_vectors())
@FUZZ
def test_any_bytes_after_a_valid_header_are_safe(data: bytes, vector: tuple[Tensor, Tensor, int, str]) -> None:
    indices, values, numel, value_type = vector
    payload = encode_sparse(indices, values, numel, value_type)
    decoded_or_refused(torch.cat([payload[:HEADER_NBYTES], as_payload(data)]), numel)
    kept = min(len(data), payload.numel() - HEADER_NBYTES)
    payload[HEADER_NBYTES : HEADER_NBYTES + kept] = as_payload(data)[:kept]
    decoded_or_refused(payload, numel)


@pytest.mark.parametrize("position", [2**31, 2**32, 2**32 + 5])
def test_positions_beyond_int32_are_refused(position: int) -> None:
    """A block code could hold them, and int32 would make other positions of them."""
    numel = 2**33
    code = indices_code.encode(torch.tensor([position]), numel)
    header = struct.pack("<HBBIQfBBH", 0xC0DE, VERSION, 1, 1, numel, 1.0, code.block_log2, code.count_bits, 0)
    payload = torch.cat([as_payload(header + struct.pack("<fi", 1.0, 0)), code.data])
    with pytest.raises(WireError):
        decode_sparse(payload, numel)


@pytest.mark.parametrize(
    ("numel", "count"), [(1, 1), (64, 64), (1000, 7), (1000, 999), (100_003, 1000), (MAX_INDEX, 50)]
)
@pytest.mark.parametrize("clumped", [False, True])
def test_other_devices_write_and_read_the_same(
    numel: int, count: int, clumped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take torch operations, which run here, too."""
    last = min(numel, 2 * count) - 1 if clumped else numel - 1
    positions = torch.linspace(0, last, count, dtype=torch.float64).floor().to(torch.int32)
    payload = encode_sparse(positions, torch.randn(count), numel)
    frame = encode_frame([payload], True)
    monkeypatch.setattr(kernels, "_on_cpu", lambda tensor: False)
    assert torch.equal(encode_sparse(positions, decode_sparse(payload, numel).values, numel), payload)
    assert torch.equal(encode_frame([payload], True), frame)
    assert torch.equal(decode_sparse(payload, numel).positions, positions)
    (received,) = decode_frames(frame, 1, 1)[0].payloads
    assert torch.equal(received, payload)
    with pytest.raises(WireError):
        decode_sparse(payload[:-1], numel)
    for bit in torch.randint(8 * payload.numel(), (200,)).tolist():
        flipped = payload.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        decoded_or_refused(flipped, numel)


# -- frames


@st.composite
def buckets_of_workers(draw: st.DrawFn) -> list[list[bytes]]:
    """Equally many payloads of each worker."""
    payloads = draw(st.integers(0, 5))
    return draw(
        st.lists(st.lists(st.binary(max_size=30), min_size=payloads, max_size=payloads), min_size=1, max_size=4)
    )


@given(buckets_of_workers(), st.data())
@QUICK
def test_frames_of_all_workers_come_back(workers: list[list[bytes]], data: st.DataObject) -> None:
    finite = [data.draw(st.booleans()) for _ in workers]
    frames = [encode_frame([as_payload(p) for p in ps], ok) for ps, ok in zip(workers, finite, strict=True)]
    assert all(frame.numel() % 8 == 0 for frame in frames)
    decoded = decode_frames(torch.cat(frames), len(workers), len(workers[0]))
    assert [frame.finite for frame in decoded] == finite
    assert [[bytes(p.tolist()) for p in frame.payloads] for frame in decoded] == workers


def test_a_frame_of_one_payload_takes_its_stated_bytes() -> None:
    assert encode_frame([as_payload(bytes(16 + 8 * 3))], True).numel() == 32 + 16 + 8 * 3
    assert encode_frame([], True).numel() == HEADER_NBYTES


def frames_or_refused(buffer: Tensor, workers: int, payloads: int) -> None:
    try:
        frames = decode_frames(buffer, workers, payloads)
    except WireError:
        return
    assert len(frames) == workers
    for frame in frames:
        assert len(frame.payloads) == payloads
        for payload in frame.payloads:
            decoded_or_refused(payload, 9)


@given(st.binary(max_size=100), st.integers(1, 3), st.integers(0, 3))
@FUZZ
def test_random_bytes_are_no_frames(data: bytes, workers: int, payloads: int) -> None:
    frames_or_refused(as_payload(data), workers, payloads)


@given(st.integers(1, 3), st.integers(0, 3), st.data())
@FUZZ
def test_a_frame_with_flipped_bits_is_refused_or_safe(workers: int, payloads: int, data: st.DataObject) -> None:
    own = [encode_sparse(torch.arange(3), torch.ones(3), 9) for _ in range(payloads)]
    buffer = torch.cat([encode_frame(own, True)] * workers)
    for _ in range(data.draw(st.integers(1, 3))):
        buffer[data.draw(st.integers(0, buffer.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    frames_or_refused(buffer, workers, payloads)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("payloads", [0, 1, 3])
def test_every_single_flipped_bit_of_a_frame_is_found(payloads: int, finite: bool) -> None:
    """Padding and the flag too."""
    own = [encode_sparse(torch.arange(3), torch.ones(3), 9, kind) for kind in ("fp32", "int8", "bf16")[:payloads]]
    frame = encode_frame(own, finite)
    for bit in range(8 * frame.numel()):
        flipped = frame.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode_frames(flipped, 1, payloads)


@given(st.integers(1, 3), st.integers(0, 3), st.data())
@QUICK
def test_truncated_frames_and_leftovers_are_refused(workers: int, payloads: int, data: st.DataObject) -> None:
    own = [encode_sparse(torch.arange(3), torch.ones(3), 9) for _ in range(payloads)]
    buffer = torch.cat([encode_frame(own, True)] * workers)
    with pytest.raises(WireError):
        decode_frames(buffer[: data.draw(st.integers(0, buffer.numel() - 1))], workers, payloads)
    with pytest.raises(WireError):
        decode_frames(torch.cat([buffer, buffer.new_zeros(data.draw(st.integers(1, 40)))]), workers, payloads)


def test_a_worker_with_other_buckets_is_named() -> None:
    frames = [encode_frame([as_payload(b"12")] * n, True) for n in (2, 1)]
    with pytest.raises(WireError, match=r"worker 1 sent 1 payloads, expected 2: the ranks' buckets differ"):
        decode_frames(torch.cat([*frames, torch.zeros(8, dtype=torch.uint8)]), 2, 2)


def test_payloads_within_a_frame_may_be_read_as_float64() -> None:
    own = [encode_sparse(torch.arange(n), torch.ones(n, dtype=torch.float64), 9) for n in (1, 2, 3)]
    for frame in decode_frames(torch.cat([encode_frame(own, True)] * 3), 3, 3):
        for n, payload in enumerate(frame.payloads, 1):
            assert decode_sparse(payload, 9).values.tolist() == [1.0] * n


# -- rows of sparse gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [[], [0], [3, 1]])
def test_sparse_rows_come_back(rows: list[int], dtype: torch.dtype) -> None:
    values = torch.randn(len(rows), 3).to(dtype)
    indices = torch.tensor([rows], dtype=torch.int64)
    given = torch.sparse_coo_tensor(indices, values, (4, 3), check_invariants=True).coalesce()
    back_indices, back_values = decode_rows(encode_rows(given), 4, 3, dtype)
    assert back_indices.tolist() == sorted(rows)
    assert torch.equal(back_values, given.values())


@given(st.binary(max_size=60), st.integers(0, 4), st.integers(0, 3))
@FUZZ
def test_random_bytes_are_no_rows(data: bytes, rows: int, width: int) -> None:
    try:
        indices, values = decode_rows(as_payload(data), rows, width, torch.float32)
    except WireError:
        return
    assert all(0 <= i < rows for i in indices.tolist())
    assert values.shape == (indices.numel(), width)


@pytest.mark.parametrize("row", [-1, 4, 2**40])
def test_row_numbers_are_checked(row: int) -> None:
    payload = as_payload(struct.pack("<Qqf", 1, row, 1.0))
    with pytest.raises(WireError, match="outside"):
        decode_rows(payload, 4, 1, torch.float32)


@pytest.mark.parametrize("numel", [1000, 36_864, 1_000_000])
@pytest.mark.parametrize("density", [0.5, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_the_expected_size_of_a_random_support_is_within_three_percent(numel, density, values):
    count = max(1, int(numel * density))
    positions = torch.randperm(numel, generator=torch.Generator().manual_seed(numel))[:count].sort().values
    sent = encode_sparse(positions, torch.ones(count), numel, values).numel()
    expected = expected_sparse_nbytes(count, numel, values)
    assert abs(expected - sent) <= 0.03 * sent
