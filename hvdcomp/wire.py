"""What travels: a sparse vector's payload, and the frame that holds one worker's payloads of a bucket.

Everything is little-endian and self-describing, one uint8 tensor; decoding checks all that it is told and raises
:class:`WireError` where it does not fit.

Payload: 24 bytes of header (magic, version, value and index type, count, elements, scale, block and count widths), the
values, padding to 8 bytes, the indices: int32, or the block code of :mod:`hvdcomp.indices` where that is shorter.
Frame: 24 bytes of header (magic, version, flags, number of payloads, length in bytes, checksum), one uint32 length a
payload, padding to 8 bytes, then the payloads, each padded to 8 bytes. The checksum finds every flipped bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdcomp import indices
from hvdcomp.errors import WireError
from hvdcomp.kernels import Collected, ascending_below, checksum, empty

VERSION = 2
ALIGNMENT = 8
MAX_INDEX = 2**31 - 1

_PAYLOAD = struct.Struct("<HBBIQfBBH")
_FRAME = struct.Struct("<HBBIQq")
_CHECKSUM_WORD = 2
"""Holds :func:`checksum` of the others: a flipped bit changes it by an odd multiple of a power of two below 2^64."""
_PAYLOAD_MAGIC = 0xC0DE
_FRAME_MAGIC = 0xF2A3
_NON_FINITE = 1

VALUE_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
"""What values may travel as; float64 values travel as float64 under "fp32"."""
MEAN = "mean"
"""No values travel but their mean, in the header's scale, for methods whose values are about alike."""
_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8]
_MEAN_CODE = 15
_INT32_INDEX, _BLOCK_INDEX = 0, 1
_FLOAT32_MAX = torch.finfo(torch.float32).max
_LARGEST = {torch.float16: torch.finfo(torch.float16).max, torch.int8: 127.0}
"""The number that the largest magnitude is scaled to; other types hold every float32 as it is."""

HEADER_NBYTES = _PAYLOAD.size


def largest_sparse_nbytes(count: int, values: str = "fp32") -> int:
    """A bound on the bytes of a payload with ``count`` values of float32 gradients: indices take 32 bits at most."""
    itemsize = 0 if values == MEAN else VALUE_TYPES[values].itemsize
    return HEADER_NBYTES + _aligned(count * itemsize) + 4 * count


def expected_sparse_nbytes(count: int, numel: int, values: str = "fp32") -> int:
    """About the bytes of a payload with ``count`` values of ``numel`` float32 elements, at random positions."""
    itemsize = 0 if values == MEAN else VALUE_TYPES[values].itemsize
    index_nbytes = min(4 * count, indices.expected_nbytes(numel, count))
    return HEADER_NBYTES + _aligned(count * itemsize) + index_nbytes


def check_indexable(numel: int) -> None:
    """Raise a ValueError where a vector is too long for int32 indices."""
    if numel > MAX_INDEX:
        raise ValueError(
            f"a tensor of {numel} elements cannot be sent sparsely: indices are int32, so at most {MAX_INDEX} "
            'elements; use granularity="tensor", or split the parameter'
        )


def encode_sparse(positions: Tensor, values: Tensor, numel: int, value_type: str = "fp32") -> Tensor:
    """One worker's sparse vector as a uint8 payload.

    Args:
        positions: (k,) ascending unique positions in [0, numel).
        values: (k,) finite float32 or float64.
        numel: elements of the dense vector, at most 2^31 - 1.
        value_type: a key of :data:`VALUE_TYPES`; fp16 and int8 are scaled by the largest magnitude, which is exact in
            that nothing overflows, and rounded to nearest. Or :data:`MEAN`, which float32 holds.

    Raises:
        ValueError: the vector is too long for int32 indices.
    """
    check_indexable(numel)
    stored, scale = _store(values, value_type)
    code = indices.encode(positions, numel) if positions.numel() else None
    blocked = code is not None and code.data.numel() < 4 * positions.numel()
    index_data = code.data if code is not None and blocked else _as_bytes(positions.to(torch.int32))
    value_code = _MEAN_CODE if value_type == MEAN else _DTYPES.index(stored.dtype)
    codes = value_code << 4 | (_BLOCK_INDEX if blocked else _INT32_INDEX)
    widths = (code.block_log2, code.count_bits) if code is not None and blocked else (0, 0)
    header = _PAYLOAD.pack(_PAYLOAD_MAGIC, VERSION, codes, values.numel(), numel, scale, *widths, 0)
    padding = values.new_zeros(-stored.nbytes % ALIGNMENT, dtype=torch.uint8)
    return torch.cat([_to_tensor(header, values.device), _as_bytes(stored), padding, index_data])


