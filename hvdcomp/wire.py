"""What travels: a sparse vector's payload, and the frame that holds one worker's payloads of a bucket.

Everything is little-endian and self-describing, one uint8 tensor; decoding checks all that it is told and raises
:class:`WireError` where it does not fit.

Payload: 16 bytes of header (magic, version, value type, index type, count, elements), the values, the int32 indices.
Frame: 16 bytes of header (magic, version, flags, number of payloads, length in bytes), one uint32 length a payload,
padding to 8 bytes, then the payloads, each padded to 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdcomp.errors import WireError

VERSION = 1
ALIGNMENT = 8
MAX_INDEX = 2**31 - 1

_PAYLOAD = struct.Struct("<HBBIQ")  # magic, version, value and index type (4 bits each), count, elements
_FRAME = struct.Struct("<HBBIQ")  # magic, version, flags, payloads, length in bytes
_PAYLOAD_MAGIC = 0xC0DE
_FRAME_MAGIC = 0xF2A3
_NON_FINITE = 1

_VALUE_TYPES = {0: torch.float32, 1: torch.float64}
_VALUE_CODES = {dtype: code for code, dtype in _VALUE_TYPES.items()}
_INT32_INDEX = 0

PAYLOAD_HEADER_NBYTES = _PAYLOAD.size


def sparse_nbytes(count: int, value_itemsize: int = 4) -> int:
    """Bytes of a payload with ``count`` values and int32 indices."""
    return PAYLOAD_HEADER_NBYTES + count * (value_itemsize + 4)


def encode_sparse(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """One worker's sparse vector as a uint8 payload.

    Args:
        indices: (k,) ascending unique positions in [0, numel).
        values: (k,) float32 or float64.
        numel: elements of the dense vector, at most 2^31 - 1.

    Raises:
        ValueError: the vector is too long for int32 indices, or the values' type has no code.
    """
    if numel > MAX_INDEX:
        raise ValueError(
            f"a tensor of {numel} elements cannot be sent sparsely: indices are int32, so at most {MAX_INDEX} "
            'elements; use granularity="tensor", or split the parameter'
        )
    if values.dtype not in _VALUE_CODES:
        raise ValueError(f"values must be one of {sorted(map(str, _VALUE_CODES))}, got {values.dtype}")
    codes = _VALUE_CODES[values.dtype] << 4 | _INT32_INDEX
    header = _to_tensor(_PAYLOAD.pack(_PAYLOAD_MAGIC, VERSION, codes, values.numel(), numel), values.device)
    return torch.cat([header, _as_bytes(values), _as_bytes(indices.to(torch.int32))])


def decode_sparse(payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The ``(indices, values)`` of :func:`encode_sparse`; indices are int32.

    Raises:
        WireError: the payload is not one of a vector of ``numel`` elements.
    """
    if payload.numel() < PAYLOAD_HEADER_NBYTES:
        raise WireError(f"payload of {payload.numel()} bytes is shorter than its header of {PAYLOAD_HEADER_NBYTES}")
    magic, version, codes, count, elements = _PAYLOAD.unpack(_to_bytes(payload[:PAYLOAD_HEADER_NBYTES]))
    if magic != _PAYLOAD_MAGIC or version != VERSION:
        raise WireError(f"not a payload of version {VERSION}: magic {magic:#x}, version {version}")
    if codes >> 4 not in _VALUE_TYPES or codes & 15 != _INT32_INDEX:
        raise WireError(f"unknown value or index type: codes {codes >> 4} and {codes & 15}")
    if elements != numel or count > numel:
        raise WireError(f"payload holds {count} of {elements} elements, expected a vector of {numel}")
    dtype = _VALUE_TYPES[codes >> 4]
    if payload.numel() != sparse_nbytes(count, dtype.itemsize):
        raise WireError(f"payload of {payload.numel()} bytes, its header says {sparse_nbytes(count, dtype.itemsize)}")
    split = PAYLOAD_HEADER_NBYTES + count * dtype.itemsize
    values = payload[PAYLOAD_HEADER_NBYTES:split].view(dtype)
    indices = payload[split:].view(torch.int32)
    if count and not _ascending_below(indices, numel):
        raise WireError(f"indices are not ascending within [0, {numel})")
    return indices, values


def _ascending_below(indices: Tensor, numel: int) -> bool:
    ordered = bool((indices[1:] > indices[:-1]).all())
    return ordered and int(indices[0]) >= 0 and int(indices[-1]) < numel


@dataclass(frozen=True)
class Frame:
    """One worker's payloads of a bucket, in the order of its units."""

    payloads: list[Tensor]
    finite: bool


def encode_frame(payloads: Sequence[Tensor], finite: bool) -> Tensor:
    """The uint8 buffer that one worker hands to an allgather; ``finite`` is False where it met a NaN or an Inf."""
    lengths = [payload.numel() for payload in payloads]
    start = _frame_start(len(lengths))
    total = start + sum(map(_aligned, lengths))
    flags = 0 if finite else _NON_FINITE
    head = _FRAME.pack(_FRAME_MAGIC, VERSION, flags, len(lengths), total) + struct.pack(f"<{len(lengths)}I", *lengths)
    frame = torch.zeros(total, dtype=torch.uint8, device=payloads[0].device if payloads else None)
    frame[: len(head)] = _to_tensor(head, frame.device)
    for payload in payloads:
        frame[start : start + payload.numel()] = payload
        start += _aligned(payload.numel())
    return frame


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
    magic, version, flags, count, total = _FRAME.unpack(head[: _FRAME.size])
    if magic != _FRAME_MAGIC or version != VERSION or flags > _NON_FINITE:
        raise WireError(f"worker {worker}: not a frame of version {VERSION}: {magic:#x}, {version}, flags {flags}")
    if count != payloads:
        raise WireError(f"worker {worker} sent {count} payloads, expected {payloads}: the ranks' buckets differ")
    lengths = struct.unpack_from(f"<{count}I", head, _FRAME.size)
    if total != start + sum(map(_aligned, lengths)) or total > buffer.numel():
        raise WireError(f"worker {worker}: a frame of {total} bytes does not fit its payloads or the buffer")
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
    return tensor.contiguous().view(torch.uint8)


def _to_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
