"""Which tensors a compressor sees as one unit, and which units travel together in a bucket."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from hvdcomp.checks import check_number
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.compressors.requests import Unit
from hvdcomp.feedback import ErrorFeedback

logger = logging.getLogger(__name__)

GRANULARITIES = ("tensor", "bucket", "model")
LARGE = 2**18
"""Bytes from which a dense tensor travels by itself: a copy into a common buffer would cost more than it saves."""
SMALL = 2**20
"""Bytes below which a bucket gains less by an early start than it loses where it misses a cycle of Horovod's."""
MIN_BUCKET_MB = 1e-9
"""Less than a byte: every tensor is a bucket of its own."""
ONE_DIMENSIONAL = "1d"
"""The word in ``exclude`` that stands for all tensors with fewer than two dimensions."""
_SMALLER = re.compile(r"<\s*(\d+)")
"""A rule in ``exclude`` that stands for all tensors with fewer elements than its number."""


@dataclass(frozen=True)
class Spec:
    """A gradient's name and form."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Spec:
        return cls(name, tensor.shape, tensor.dtype, tensor.device)


@dataclass
class Part:
    """A unit: one tensor, or several one after the other in a flat buffer, with its residual."""

    unit: Unit
    members: list[Spec]
    compressor: Compressor
    feedback: ErrorFeedback | None
    sparse: bool = False
    """The gradients are sparse tensors; their rows travel as they are."""
    assigned: bool = False
    """A schedule may put another compressor in this one's place."""

    @property
    def offsets(self) -> list[int]:
        starts = [0]
        for member in self.members[:-1]:
            starts.append(starts[-1] + member.numel)
        return starts

    @property
    def compressed(self) -> bool:
        return not isinstance(self.compressor, NoCompression)

    @property
    def dtype(self) -> torch.dtype:
        """Of what the compressor sees: float32 or float64; a tensor that is not compressed travels as it is."""
        given = self.members[0].dtype
        as_it_is = given == torch.float64 or not (self.compressed or self.compressor.keeps_gradients or self.assigned)
        return given if as_it_is else torch.float32

    @property
    def unscaled(self) -> bool:
        """What the compressor sees comes without a loss scale."""
        return self.feedback is not None or self.compressor.keeps_gradients

    @property
    def feeds_back(self) -> bool:
        """The residual takes part: the compressor wants one, or another has left something in it."""
        return self.feedback is not None and (self.compressor.error_feedback or self.feedback.holds)

    @property
    def residual(self) -> Tensor | None:
        """What is yet to be sent, flat; None where nothing is kept."""
        return (
            self.unit.state.get(self.compressor.residual_state or "")
            if self.feedback is None
            else self.feedback.residual
        )

    def joined(self, gradients: Sequence[tuple[int, Tensor]]) -> Tensor:
        """The unit's flat gradient, of the (offset, flat gradient) of its members; those without one are zero."""
        if len(self.members) == 1 and gradients:
            return gradients[0][1].to(self.dtype)
        if len(gradients) == len(self.members):
            return torch.cat([gradient.to(self.dtype) for _, gradient in gradients])
        whole = torch.zeros(self.unit.numel, dtype=self.dtype, device=self.members[0].device)
        for offset, gradient in gradients:
            whole[offset : offset + gradient.numel()] = gradient
        return whole

    def switch(self, compressor: Compressor) -> None:
        """Go on with another compressor: the residual stays, the state where the new one has use for it."""
        if not compressor.takes_state_of(self.compressor):
            self.unit.state, self.unit.spare = {}, {}
        self.compressor = compressor


