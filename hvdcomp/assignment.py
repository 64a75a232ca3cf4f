"""Puts into force, on every worker at the same step, what a schedule on rank 0 assigns to each unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdcomp.buckets import Bucket, Part, Spec
from hvdcomp.checks import check_choice
from hvdcomp.compressors import Compressor, create
from hvdcomp.coordinator import Channel
from hvdcomp.evidence import Watch
from hvdcomp.rounds import BucketRun, Gradients
from hvdcomp.schedules import Assigning, Evidence, Setting, UnitForm


@dataclass(frozen=True)
class Told:
    """What the caller has told of a step; nan where nothing."""

    lr: float = math.nan
    next_lr: float = math.nan
    loss: float = math.nan


def compressors_of(schedule: Assigning, own: Compressor) -> tuple[Compressor, ...]:
    """The compressor that each of the schedule's settings stands for, where ``own`` is the user's.

    Raises:
        ValueError: a setting is none, or two cannot take each other's place in a run.
    """
    schedule.suit(own)
    made = tuple(_compressor_of(setting, own, schedule.name) for setting in schedule.settings)
    if not made:
        raise ValueError(f"schedule {schedule.name!r} has no settings to assign: give it at least one")
    keeper = next((method for method in (own, *made) if _remembers(method)), own)
    for method in (own, *made) if _remembers(keeper) else ():
        if type(method) is not type(keeper) or not _remembers(method):
            raise ValueError(
                f"schedule {schedule.name!r} cannot switch between {keeper!r} and {method!r}: {keeper.name} keeps "
                "momentum, which the other would neither go on with nor send; assign factors of it only, or take a "
                "method without momentum of its own (dgc: correction=False)"
            )
    return made


def _remembers(method: Compressor) -> bool:
    """It keeps gradients of its own, beside the residual that all methods share."""
    return method.keeps_gradients and not method.error_feedback


def _compressor_of(setting: Setting, own: Compressor, schedule: str) -> Compressor:
    parameters = dict(setting)
    name = parameters.pop("name", None)
    if name is not None:
        return create(str(name), **parameters)
    for parameter in parameters:
        check_choice(f"parameter of compression {own.name!r} in a setting of {schedule!r}", parameter, own.parameters())
    return own.with_parameters(**parameters)


class Assignment:
    """One worker's part of what a schedule assigns.

    Args:
        schedule: the root's decides; the others' say what can be assigned.
        compressors: of its settings, by :func:`compressors_of`.
        channel: brings the root's answer to every worker.
        buckets: of this worker; units may join them later.
    """

    def __init__(
        self, schedule: Assigning, compressors: Sequence[Compressor], channel: Channel, buckets: list[Bucket]
    ) -> None:
        self.schedule = schedule
        self._compressors = compressors
        self._channel = channel
        self._buckets = buckets
        self._index: dict[str, int] = {}
        self._known = 0
        self._places: dict[str, tuple[Part, int]] = {}
        self._placed = 0
        """Buckets whose members' places are known."""
        self.watch = Watch(
            sums=channel.root and schedule.wants_sums,
            overlaps=channel.root and schedule.wants_overlaps,
            echoes=channel.root and schedule.wants_echo,
        )

    @property
    def parts(self) -> list[Part]:
        """The units that settings are assigned to, in an order that is alike on all workers."""
        return [part for bucket in self._buckets for part in bucket.parts if part.assigned]

    @property
    def indices(self) -> dict[str, int]:
        """Which of the settings each unit has."""
        return {part.unit.name: self._index_of(part) for part in self.parts}

    @property
    def cf(self) -> float | None:
        """The compression factor of all units' elements together, dense ones included; None where one has no factor."""
        factors = [getattr(part.compressor, "cf", None) if part.compressed else 1.0 for part in self.parts]
        known = [cf for cf in factors if cf is not None]
        if len(known) < len(factors) or not known:
            return None
        if len(set(known)) == 1:
            return known[0]
        numel = [part.unit.numel for part in self.parts]
        return sum(numel) / sum(n / cf for n, cf in zip(numel, known, strict=True)) if any(numel) else 1.0

    @property
    def nbytes(self) -> int:
        """Memory that sums of gradients take on this worker."""
        return self.watch.nbytes(self.parts)

    def see(self, run: BucketRun) -> None:
        """Take note of a bucket's gradients, as its step begins."""
        if self._gathers:
            for part in run.bucket.parts:
                if part.assigned:
                    self.watch.see(part, run.flat_gradients(part), 1 / run.context.scale)

    def see_plain(self, spec: Spec, gradients: Gradients, scale: float) -> None:
        """Take note of the gradient of one tensor, which its mean is about to be written over."""
        if self._gathers:
            part, offset = self._place_of(spec.name)
            gradient = gradients.read(spec)
            if part is not None and gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self.watch.see(part, [(offset, dense.reshape(-1))], 1 / scale)

    def _place_of(self, name: str) -> tuple[Part | None, int]:
        """The unit that a tensor is a member of, and where in it; no unit where no setting is assigned to it."""
        if self._placed != len(self._buckets):
            self._placed = len(self._buckets)
            for part in self.parts:
                for offset, member in zip(part.offsets, part.members, strict=True):
                    self._places[member.name] = part, offset
        return self._places.get(name, (None, 0))

    def is_plain(self, dense: bool) -> bool:
        """The coming step compresses nothing, sends no residual, and so is not skipped for a NaN, as in plain Horovod.

        Args:
            dense: it is dense by the honest switch.
        """
        return all(bucket.plain and not bucket.holds for bucket in self._buckets) and (
            dense or not any(part.compressed for bucket in self._buckets for part in bucket.parts)
        )

    def settle(self, skipped: bool) -> None:
        """The step was made, or skipped by all workers."""
        if self._gathers:
            self.watch.undo() if skipped else self.watch.keep()

    def ask(self, evidence: Evidence) -> tuple[Evidence | None, dict[str, Setting]]:
        """Hear of the next step's assignment, and put it in force; every worker, after each step that was made.

        Returns:
            The evidence as the schedule saw it, on the root only, and the units that change, with their new settings.

        Raises:
            Exception: the schedule's own, on the root; a RuntimeError on the others then.
        """
        parts = self.parts
        vector = np.full(1 + len(parts), np.nan)
        fault, seen = None, None
        if self._channel.root:
            try:
                seen = self._evidence(evidence, parts)
                vector[1:] = self._checked(self.schedule.assign(seen), len(parts))
                vector[0] = 0.0
            except Exception as error:
                fault = error
        vector = self._channel.from_root(vector)
        if fault is not None:
            raise fault
        if np.isnan(vector[0]):
            raise RuntimeError(f"schedule {self.schedule.name!r} failed on worker 0, which decides; see its traceback")
        return seen, self._assign(dict(zip((part.unit.name for part in parts), vector[1:].astype(int), strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """The settings in force by unit, and on the root the phase so far."""
        return {"indices": self.indices, "watch": self.watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, before residuals and compressors' states are put into place."""
        self._assign({name: index for name, index in state["indices"].items() if index < len(self._compressors)})
        self.watch.load_state_dict(state["watch"], self.parts)

    def _evidence(self, evidence: Evidence, parts: Sequence[Part]) -> Evidence:
        if len(parts) != self._known:
            self.schedule.prepare_units([UnitForm(part.unit.name, tuple(part.unit.shape)) for part in parts])
            self._known = len(parts)
        evidence = replace(evidence, echo=self.watch.echo)
        if not self.schedule.ends_phase():
            return evidence
        steps, sums, overlaps = self.watch.end_phase(parts)
        return replace(evidence, phase_steps=steps, sums=sums, overlaps=overlaps)

    def _checked(self, indices: Sequence[int], expected: int) -> Sequence[int]:
        allowed = range(len(self._compressors))
        if len(indices) != expected or any(index not in allowed for index in indices):
            raise ValueError(
                f"schedule {self.schedule.name!r} must assign each of {expected} units an index below "
                f"{len(self._compressors)}, got {list(indices)!r:.200}"
            )
        return indices

    @property
    def _gathers(self) -> bool:
        return self._channel.root and self.watch.wanted and self.schedule.gathers

    def _index_of(self, part: Part) -> int:
        return self._index.get(part.unit.name, self.schedule.first)

    def _assign(self, indices: Mapping[str, int]) -> dict[str, Setting]:
        changed: dict[str, Setting] = {}
        for part in self.parts:
            index = int(indices.get(part.unit.name, self._index_of(part)))
            if index != self._index_of(part):
                self._index[part.unit.name] = index
                part.switch(self._compressors[index])
                changed[part.unit.name] = dict(self.schedule.settings[index])
        return changed


__all__ = ["Assignment", "Told", "compressors_of"]
