"""What methods that send some of the elements have in common: a compression factor, and GraVAC's two levels of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_choice, check_flag, check_number
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.dense import dense_rounds
from hvdcomp.compressors.requests import Allgather, Decide, Request, Rounds, Sparse, Unit, Volume
from hvdcomp.kernels import Collected, Moments, Tail, among, largest, moments, squared_norm, squares_of_largest, tail
from hvdcomp.wire import VALUE_TYPES, decode_sparse, encode_sparse, expected_sparse_nbytes, largest_sparse_nbytes

_ROUNDING = 1e-12
"""Lets a quotient that is whole on paper (1000 / 2.5 elements) survive its floating point."""


def kept_elements(numel: int, cf: float) -> int:
    """How many of ``numel`` elements a compression factor keeps: max(1, floor(numel / cf)), 0 of none."""
    return min(numel, max(1, int(numel / cf * (1 + _ROUNDING))))


def limited(found: Collected, k: int, most: int, values: Tensor) -> Collected:
    """What a threshold found: the k largest of it where it is more than ``most``, the largest of all where nothing."""
    if found.values.numel() > most:
        return largest(values, k, found)
    return found if found.values.numel() else largest(values, 1)


def moments_of(values: Tensor, unit: Unit, level: int) -> Moments:
    """The moments of what :meth:`Sparsifier.select` is given."""
    known = unit.moments if level == 0 else None
    return moments(values) if known is None else known


def tail_of(values: Tensor, at_least: int, unit: Unit, level: int) -> Tail:
    """``at_least`` or more of the largest elements of what :meth:`Sparsifier.select` is given."""
    known = unit.tail if level == 0 else None
    return tail(values, at_least) if known is None or known.found.values.numel() < at_least else known


def largest_of(values: Tensor, k: int, unit: Unit, level: int) -> Collected:
    """The ``k`` largest elements of what :meth:`Sparsifier.select` is given."""
    known = unit.tail if level == 0 else None
    return largest(values, k, None if known is None or known.found.values.numel() < k else known.found)


class Sparsifier(Compressor):
    """Sends about ``k = max(1, floor(numel / cf))`` elements a unit.

    Under an adaptive schedule both of its levels are selected, the second among what the first kept ("multi-level
    compression", GraVAC, Algorithm 1), and the schedule says which of them is sent, or that all is.
    """

    has_levels: ClassVar[bool] = True
    takes_factors: ClassVar[bool] = True

    def __init__(self, cf: float = 100.0, error_feedback: bool = True) -> None:
        self.cf = check_number("cf", cf, 1, hint="cf is original size / compressed size; for 1 % use cf=100")
        self.error_feedback = check_flag(
            "error_feedback", error_feedback, hint="keep what was not sent for the next step"
        )

    def factor(self, unit: Unit) -> float:
        """The compression factor of this step; under an adaptive schedule the lower of its two."""
        if unit.levels is not None:
            return unit.levels[0]
        return self.cf if unit.cf is None else unit.cf

    def searched(self, k: int) -> int:
        """How many of the largest elements of ``acc`` :meth:`select` looks among for ``k``; 0 if among all."""
        return 0

    def wanted(self, unit: Unit) -> int:
        cf = self.factor(unit)
        return 0 if cf == 1 else self.searched(kept_elements(unit.numel, cf))

    @abstractmethod
    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        """The elements of the 1-D ``values`` that are kept: ``k`` of them, or about so many.

        Args:
            values: all of ``acc`` at level 0, what level 0 kept at level 1.
        """

    @abstractmethod
    def send(self, kept: Collected, acc: Tensor, unit: Unit) -> Rounds:
        """The rounds that send the chosen elements of ``acc``."""

    @abstractmethod
    def sparse_requests(self, kept: int, workers: int) -> list[Volume]:
        """What :meth:`send` asks for with ``kept`` float32 elements."""

    def expected_sparse_requests(self, kept: int, numel: int, workers: int) -> list[Volume]:
        """The same of ``numel`` elements, where positions take less than their bound."""
        return self.sparse_requests(kept, workers)

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        if unit.levels is not None:
            return (yield from self._decided_rounds(acc, unit, unit.levels))
        cf = self.factor(unit)
        if cf == 1 or acc.numel() == 0:
            return (yield from dense_rounds(acc, unit))
        kept = self.select(acc, kept_elements(acc.numel(), cf), unit, level=0)
        return (yield from self.send(kept, acc, unit))

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        numel = torch.Size(shape).numel()
        if self.cf == 1 or numel == 0:
            return [Volume(0, "allreduce", 4 * numel)]
        return self.sparse_requests(kept_elements(numel, self.cf), workers)

    def expected_requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        numel = torch.Size(shape).numel()
        if self.cf == 1 or numel == 0:
            return self.requests(shape, workers)
        return self.expected_sparse_requests(kept_elements(numel, self.cf), numel, workers)

    def _decided_rounds(self, acc: Tensor, unit: Unit, levels: tuple[float, float]) -> Rounds:
        kept = yield from self._choose(acc, unit, levels)
        if kept is None or acc.numel() == 0:
            return (yield from dense_rounds(acc, unit))
        return (yield from self.send(kept, acc, unit))

    def _choose(
        self, acc: Tensor, unit: Unit, levels: tuple[float, float]
    ) -> Generator[Request, Any, Collected | None]:
        """The elements that the schedule chose to send, None for all of them."""
        lowest, candidate = levels
        first = self.select(acc, kept_elements(acc.numel(), lowest), unit, level=0)
        first_sq = squared_norm(first.values)
        second, second_sq = first, first_sq
        if candidate != lowest:
            k = kept_elements(first.values.numel(), candidate / lowest)
            second = among(first, self.select(first.values, k, unit, level=1))
            second_sq = squared_norm(second.values)
        level = yield Decide((first_sq, second_sq))
        chosen = {-1: None, 0: first, 1: second}[level]
        return None if levels[level] == 1 else chosen

    def estimated_squares(self, acc: Tensor, counts: Sequence[int]) -> list[float]:
        """About what the squares of the elements that are kept add up to, for each number of them."""
        return squares_of_largest(acc, counts)


class GatheredSparsifier(Sparsifier):
    """A sparsifier whose workers choose different elements, so that values and positions travel by allgather.

    Args:
        cf: compression factor >= 1 by the papers' definition, original floats / sent floats; 1 sends all, by allreduce.
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays behind.
        error_feedback: keep what was not sent for the next step.
    """

    collective: ClassVar[str] = "allgather"

    def __init__(self, cf: float = 100.0, values: str = "fp32", error_feedback: bool = True) -> None:
        super().__init__(cf, error_feedback)
        self.values = check_choice("type of values", values, VALUE_TYPES)

    def send(self, kept: Collected, acc: Tensor, unit: Unit) -> Rounds:
        payloads = yield Allgather(encode_sparse(kept.positions, kept.values, unit.numel, self.wire_type))
        received = [decode_sparse(payload, unit.numel) for payload in payloads]
        return Sparse(received, unit.worker, exact=self.wire_type == "fp32")

    def sparse_requests(self, kept: int, workers: int) -> list[Volume]:
        return [Volume(0, "allgather", largest_sparse_nbytes(self.most(kept), self.wire_type))]

    def expected_sparse_requests(self, kept: int, numel: int, workers: int) -> list[Volume]:
        return [Volume(0, "allgather", expected_sparse_nbytes(kept, numel, self.wire_type))]

    @property
    def wire_type(self) -> str:
        """What the values travel as."""
        return self.values

    def most(self, k: int) -> int:
        """The largest number of elements that is sent where ``k`` are wanted."""
        return k

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        flat = tensor.detach().reshape(-1)
        flat = flat if flat.dtype.itemsize >= 4 else flat.float()
        kept = self.select(flat, kept_elements(flat.numel(), self.cf), Unit("", tensor.shape), level=0)
        payload = encode_sparse(kept.positions, kept.values, flat.numel(), self.wire_type)
        return payload, (tensor.shape, tensor.dtype)

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        shape, dtype = ctx
        kept = decode_sparse(payload, shape.numel())
        dense = kept.values.new_zeros(shape.numel())
        dense.index_copy_(0, kept.positions.long(), kept.values)
        return dense.view(shape).to(dtype)


class ThresholdSparsifier(GatheredSparsifier):
    """A sparsifier that estimates a threshold: about k elements are sent, and k where it would be 2k or more."""

    def most(self, k: int) -> int:
        return max(1, 2 * k - 1)
