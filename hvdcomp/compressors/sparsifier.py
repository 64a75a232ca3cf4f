"""What methods that send some of the elements have in common: a compression factor, and GraVAC's two levels of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_flag, check_number
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.dense import dense_rounds
from hvdcomp.compressors.requests import Decide, Request, Rounds, Unit, Volume
from hvdcomp.kernels import squared_norm

_ROUNDING = 1e-12
"""Lets a quotient that is whole on paper (1000 / 2.5 elements) survive its floating point."""


def kept_elements(numel: int, cf: float) -> int:
    """How many of ``numel`` elements a compression factor keeps: max(1, floor(numel / cf)), 0 of none."""
    return min(numel, max(1, int(numel / cf * (1 + _ROUNDING))))


class Sparsifier(Compressor):
    """Sends ``k = max(1, floor(numel / cf))`` elements a unit.

    Under an adaptive schedule both of its levels are selected, the second among what the first kept ("multi-level
    compression", GraVAC, Algorithm 1), and the schedule says which of them is sent, or that all is.
    """

    has_levels: ClassVar[bool] = True

    def __init__(self, cf: float = 100.0, error_feedback: bool = True) -> None:
        self.cf = check_number("cf", cf, 1, hint="cf is original size / compressed size; for 1 % use cf=100")
        self.error_feedback = check_flag(
            "error_feedback", error_feedback, hint="keep what was not sent for the next step"
        )

    @abstractmethod
    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Tensor:
        """Ascending int64 positions of the ``k`` elements of the 1-D ``values`` that are kept."""

    @abstractmethod
    def send(self, acc: Tensor, indices: Tensor, unit: Unit) -> Rounds:
        """The rounds that send the chosen elements of ``acc``."""

    @abstractmethod
    def sparse_requests(self, kept: int) -> list[Volume]:
        """What :meth:`send` asks for with ``kept`` float32 elements."""

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        if unit.levels is not None:
            return (yield from self._decided_rounds(acc, unit, unit.levels))
        if self.cf == 1 or acc.numel() == 0:
            return (yield from dense_rounds(acc, unit))
        kept = self.select(acc, kept_elements(acc.numel(), self.cf), unit, level=0)
        return (yield from self.send(acc, kept, unit))

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        numel = torch.Size(shape).numel()
        if self.cf == 1 or numel == 0:
            return [Volume(0, "allreduce", 4 * numel)]
        return self.sparse_requests(kept_elements(numel, self.cf))

    def _decided_rounds(self, acc: Tensor, unit: Unit, levels: tuple[float, float]) -> Rounds:
        kept = yield from self._choose(acc, unit, levels)
        if kept is None or acc.numel() == 0:
            return (yield from dense_rounds(acc, unit))
        return (yield from self.send(acc, kept, unit))

    def _choose(self, acc: Tensor, unit: Unit, levels: tuple[float, float]) -> Generator[Request, Any, Tensor | None]:
        """The indices that the schedule chose to send, None for all of them."""
        lowest, candidate = levels
        first = self.select(acc, kept_elements(acc.numel(), lowest), unit, level=0)
        first_values = acc[first]
        first_sq = squared_norm(first_values)
        second, second_sq = first, first_sq
        if candidate != lowest:
            among = self.select(first_values, kept_elements(first.numel(), candidate / lowest), unit, level=1)
            second, second_sq = first[among], squared_norm(first_values[among])
        level = yield Decide((first_sq, second_sq))
        chosen = {-1: None, 0: first, 1: second}[level]
        return None if levels[level] == 1 else chosen

    def _outcome_scale(self, unit: Unit, kept: int) -> float:
        """Unsent elements are made up for by the residual, or, without one, by scaling what is sent."""
        return 1.0 if self.error_feedback else unit.numel / kept
