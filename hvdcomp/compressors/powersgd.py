"""PowerSGD: a low-rank approximation by one step of power iteration."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_count, check_flag
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.dense import dense_rounds
from hvdcomp.compressors.randomk import shared_seed
from hvdcomp.compressors.requests import Allreduce, Decide, LowRank, Rounds, Unit, Volume
from hvdcomp.kernels import orthogonalise, squared_norm


class PowerSGD(Compressor):
    """Each gradient, as the matrix shape[0] x rest, travels as two thin factors P and Q, by two dependent allreduces.

    Q is kept from step to step (warm start); when the rank changes, columns are left out or added. Tensors with fewer
    than two dimensions stay dense.

    Args:
        rank: columns of P and Q, >= 1; at most min(n1, n2) of a matrix n1 x n2 is used.
        seed: of the first Q, the same on all workers.
        small_matrix_rule: send a matrix dense where its factors would not be smaller: (n1 + n2) * rank >= n1 * n2.
        error_feedback: keep what was not sent for the next step.
    """

    name: ClassVar[str] = "powersgd"
    collective: ClassVar[str] = "allreduce"
    needs_matrices: ClassVar[bool] = True
    takes_factors: ClassVar[bool] = True
    source: ClassVar[str] = "Vogels et al. 2019, Algorithm 1"

    def __init__(
        self, rank: int = 4, seed: int = 0, small_matrix_rule: bool = True, error_feedback: bool = True
    ) -> None:
        self.rank = check_count("rank", rank, hint="columns of P and Q; the papers use 1 to 32")
        self.seed = check_count("seed", seed, 0, hint="the same on all workers")
        self.small_matrix_rule = check_flag("small_matrix_rule", small_matrix_rule, hint="send small matrices dense")
        self.error_feedback = check_flag(
            "error_feedback", error_feedback, hint="keep what was not sent for the next step"
        )

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        if unit.levels is not None:
            return (yield from self._decided_rounds(acc, unit, unit.levels))
        factors = self._factors(unit.shape, unit.cf)
        if factors is None:
            return (yield from dense_rounds(acc, unit))
        rows, columns, rank = factors
        matrix = acc.view(rows, columns)
        # With as many columns as M, Q spans everything, so P = M loses nothing.
        projected = matrix if rank == columns else matrix @ self._q(matrix, rank, unit)
        return (yield from self._factorised(matrix, projected, {}))

    def _decided_rounds(self, acc: Tensor, unit: Unit, levels: tuple[float, float]) -> Rounds:
        """The schedule chooses the rank, by what each would keep of this worker's own matrix."""
        higher = self._factors(unit.shape, levels[1])
        if higher is None:
            return (yield from dense_rounds(acc, unit))
        rows, columns, fewest = higher
        lower = self._factors(unit.shape, levels[0])
        most = fewest if lower is None else lower[2]
        matrix = acc.view(rows, columns)
        q = self._q(matrix, most, unit)
        projected = matrix @ q
        squares = (orthogonalise(projected).t() @ matrix).double().square().sum(dim=1)
        whole = squared_norm(acc) if lower is None else squares.sum()  # a CF of 1 keeps all
        level = yield Decide((whole, squares[:fewest].sum()))
        if level < 0 or levels[level] == 1:
            return (yield from dense_rounds(acc, unit))
        rank = (most, fewest)[level]
        return (yield from self._factorised(matrix, projected[:, :rank].contiguous(), {"q": q[:, rank:]}))

    @staticmethod
    def _factorised(matrix: Tensor, projected: Tensor, unused: dict[str, Tensor]) -> Rounds:
        """The two allreduces; ``unused`` holds columns of Q that a higher rank may want later."""
        p = yield Allreduce(projected)
        p = orthogonalise(p)
        q_own = p.t().contiguous() @ matrix  # Q transposed: the other way round takes three times as long
        q = yield Allreduce(q_own)
        columns = [q.t(), *(left.to(q) for left in unused.values())]
        return LowRank(p, q.t(), q_own.t(), state={"q": torch.cat(columns, dim=1) if unused else q.t()})

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        factors = self._factors(torch.Size(shape))
        if factors is None:
            return [Volume(0, "allreduce", 4 * torch.Size(shape).numel())]
        rows, columns, rank = factors
        return [Volume(0, "allreduce", 4 * rows * rank), Volume(1, "allreduce", 4 * columns * rank)]

    def _factors(self, shape: torch.Size, cf: float | None = None) -> tuple[int, int, int] | None:
        """(n1, n2, rank) of the matrix that a shape stands for, None where it is sent dense."""
        if len(shape) < 2 or shape.numel() == 0 or cf == 1:
            return None
        rows, columns = shape[0], shape.numel() // shape[0]
        wanted = self.rank if cf is None else max(1, int(rows * columns / ((rows + columns) * cf)))
        rank = min(wanted, rows, columns)
        small = (rows + columns) * rank >= rows * columns
        return None if small and self.small_matrix_rule else (rows, columns, rank)

    def _q(self, matrix: Tensor, rank: int, unit: Unit) -> Tensor:
        """Q of the last step, its columns scaled; new ones where it had fewer."""
        q = unit.state.get("q", torch.empty(matrix.shape[1], 0, dtype=torch.float64))[:, :rank]
        if q.shape[1] < rank or not q.any(dim=0).all():  # a column that met zeros only would find nothing ever again
            drawn = self._first_q(matrix.shape[1], rank, unit).to(q)
            q = torch.cat([torch.where(q.any(dim=0), q, drawn[:, : q.shape[1]]), drawn[:, q.shape[1] :]], dim=1)
        q = q.to(matrix)
        return q / q.abs().amax(dim=0)  # the last q is as large as its matrix, whose square may overflow

    def _first_q(self, columns: int, rank: int, unit: Unit) -> Tensor:
        generator = torch.Generator().manual_seed(shared_seed(self.seed, unit.name) >> 1)
        return torch.randn(columns, rank, generator=generator, dtype=torch.float64)
