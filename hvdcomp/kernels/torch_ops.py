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


def largest(values: Tensor, k: int) -> Tensor:
    """Ascending int64 indices of the ``k`` elements of largest magnitude in a 1-D tensor.

    Elements that tie at the k-th magnitude are taken at even distances among their like: the choice depends on the
    values alone, so that equal inputs select equally on every rank, and no end of the tensor is preferred.
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
    return chosen.nonzero().flatten()


def _kth_largest(magnitude: Tensor, k: int) -> Tensor:
    if magnitude.device.type == "cpu":
        position = magnitude.numel() - k
        return torch.tensor(np.partition(magnitude.numpy(), position)[position])
    return magnitude.topk(k, sorted=False).values.min()


def add_mean_(out: Tensor, contributions: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add to the 1-D ``out`` the mean of sparse vectors, one ``(indices, values)`` pair a worker, in worker order.

    Each worker's indices are unique, so that the sum does not depend on the order of the device's threads.
    """
    for indices, values in contributions:
        out.index_add_(0, indices, values.to(out.dtype) / len(contributions))
    return out


def orthogonalise(matrix: Tensor) -> Tensor:
    """An orthonormal basis, of the same shape (rows, columns <= rows), whose span holds the matrix's columns.

    A zero or rank-deficient matrix is completed by arbitrary orthonormal columns; a non-finite one gives nan.
    """
    if not torch.isfinite(matrix).all():
        return torch.full_like(matrix, torch.nan)
    return torch.linalg.qr(matrix).Q
