"""The rounds of a tensor that is sent whole."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdcomp.compressors.requests import Allgather, Allreduce, Alltoall, Dense, Rounds, Unit
from hvdcomp.errors import WireError
from hvdcomp.kernels import empty

_PIECE = 65536
"""Elements of each worker that are summed at a time."""


def dense_rounds(tensor: Tensor, unit: Unit, in_place: bool = False) -> Rounds:
    """The mean of a flat tensor as it is; see :class:`Allreduce`."""
    if tensor.dtype == torch.bfloat16:
        return (yield from bfloat16_rounds(tensor, unit))
    mean = yield Allreduce(tensor, in_place)
    return Dense(mean)


def bfloat16_rounds(tensor: Tensor, unit: Unit) -> Rounds:
    """The mean of a tensor as bfloat16: alltoall, a float32 sum of this worker's part, allgather of the parts.

    It moves as many bytes as a ring allreduce would; the mean is float32 values that bfloat16 can hold.
    """
    part = -(-tensor.numel() // unit.workers)
    padded = empty(unit.workers * part, torch.bfloat16, tensor.device)
    padded[: tensor.numel()] = tensor.reshape(-1)
    padded[tensor.numel() :] = 0
    received = yield Alltoall(padded.view(torch.int16).view(unit.workers, part))
    pieces = received.view(torch.bfloat16).split(_PIECE, dim=1)  # small ones, whose sums stay in the cache
    mean = torch.cat([piece.float().mean(dim=0).to(torch.bfloat16) for piece in pieces])
    parts = yield Allgather(mean.view(torch.uint8))
    if any(part.numel() != mean.nbytes for part in parts):
        raise WireError(f"parts of {[part.numel() for part in parts]} bytes, expected {mean.nbytes} from every worker")
    whole = torch.cat(parts, out=empty(padded.nbytes, torch.uint8, tensor.device))
    return Dense(whole.view(torch.bfloat16)[: tensor.numel()])
