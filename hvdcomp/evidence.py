"""What rank 0 gathers of its own gradients for a schedule that assigns settings to units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdcomp.buckets import Part
from hvdcomp.kernels import squared_norm
from hvdcomp.schedules.assigning import Echo, Overlap, Sums

BLOCK = 64
"""Contiguous elements of a sample: what memory delivers is used."""
SMALL = 4096
"""Units of up to so many elements are sampled whole, and no sample is smaller."""
SHARE = 100
"""A large unit's elements for one that is sampled."""


def sample_blocks(numel: int) -> int | None:
    """Blocks in the sample of so many elements, None where it holds all."""
    return None if numel <= SMALL else max(SMALL, numel // SHARE) // BLOCK


class SampledSum:
    """A sum of flat vectors of one length, kept at a fixed sample of their positions.

    The sample holds everything of up to `SMALL` elements; else blocks of `BLOCK`, one at a pseudo-random place in each
    of as many stretches of equal length, since a fixed stride would meet the same columns of a matrix again and again.

    Args:
        numel: elements of the vectors.
    """

    def __init__(self, numel: int, device: torch.device | str = "cpu") -> None:
        self.numel = numel
        self._blocks: Tensor | None = None
        count = sample_blocks(numel)
        if count is not None:
            stretch = numel // BLOCK / count
            places = torch.rand(count, generator=torch.Generator().manual_seed(numel), dtype=torch.float64)
            self._blocks = ((torch.arange(count) + places) * stretch).long().to(device)
        self.total = torch.zeros(numel if count is None else BLOCK * count, device=device)
        """The sum at the sample."""

    def of(self, vector: Tensor) -> Tensor:
        """The elements of a vector that the sample holds, as a copy in float32."""
        if self._blocks is None:
            return vector.to(torch.float32, copy=True)
        whole = vector[: self.numel // BLOCK * BLOCK].view(-1, BLOCK)
        return whole.index_select(0, self._blocks).view(-1).float()


@dataclass
class _Watched:
    """One unit's sums, and what the step under way adds to them."""

    part: Part
    total: Tensor | None
    sampled: SampledSum | None
    added: list[tuple[int, Tensor, float]]
    """(offset, flat gradient, factor) that `total` holds, to be taken out again if the step is skipped."""
    newest: Tensor | None = None
    """The step's own sample."""
    last: Tensor | None = None
    """The last step's, and what of it and of the residual was sent."""
    sent: Tensor | None = None
    held: Tensor | None = None
    """The residual after it."""


class Watch:
    """Adds up rank 0's gradients over a phase, unit by unit.

    What a skipped step added is taken out again, up to one rounding; what is not finite never enters.
    """

    def __init__(self, *, sums: bool, overlaps: bool, echoes: bool = False) -> None:
        self.sums, self.overlaps, self.echoes = sums, overlaps, echoes
        self.echo: Echo | None = None
        """Of the newest step, None where the one before was skipped or there was none."""
        self.steps = 0
        """Steps of the phase so far."""
        self._units: dict[str, _Watched] = {}

    @property
    def wanted(self) -> bool:
        """There is something to watch."""
        return self.sums or self.overlaps or self.echoes

    def nbytes(self, parts: Sequence[Part]) -> int:
        """Memory that the sums of these units take."""
        sizes = [(part.unit.numel, part.dtype.itemsize, sample_blocks(part.unit.numel)) for part in parts]
        sums = sum(numel * itemsize for numel, itemsize, _ in sizes) if self.sums else 0
        sample = sum(4 * (n if b is None else BLOCK * b) for n, _, b in sizes)
        return sums + sample * (self.overlaps or self.echoes) + 3 * sample * self.echoes

    def see(self, part: Part, gradients: Sequence[tuple[int, Tensor]], factor: float) -> None:
        """Add a step's gradients of one unit, all together or one after the other.

        Args:
            gradients: (offset, flat gradient) of each member that has one.
            factor: times each gradient, which takes out its loss scale.
        """
        if not self.wanted:
            return
        unit = self._of(part)
        if unit.total is not None:
            for offset, gradient in gradients:
                if math.isfinite(float(squared_norm(gradient))):
                    unit.total[offset : offset + gradient.numel()].add_(gradient, alpha=factor)
                    unit.added.append((offset, gradient, factor))
        if unit.sampled is not None:
            newest = unit.sampled.of(part.joined(gradients)) * factor
            if bool(torch.isfinite(newest).all()):
                unit.newest = newest if unit.newest is None else unit.newest + newest

    def keep(self) -> None:
        """The step was made."""
        self.steps += 1
        pairs = [pair for unit in self._units.values() if self.echoes and (pair := _heard(unit)) is not None]
        self.echo = Echo(sum(sent for sent, _ in pairs), sum(gradient for _, gradient in pairs)) if pairs else None
        for unit in self._units.values():
            if unit.sampled is not None and unit.newest is not None and self.overlaps:
                unit.sampled.total += unit.newest
            unit.added, unit.newest = [], None

    def undo(self) -> None:
        """The step was skipped."""
        for unit in self._units.values():
            for offset, gradient, factor in unit.added if unit.total is not None else ():
                unit.total[offset : offset + gradient.numel()].sub_(gradient, alpha=factor)  # type: ignore[index]
            unit.added, unit.newest = [], None
        self.echo = None

    def end_phase(self, parts: Sequence[Part]) -> tuple[int, tuple[Sums, ...], tuple[Overlap, ...]]:
        """The phase's steps, and sums and overlaps of these units; all sums begin anew."""
        watched = [self._of(part) for part in parts] if self.sums or self.overlaps else []
        sums = tuple(_sums(unit.total) for unit in watched if unit.total is not None)
        sampled = [(unit.part, unit.sampled) for unit in watched if self.overlaps and unit.sampled is not None]
        overlaps = tuple(_overlap(part, sample) for part, sample in sampled)
        steps, self.steps = self.steps, 0
        for unit in self._units.values():
            if unit.total is not None:
                unit.total.zero_()
            if unit.sampled is not None:
                unit.sampled.total.zero_()
        return steps, sums, overlaps

    def state_dict(self) -> dict[str, Any]:
        """The phase so far."""
        return {
            "steps": self.steps,
            "sums": {n: u.total.clone() for n, u in self._units.items() if u.total is not None},
            "samples": {n: u.sampled.total.clone() for n, u in self._units.items() if u.sampled is not None},
            "echoes": {n: (u.last, u.sent, u.held) for n, u in self._units.items() if u.last is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any], parts: Sequence[Part]) -> None:
        """Go on from :meth:`state_dict`; what it does not mention starts from zero."""
        self.steps = state["steps"]
        self._units.clear()
        for part in parts:
            unit, name = self._of(part), part.unit.name
            if unit.total is not None and name in state["sums"]:
                unit.total.copy_(state["sums"][name])
            if unit.sampled is not None and name in state["samples"]:
                unit.sampled.total.copy_(state["samples"][name])
            if self.echoes and name in state["echoes"]:
                device = part.members[0].device
                unit.last, unit.sent, unit.held = (
                    None if kept is None else kept.to(device) for kept in state["echoes"][name]
                )

    def _of(self, part: Part) -> _Watched:
        found = self._units.get(part.unit.name)
        if found is None:
            numel, device = part.unit.numel, part.members[0].device
            total = torch.zeros(numel, dtype=part.dtype, device=device) if self.sums else None
            sampled = self.overlaps or self.echoes
            found = _Watched(part, total, SampledSum(numel, device) if sampled else None, [])
            self._units[part.unit.name] = found
        return found


def _heard(unit: _Watched) -> tuple[float, float] | None:
    """What the last step sent, and its gradient, against the newest gradient, which takes the last one's place."""
    newest, kept = unit.newest, unit.part.residual
    if newest is None or unit.sampled is None:
        unit.last = None
        return None
    held = torch.zeros_like(newest) if kept is None else unit.sampled.of(kept)
    heard = None
    if unit.last is not None and unit.sent is not None:
        heard = float(unit.sent @ newest), float(unit.last @ newest)
    before = torch.zeros_like(held) if unit.held is None else unit.held
    unit.last, unit.sent, unit.held = newest, newest + before - held, held
    return heard


def _sums(total: Tensor) -> Sums:
    return Sums(float(total.sum(dtype=torch.float64)), float(squared_norm(total)))


def _overlap(part: Part, sampled: SampledSum) -> Overlap:
    kept = part.residual
    total = sampled.total.double()
    residual = torch.zeros_like(total) if kept is None else sampled.of(kept).double()
    return Overlap(float(residual @ total), float(total @ total), float(residual @ residual))
