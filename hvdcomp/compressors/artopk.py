"""AR-Topk: one worker chooses the elements, all send theirs there by allreduce."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_choice
from hvdcomp.compressors.requests import Allgather, Allreduce, Broadcast, Rounds, SharedSparse, Unit, Volume
from hvdcomp.compressors.sparsifier import Sparsifier, largest_of
from hvdcomp.errors import WireError
from hvdcomp.kernels import Collected, ascending_below, squared_norm
from hvdcomp.wire import check_indexable

SELECTIONS = ("star", "var")


class ARTopK(Sparsifier):
    """One worker's k largest elements are sent by all: its positions by broadcast, then everyone's values by allreduce.

    It scales with workers as allreduce does. k = max(1, floor(numel / cf)).

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all.
        selection: whose elements: "star", worker (step modulo workers); "var", the one whose k largest have the largest
            norm, which a first allgather of 8 bytes tells.
        error_feedback: keep what was not sent for the next step; without it, it is lost.
    """

    name: ClassVar[str] = "artopk"
    collective: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Tyagi and Swany 2023 (STAR-Topk and VAR-Topk)"

    def __init__(self, cf: float = 100.0, selection: str = "star", error_feedback: bool = True) -> None:
        super().__init__(cf, error_feedback)
        self.selection = check_choice("selection of artopk", selection, SELECTIONS)

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        return largest_of(values, k, unit, level)

    def searched(self, k: int) -> int:
        return k

    def send(self, kept: Collected, acc: Tensor, unit: Unit) -> Rounds:
        check_indexable(unit.numel)
        root = unit.step % unit.workers
        if self.selection == "var":
            norms = yield Allgather(squared_norm(kept.values).view(1).view(torch.uint8))
            root = largest_norm(norms)
        positions = yield Broadcast(kept.positions, root)
        if not ascending_below(positions, unit.numel):
            raise WireError(f"indices are not ascending within [0, {unit.numel})")
        mean = yield Allreduce(acc[positions])
        return SharedSparse(positions.long(), mean)  # the largest are no random sample: a factor would not unbias them

    def sparse_requests(self, kept: int, workers: int) -> list[Volume]:
        norms = [Volume(0, "allgather", 8)] if self.selection == "var" else []
        first = len(norms)
        return [*norms, Volume(first, "broadcast", 4 * kept), Volume(first + 1, "allreduce", 4 * kept)]


def largest_norm(payloads: list[Tensor]) -> int:
    """The worker with the largest norm, the first of several; a norm that is not finite counts as zero."""
    if any(payload.numel() != 8 for payload in payloads):
        raise WireError(f"norms of {[payload.numel() for payload in payloads]} bytes, expected 8 from every worker")
    norms = torch.cat([payload.clone().view(torch.float64) for payload in payloads])
    return int(norms.nan_to_num(0.0, 0.0, 0.0).argmax())