def decode_sparse(payload: Tensor, numel: int) -> Collected:
    """The positions (int32) and values (float32 or float64) of :func:`encode_sparse`.

    Raises:
        WireError: the payload is not one of a vector of ``numel`` elements.
    """
    if payload.numel() < HEADER_NBYTES:
        raise WireError(f"payload of {payload.numel()} bytes is shorter than its header of {HEADER_NBYTES}")
    header = _PAYLOAD.unpack(_to_bytes(payload[:HEADER_NBYTES]))
    magic, version, codes, count, elements, scale, block_log2, count_bits, reserved = header
    if magic != _PAYLOAD_MAGIC or version != VERSION or reserved:
        raise WireError(f"not a payload of version {VERSION}: magic {magic:#x}, version {version}")
    mean = codes >> 4 == _MEAN_CODE
    if (codes >> 4 >= len(_DTYPES) and not mean) or codes & 15 > _BLOCK_INDEX:
        raise WireError(f"unknown value or index type: codes {codes >> 4} and {codes & 15}")
    if elements != numel or count > numel or numel > MAX_INDEX:
        raise WireError(f"payload holds {count} of {elements} elements, expected a vector of {numel}")
    dtype = torch.float32 if mean else _DTYPES[codes >> 4]
    nbytes = 0 if mean else count * dtype.itemsize
    split = HEADER_NBYTES + _aligned(nbytes)
    if payload.numel() < split:
        raise WireError(f"payload of {payload.numel()} bytes does not hold {count} values of {dtype}")
    stored = payload[HEADER_NBYTES : HEADER_NBYTES + nbytes].view(dtype)
    values = torch.full((count,), scale, device=payload.device) if mean else _load(stored, scale)
    return Collected(_load_positions(payload[split:], codes & 15, (block_log2, count_bits), count, numel), values)


def _load_positions(data: Tensor, kind: int, widths: tuple[int, int], count: int, numel: int) -> Tensor:
    if kind == _BLOCK_INDEX:
        positions = indices.decode(indices.BlockCode(*widths, data), count, numel)
    elif data.numel() == 4 * count and widths == (0, 0):
        positions = data.view(torch.int32)
    else:
        raise WireError(f"{data.numel()} bytes do not hold {count} int32 indices")
    if not ascending_below(positions, numel):
        raise WireError(f"indices are not ascending within [0, {numel})")
    return positions


