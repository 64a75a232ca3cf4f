"""Top-k: the elements of largest magnitude."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hvdcomp.compressors.requests import Unit
from hvdcomp.compressors.sparsifier import GatheredSparsifier, kept_elements
from hvdcomp.kernels import Collected, largest


class TopK(GatheredSparsifier):
    """Exactly k = max(1, floor(numel / cf)) elements by magnitude travel, values and positions, by allgather."""

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "Aji and Heafield 2017; Stich et al. 2018 (with memory)"

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        return largest(values, k, unit.candidates if level == 0 else None)

    def wanted(self, unit: Unit) -> int:
        cf = self.factor(unit)
        return 0 if cf == 1 else kept_elements(unit.numel, cf)