@dataclass
class Bucket:
    """Units whose collectives travel together, in the order of their names."""

    index: int
    parts: list[Part] = field(default_factory=list)

    @cached_property
    def members(self) -> list[Spec]:
        return [member for part in self.parts for member in part.members]

    @cached_property
    def small(self) -> bool:
        """Its tensors are better handed to Horovod all at once, as they then share a cycle of its thread."""
        return sum(member.nbytes for member in self.members) < SMALL

    @cached_property
    def plain(self) -> bool:
        """Horovod's allreduce takes each of its gradients as it is."""
        return not any(part.sparse or part.dtype == torch.bfloat16 for part in self.dense_parts)

    @property
    def holds(self) -> bool:
        """Some residual may hold something."""
        return any(part.feedback is not None and part.feedback.holds for part in self.parts)

    @cached_property
    def dense_parts(self) -> list[Part]:
        """Every tensor as plain Horovod would exchange it."""
        sparse = [part for part in self.parts if part.sparse]
        names = {part.unit.name for part in sparse}
        dense = plain_parts(self.index, [spec for spec in self.members if spec.name not in names])
        return sorted([*sparse, *dense], key=lambda part: natural_key(part.unit.name))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "layer.2" before "layer.10", alike in every process; different names ("1" and "01") never tie."""
    pieces = re.split(r"(\d+)", name)
    return (*((1, int(p), "") if p.isdecimal() else (0, 0, p) for p in pieces), (0, 0, name))


def plain_parts(bucket: int, specs: Iterable[Spec]) -> list[Part]:
    """Tensors that travel as they are: large ones by themselves, small ones of one type and device as one."""
    parts: list[Part] = []
    small: dict[tuple[torch.dtype, torch.device], list[Spec]] = {}
    for spec in specs:
        if spec.nbytes >= LARGE:
            parts.append(Part(Unit(spec.name, spec.shape), [spec], NoCompression(), None))
        else:
            small.setdefault((spec.dtype, spec.device), []).append(spec)
    for number, together in enumerate(small.values()):
        unit = Unit(f"bucket.{bucket}.dense.{number}", torch.Size([sum(spec.numel for spec in together)]))
        if len(together) == 1:
            unit = Unit(together[0].name, together[0].shape)
        parts.append(Part(unit, together, NoCompression(), None))
    return parts


def is_excluded(spec: Spec, exclude: Sequence[str]) -> bool:
    """Whether a tensor stays dense: by a glob on its name, by the word "1d", or by its size, such as "<1024"."""
    return any(_matches(spec, rule) for rule in exclude)


def _matches(spec: Spec, rule: str) -> bool:
    if rule == ONE_DIMENSIONAL:
        return len(spec.shape) < 2
    smaller = _SMALLER.fullmatch(rule)
    return spec.numel < int(smaller[1]) if smaller else fnmatch.fnmatchcase(spec.name, rule)


@dataclass(frozen=True)
class Layout:
    """How tensors become units and buckets.

    Args:
        compressor: what compresses the tensors that ``exclude`` does not name.
        settings: the compressors that a schedule may assign to each of them, none if it does not.
        first: index of the one to begin with.
        granularity: "tensor" (the papers'), "bucket" or "model": what the compressor sees as one unit.
        bucket_mb: gradients' size of a bucket in MiB.
        exclude: what stays dense: globs on names, "1d", and sizes such as "<1024" (elements); None is what the
            compressor's paper does, :attr:`Compressor.default_exclude`.

    Raises:
        ValueError: a value is not allowed, or does not fit the compressor.
    """

    compressor: Compressor
    granularity: str = "tensor"
    bucket_mb: float = 25.0
    exclude: Sequence[str] | None = None
    settings: Sequence[Compressor] = ()
    first: int = 0

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {self.granularity!r}")
        for method in self.methods:
            if self.granularity != "tensor" and method.needs_matrices:
                raise ValueError(
                    f"{method.name} works on matrices, so it needs granularity='tensor', got {self.granularity!r}"
                )
        if isinstance(self.exclude, str):
            raise ValueError(
                f"exclude must be a sequence of name globs such as ['*.bias'], got the string {self.exclude!r}"
            )
        if not all(isinstance(rule, str) for rule in self.excluded):
            raise ValueError(f"exclude must be a sequence of name globs such as ['*.bias'], got {self.exclude!r}")
        for rule in self.excluded:
            if rule.startswith("<") and not _SMALLER.fullmatch(rule):
                raise ValueError(
                    f"exclude holds {rule!r}, which is no size: write a number of elements, such as '<1024'"
                )
        check_number("bucket_mb", self.bucket_mb, MIN_BUCKET_MB, hint="MiB of gradients in a bucket")

    @property
    def methods(self) -> Sequence[Compressor]:
        """All that may compress a tensor."""
        return self.settings or (self.compressor,)

    @property
    def compresses(self) -> bool:
        """Some tensor may be compressed."""
        return not all(isinstance(method, NoCompression) for method in self.methods)

    @property
    def excluded(self) -> Sequence[str]:
        """The rules in force; by default those of all methods."""
        if self.exclude is not None:
            return self.exclude
        return tuple(dict.fromkeys(rule for method in self.methods for rule in method.default_exclude))

    def buckets(
        self,
        specs: Iterable[Spec],
        *,
        groups: Sequence[Sequence[str]] | None = None,
        sparse: Iterable[str] = (),
        first_index: int = 0,
    ) -> list[Bucket]:
        """Buckets of tensors in name order.

        Args:
            specs: all tensors.
            groups: names that form a bucket each; a tensor in none of them forms its own.
            sparse: names of tensors whose gradients are sparse.
            first_index: number of the first bucket.
        """
        specs = list(specs)
        for rule in self.excluded if first_index == 0 else ():
            by_name = rule != ONE_DIMENSIONAL and not _SMALLER.fullmatch(rule)
            if by_name and not any(is_excluded(spec, [rule]) for spec in specs):
                logger.warning("exclude: no tensor's name matches %r", rule)
        ordered = sorted(specs, key=lambda spec: natural_key(spec.name))
        grouped = self._grouped(ordered, groups) if groups is not None else self._by_size(ordered)
        sparse_names = frozenset(sparse)
        return [
            Bucket(index, self._parts(index, members, sparse_names))
            for index, members in enumerate(grouped, first_index)
        ]

    def _by_size(self, ordered: list[Spec]) -> list[list[Spec]]:
        limit = float("inf") if self.granularity == "model" else self.bucket_mb * 2**20
        filled: list[list[Spec]] = []
        nbytes = float("inf")
        for spec in ordered:
            if not filled or nbytes + spec.nbytes > limit:
                filled.append([])
                nbytes = 0.0
            filled[-1].append(spec)
            nbytes += spec.nbytes
        return filled

    @staticmethod
    def _grouped(ordered: list[Spec], groups: Sequence[Sequence[str]]) -> list[list[Spec]]:
        by_name = {spec.name: spec for spec in ordered}
        named = [sorted((n for n in group if n in by_name), key=natural_key) for group in groups]
        loose = [[spec.name] for spec in ordered if not any(spec.name in group for group in named)]
        return [[by_name[name] for name in group] for group in [*named, *loose] if group]

    def _parts(self, bucket: int, members: list[Spec], sparse: frozenset[str]) -> list[Part]:
        parts: list[Part] = []
        together: dict[tuple[torch.dtype, torch.device], list[Spec]] = {}
        plain: list[Spec] = []
        for spec in members:
            if spec.name in sparse:
                parts.append(Part(Unit(spec.name, spec.shape), [spec], NoCompression(), None, sparse=True))
            elif is_excluded(spec, self.excluded) or not self.compresses:
                dense = self.compressor.for_excluded()
                if dense is None:
                    plain.append(spec)
                else:
                    parts.append(Part(Unit(spec.name, spec.shape), [spec], dense, None))
            elif self.granularity == "tensor":
                parts.append(self._compressed_part(spec.name, spec.shape, [spec]))
            else:
                together.setdefault((spec.dtype, spec.device), []).append(spec)
        parts += plain_parts(bucket, plain)
        for number, specs in enumerate(together.values()):
            shape = torch.Size([sum(spec.numel for spec in specs)])
            parts.append(self._compressed_part(f"bucket.{bucket}.{number}", shape, specs))
        return sorted(parts, key=lambda part: natural_key(part.unit.name))

    def _compressed_part(self, name: str, shape: torch.Size, members: list[Spec]) -> Part:
        part = Part(Unit(name, shape), members, self.methods[self.first], None, assigned=bool(self.settings))
        if any(method.error_feedback for method in self.methods):
            part.feedback = ErrorFeedback(part.unit.numel, part.dtype, members[0].device)
        return part
