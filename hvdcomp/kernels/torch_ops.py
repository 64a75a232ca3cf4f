"""The hot loops as torch operations: they run on every device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def squared_norm(values: Tensor) -> Tensor:
    """The sum of squares of a 1-D tensor as a float64 scalar tensor, on the tensor's device.

    It is inf or nan exactly where some element is not finite: a float32 sum that overflows is taken again in float64.
    """
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    total = torch.dot(values, values).double()
    if values.dtype == torch.float32 and values.device.type == "cpu" and not torch.isfinite(total):
        return values.double().square().sum()
    return total


def moments(values: Tensor) -> tuple[float, float, float, float]:
    """(sum, sum of magnitudes, sum of squares, largest magnitude) of a 1-D tensor, in float64."""
    if not values.numel():
        return 0.0, 0.0, 0.0, 0.0
    exact = values.double()
    magnitude = exact.abs()
    found = torch.stack([exact.sum(), magnitude.sum(), exact.square().sum(), magnitude.max()])
    total, total_abs, total_sq, top = found.tolist()
    return total, total_abs, total_sq, top


def largest(values: Tensor, k: int) -> Tensor:
    """Ascending int64 indices of the ``k`` elements of largest magnitude in a 1-D tensor.

    Elements that tie at the k-th magnitude are taken at even distances among their like: the choice depends on the
    values alone, so that equal inputs select equally on every rank, and no end of the tensor is preferred. Where there
    are NaN, any ``k`` will do.
    """
    magnitude = values.abs()
    if k >= magnitude.numel():
        return torch.arange(magnitude.numel(), device=values.device)
    threshold = _kth_largest(magnitude, k)
    chosen = magnitude > threshold
    missing = k - int(chosen.sum())
    ties = (magnitude == threshold).nonzero().flatten()
    steps = torch.arange(min(missing, ties.numel()), device=values.device)
    chosen[ties[steps * ties.numel() // max(missing, 1)]] = True
    found = chosen.nonzero().flatten()
    return found if found.numel() == k else torch.arange(k, device=values.device)


def _kth_largest(magnitude: Tensor, k: int) -> Tensor:
    if magnitude.device.type == "cpu":
        position = magnitude.numel() - k
        return torch.tensor(np.partition(magnitude.numpy(), position)[position])
    return magnitude.topk(k, sorted=False).values.min()


def orthogonalise(matrix: Tensor) -> Tensor:
    """An orthonormal basis, of the same shape (rows, columns <= rows), whose span holds the matrix's columns.

    A zero or rank-deficient matrix is completed by arbitrary orthonormal columns; a non-finite one gives nan.
    """
    if not torch.isfinite(matrix).all():
        return torch.full_like(matrix, torch.nan)
    return torch.linalg.qr(matrix).Q


def pack_bits(values: Tensor, width: int) -> Tensor:
    """The low ``width`` bits of each number as uint8, one after the other, least significant first."""
    shifts = torch.arange(width, device=values.device)
    stream = (values.to(torch.int64).unsqueeze(1) >> shifts & 1).flatten()
    padded = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, device=values.device)).sum(dim=1).to(torch.uint8)


def unpack_bits(data: Tensor, count: int, width: int) -> Tensor:
    """The reverse of :func:`pack_bits`, as int64."""
    stream = (data.to(torch.int64).unsqueeze(1) >> torch.arange(8, device=data.device) & 1).flatten()
    return (stream[: count * width].view(count, width) << torch.arange(width, device=data.device)).sum(dim=1)
