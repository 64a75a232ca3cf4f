"""The rounds of a tensor that is sent whole."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdcomp.compressors.requests import Allgather, Allreduce, Alltoall, Dense, Rounds, Unit
from hvdcomp.errors import WireError
from hvdcomp.kernels import empty


def dense_rounds(tensor: Tensor, unit: Unit) -> Rounds:
    """The mean of a flat tensor as it is."""
    if tensor.dtype == torch.bfloat16:
        return (yield from bfloat16_rounds(tensor, unit))
    mean = yield Allreduce(tensor)
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
    mean = received.view(torch.bfloat16).float().mean(dim=0).to(torch.bfloat16)
    parts = yield Allgather(mean.view(torch.uint8))
    if any(part.numel() != mean.nbytes for part in parts):
        raise WireError(f"parts of {[part.numel() for part in parts]} bytes, expected {mean.nbytes} from every worker")
    return Dense(torch.cat(parts).view(torch.bfloat16)[: tensor.numel()])