def _store(values: Tensor, value_type: str) -> tuple[Tensor, float]:
    """Values in the type that travels, and the scale that they were divided by."""
    if value_type == MEAN:
        mean = float(values.sum(dtype=torch.float64)) / max(values.numel(), 1)
        return values.new_empty(0), min(max(mean, -_FLOAT32_MAX), _FLOAT32_MAX)
    dtype = VALUE_TYPES[value_type]
    if dtype == torch.float32:
        return values, 1.0
    if not values.numel():
        return values.to(dtype), 1.0
    if dtype not in _LARGEST:
        limit = torch.finfo(dtype).max
        return values.clamp(-limit, limit).to(dtype), 1.0
    scale = float(torch.tensor(min(float(values.abs().max()) / _LARGEST[dtype], _FLOAT32_MAX), dtype=torch.float32))
    if dtype == torch.float16:
        scale = max(1.0, scale)
    if scale == 0.0:
        return torch.zeros_like(values, dtype=dtype), 1.0
    scaled = (values / scale).clamp(-_LARGEST[dtype], _LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def _load(stored: Tensor, scale: float) -> Tensor:
    if stored.dtype in (torch.float32, torch.float64):
        return stored
    return (stored.to(torch.float32) * scale).clamp_(-_FLOAT32_MAX, _FLOAT32_MAX)  # rounding may go beyond


@dataclass(frozen=True)
class Frame:
    """One worker's payloads of a bucket, in the order of its units."""

    payloads: list[Tensor]
    finite: bool


def encode_frame(payloads: Sequence[Tensor], finite: bool) -> Tensor:
    """The uint8 buffer that one worker hands to an allgather; ``finite`` is False where it met a NaN or an Inf."""
    lengths = [payload.numel() for payload in payloads]
    start, total = _frame_start(len(lengths)), frame_nbytes(lengths)
    flags = 0 if finite else _NON_FINITE
    head = _FRAME.pack(_FRAME_MAGIC, VERSION, flags, len(lengths), total, 0) + struct.pack(
        f"<{len(lengths)}I", *lengths
    )
    frame = empty(total, torch.uint8, payloads[0].device if payloads else torch.device("cpu"))
    frame[: len(head)] = _to_tensor(head, frame.device)
    frame[len(head) : start] = 0
    for payload in payloads:
        end = start + payload.numel()
        frame[start:end] = payload
        start += _aligned(payload.numel())
        frame[end:start] = 0
    words = frame.view(torch.int64)
    words[_CHECKSUM_WORD] = checksum(words, _CHECKSUM_WORD)
    return frame


def frame_nbytes(lengths: Sequence[int]) -> int:
    """Bytes of the frame that holds payloads of these lengths."""
    return _frame_start(len(lengths)) + sum(map(_aligned, lengths))


def decode_frames(buffer: Tensor, workers: int, payloads: int) -> list[Frame]:
    """The frames of all workers from what an allgather returned, in worker order.

    Raises:
        WireError: the buffer does not hold ``workers`` frames of ``payloads`` payloads each.
    """
    frames = []
    for worker in range(workers):
        frame, length = _decode_frame(buffer, worker, payloads)
        frames.append(frame)
        buffer = buffer[length:]
    if buffer.numel():
        raise WireError(f"{buffer.numel()} bytes are left after the frames of {workers} workers")
    return frames


def _decode_frame(buffer: Tensor, worker: int, payloads: int) -> tuple[Frame, int]:
    start = _frame_start(payloads)
    if buffer.numel() < start:
        raise WireError(f"worker {worker}: {buffer.numel()} bytes are too few for the head of a frame ({start})")
    head = _to_bytes(buffer[:start])
    magic, version, flags, count, total, expected = _FRAME.unpack(head[: _FRAME.size])
    if magic != _FRAME_MAGIC or version != VERSION or flags > _NON_FINITE:
        raise WireError(f"worker {worker}: not a frame of version {VERSION}: {magic:#x}, {version}, flags {flags}")
    if count != payloads:
        raise WireError(f"worker {worker} sent {count} payloads, expected {payloads}: the ranks' buckets differ")
    lengths = struct.unpack_from(f"<{count}I", head, _FRAME.size)
    if total != frame_nbytes(lengths) or total > buffer.numel():
        raise WireError(f"worker {worker}: a frame of {total} bytes does not fit its payloads or the buffer")
    if expected != checksum(buffer[:total].view(torch.int64), _CHECKSUM_WORD):
        raise WireError(f"worker {worker}: the checksum of a frame of {total} bytes is wrong")
    parts = []
    for length in lengths:
        parts.append(buffer[start : start + length])
        start += _aligned(length)
    return Frame(parts, finite=flags == 0), total


def _frame_start(payloads: int) -> int:
    return _aligned(_FRAME.size + 4 * payloads)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _to_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
