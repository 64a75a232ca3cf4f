"""ATOMO: some of a matrix's singular components, chosen at random so that their sum is the matrix on average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_count
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.dense import dense_rounds
from hvdcomp.compressors.randomk import shared_seed
from hvdcomp.compressors.requests import Allgather, Reduced, Rounds, Unit, Volume
from hvdcomp.errors import WireError


class ATOMO(Compressor):
    """Keeps component i with probability p_i = min(1, budget * sigma_i / sum sigma) and sends u_i sigma_i / p_i, v_i.

    Components are drawn together (systematic sampling), each with its own p_i, so that ``budget`` of them are sent at
    most. Tensors of fewer than two dimensions, and matrices n1 x n2 with budget * (n1 + n2) >= n1 * n2, stay dense. A
    singular value decomposition of every gradient is slow: this is for comparisons.

    Args:
        budget: components to send, >= 1 (the paper's s).
        seed: a whole number >= 0, the same on all workers, which draw different numbers from it.
    """

    name: ClassVar[str] = "atomo"
    collective: ClassVar[str] = "allgather"
    needs_matrices: ClassVar[bool] = True
    source: ClassVar[str] = "Wang et al. 2018, spectral ATOMO"

    def __init__(self, budget: int = 3, seed: int = 0) -> None:
        self.budget = check_count("budget", budget, hint="singular components to send; the paper uses 1 to 4")
        self.seed = check_count("seed", seed, 0, hint="the same on all workers, which draw different numbers from it")

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        matrix = self._matrix(unit.shape)
        if matrix is None:
            return (yield from dense_rounds(acc, unit))
        payloads = yield Allgather(self.encode(acc.reshape(matrix), unit).flatten().view(torch.uint8))
        nbytes = sum(matrix) * acc.dtype.itemsize
        for worker, payload in enumerate(payloads):
            if payload.numel() % nbytes or payload.numel() > self.budget * nbytes:
                raise WireError(
                    f"worker {worker} sent {payload.numel()} bytes, expected 0 to {self.budget} components of {nbytes}"
                )
        return Components([p.clone().view(acc.dtype).view(-1, sum(matrix)) for p in payloads], matrix, unit.worker)

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        """The most that :meth:`rounds` sends: chance may choose one component less."""
        matrix = self._matrix(torch.Size(shape))
        if matrix is None:
            return [Volume(0, "allreduce", 4 * torch.Size(shape).numel())]
        return [Volume(0, "allgather", 4 * self.budget * sum(matrix))]

    def encode(self, matrix: Tensor, unit: Unit) -> Tensor:
        """The chosen components, one a row: u_i sigma_i / p_i, then v_i. None of a matrix that is not finite."""
        if not torch.isfinite(matrix).all():
            return matrix.new_empty(0, sum(matrix.shape))
        peak = matrix.abs().max()
        u, sigma, vh = torch.linalg.svd(matrix / torch.where(peak > 0, peak, 1), full_matrices=False)
        probabilities = _probabilities(sigma.double(), self.budget)
        start = torch.rand((), generator=self._generator(unit), dtype=torch.float64).to(matrix.device)
        reached = torch.cat([start.unsqueeze(0), start + probabilities.cumsum(0)]).floor()
        kept = (reached.diff() > 0).nonzero().flatten()[: self.budget]
        factors = (sigma.double() / probabilities)[kept].to(matrix.dtype) * peak
        return torch.cat([u.t()[kept] * factors.unsqueeze(1), vh[kept]], dim=1)

    def _matrix(self, shape: torch.Size) -> tuple[int, int] | None:
        """(n1, n2) of the matrix that a shape stands for, None where it is sent dense."""
        if len(shape) < 2 or shape.numel() == 0:
            return None
        rows, columns = shape[0], shape.numel() // shape[0]
        return (rows, columns) if self.budget * (rows + columns) < rows * columns else None

    def _generator(self, unit: Unit) -> torch.Generator:
        return torch.Generator().manual_seed(shared_seed(self.seed, unit.step, unit.name, unit.worker) >> 1)


@dataclass
class Components(Reduced):
    """Every worker's components, one a row: u scaled, then v."""

    received: list[Tensor]
    matrix: tuple[int, int]
    own: int

    def write_mean_(self, out: Tensor) -> None:
        mean = out.zero_().view(self.matrix)
        for worker in self.received:
            self._add_(mean, worker, 1 / len(self.received))

    def settle_(self, acc: Tensor) -> None:
        self._add_(acc.view(self.matrix), self.received[self.own], -1)

    def _add_(self, out: Tensor, components: Tensor, weight: float) -> None:
        u, v = components.split(list(self.matrix), dim=1)
        out.addmm_(u.t(), v, alpha=weight)


def _probabilities(sigma: Tensor, budget: int) -> Tensor:
    """min(1, budget * sigma_i / sum sigma), 0 of a zero matrix; their sum is ``budget`` at most."""
    total = sigma.sum()
    return (budget * sigma / torch.where(total > 0, total, 1)).clamp(max=1)
