"""Sparse gradients (``torch.nn.Embedding(sparse=True)``) travel by allgather as the rows that they have."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdcomp.compressors.requests import Allgather, Reduced, Rounds, Unit
from hvdcomp.errors import WireError

_HEADER = struct.Struct("<Q")  # rows


def as_rows(gradient: Tensor) -> Tensor:
    """A gradient as a coalesced tensor with one sparse dimension, whatever it was."""
    sparse = gradient if gradient.is_sparse and gradient.sparse_dim() == 1 else gradient.to_dense().to_sparse(1)
    return sparse.coalesce()


def no_rows(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient of a parameter that took no part."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[1:], dtype=dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()


@dataclass
class SparseRows(Reduced):
    """The mean over workers as a sparse tensor: the union of their rows."""

    mean: Tensor

    def write_mean_(self, out: Tensor) -> None:
        out.copy_(self.mean.to_dense().view(-1))

    def settle_(self, acc: Tensor) -> None:
        acc.zero_()


def sparse_rounds(rows: Tensor, unit: Unit) -> Rounds:
    """One allgather of row numbers and rows."""
    payloads = yield Allgather(_encode(rows))
    width = unit.numel // unit.shape[0] if unit.shape[0] else 0
    decoded = [_decode(payload, unit.shape[0], width, rows.dtype) for payload in payloads]
    indices = torch.cat([index for index, _ in decoded])
    values = torch.cat([value for _, value in decoded]) / unit.workers
    shaped = values.view(-1, *unit.shape[1:])
    return SparseRows(
        torch.sparse_coo_tensor(indices.unsqueeze(0), shaped, unit.shape, check_invariants=False).coalesce()
    )


def _encode(rows: Tensor) -> Tensor:
    header = torch.frombuffer(bytearray(_HEADER.pack(rows.indices().shape[1])), dtype=torch.uint8)
    indices = rows.indices()[0].contiguous().view(torch.uint8)
    values = rows.values().contiguous().view(-1).view(torch.uint8)
    return torch.cat([header.to(rows.device), indices, values])


def _decode(payload: Tensor, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    count = _HEADER.unpack(payload[: _HEADER.size].cpu().numpy().tobytes())[0] if payload.numel() >= 8 else -1
    split = _HEADER.size + 8 * count
    if count < 0 or payload.numel() != split + count * width * dtype.itemsize:
        raise WireError(f"sparse rows: a payload of {payload.numel()} bytes does not hold {count} rows of {width}")
    indices = payload[_HEADER.size : split].view(torch.int64)
    if count and not (int(indices.min()) >= 0 and int(indices.max()) < rows):
        raise WireError(f"sparse rows: row numbers outside [0, {rows})")
    return indices, payload[split:].view(dtype).view(count, width)
