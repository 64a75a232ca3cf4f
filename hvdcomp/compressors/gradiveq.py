"""GradiVeQ: slices of the gradient travel as their coordinates in a basis that was learnt from earlier gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_count, check_flag
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.dense import dense_rounds
from hvdcomp.compressors.requests import Allreduce, Broadcast, Dense, Reduced, Rounds, Unit, Volume

_SQUARABLE = 1e150
"""Beyond it a float64 has no finite square."""


class GradiVeQ(Compressor):
    """A gradient is cut into slices, of which the ``components`` largest principal components travel, by allreduce.

    For ``training_steps`` it travels dense, and the second moments of the mean gradient's slices are summed up. Then
    worker 0 takes their principal components and broadcasts them, so that all have the same, and for
    ``quantised_steps`` only the slices' coordinates in them travel. That is linear, so that the mean of the coordinates
    is that of the mean gradient. Then it is trained anew. A skipped step counts as none.

    Components are taken about zero, not about the slices' mean, so that a zero gradient remains zero. A tensor has one
    basis for all its slices, which are cut from its elements in their order in memory, the last one filled with zeros.
    Tensors whose coordinates would be no fewer than their elements stay dense.

    Args:
        slice_size: elements of a slice, >= 1 (the paper's M).
        components: of a slice that travel, 1 <= components <= slice_size (the paper's d).
        training_steps: dense steps from which a basis is learnt, >= 1 (the paper's L_t).
        quantised_steps: steps for which a basis serves, >= 1 (the paper's L_q).
        error_feedback: keep what was not sent for the next step.
    """

    name: ClassVar[str] = "gradiveq"
    collective: ClassVar[str] = "allreduce"
    source: ClassVar[str] = "Yu et al. 2018"

    def __init__(
        self,
        slice_size: int = 256,
        components: int = 32,
        training_steps: int = 100,
        quantised_steps: int = 400,
        error_feedback: bool = True,
    ) -> None:
        self.slice_size = check_count("slice_size", slice_size, hint="elements of a slice; the paper's M")
        self.components = check_count("components", components, hint="of a slice that travel; the paper's d")
        if components > slice_size:
            raise ValueError(f"components must be <= slice_size, got {components} of {slice_size} (1/8 of it is usual)")
        self.training_steps = check_count("training_steps", training_steps, hint="dense steps before a basis is learnt")
        self.quantised_steps = check_count("quantised_steps", quantised_steps, hint="steps for which a basis serves")
        self.error_feedback = check_flag(
            "error_feedback", error_feedback, hint="keep what was not sent for the next step"
        )

    def takes_state_of(self, before: Compressor) -> bool:
        """A basis has the size of its slices."""
        return self == before

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        if not self._compresses(unit.numel):
            return (yield from dense_rounds(acc, unit))
        if "basis" not in unit.state:
            return (yield from self._train(acc, unit))
        basis = unit.state["basis"].to(acc)
        own = self._slices(acc) @ basis
        mean = yield Allreduce(own)
        left = unit.state["left"] - 1
        return Coordinates(mean, own, basis, {"basis": unit.state["basis"], "left": left} if left > 0 else {})

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        """Those of a quantised step. A step of training sends the whole tensor, and the last of them the basis too."""
        numel = torch.Size(shape).numel()
        return [Volume(0, "allreduce", 4 * (self._coordinates(numel) if self._compresses(numel) else numel))]

    def _train(self, acc: Tensor, unit: Unit) -> Rounds:
        """A dense step; after the last of them the state is a basis, before that it is the moments so far."""
        mean = yield Allreduce(acc)
        slices = self._slices(mean.view(-1)).double().clamp(-_SQUARABLE, _SQUARABLE)
        moments = slices.t() @ slices
        left = torch.tensor(self.training_steps - 1)
        if "moments" in unit.state:
            moments, left = unit.state["moments"] + moments, unit.state["left"] - 1
        outcome = Dense(mean)
        outcome.state = {"moments": moments, "left": left}
        if left == 0:
            basis = moments.new_zeros(self.slice_size, self.components)
            if unit.worker == 0:
                basis = principal_components(moments, self.components)
            received = yield Broadcast(basis.to(acc).contiguous().view(torch.int32), root=0)
            outcome.state = {"basis": received.view(acc.dtype), "left": torch.tensor(self.quantised_steps)}
        return outcome

    def _slices(self, flat: Tensor) -> Tensor:
        """(slices, slice_size), filled up with zeros."""
        return torch.nn.functional.pad(flat, (0, -flat.numel() % self.slice_size)).view(-1, self.slice_size)

    def _coordinates(self, numel: int) -> int:
        return -(-numel // self.slice_size) * self.components

    def _compresses(self, numel: int) -> bool:
        return self._coordinates(numel) < numel


def principal_components(moments: Tensor, count: int) -> Tensor:
    """(m, count) orthonormal columns, the eigenvectors of the largest eigenvalues of a symmetric (m, m), largest first.

    They are finite whatever ``moments`` holds.
    """
    finite = moments.nan_to_num()
    peak = finite.abs().max()
    return torch.linalg.eigh(finite / torch.where(peak > 0, peak, 1)).eigenvectors[:, -count:].flip(1)


@dataclass
class Coordinates(Reduced):
    """The mean of all workers' coordinates in a basis, and this worker's own, one slice a row."""

    mean: Tensor
    own: Tensor
    basis: Tensor
    state: dict[str, Tensor] | None = None

    def write_mean_(self, out: Tensor) -> None:
        self._add_(out.zero_(), self.mean, 1)

    def settle_(self, acc: Tensor) -> None:
        self._add_(acc, self.own, -1)

    def finite(self) -> bool:
        return bool(torch.isfinite(self.mean).all())

    def _add_(self, out: Tensor, coordinates: Tensor, weight: float) -> None:
        size = self.basis.shape[0]
        whole = out.numel() // size
        out[: whole * size].view(whole, size).addmm_(coordinates[:whole], self.basis.t(), alpha=weight)
        rest = out[whole * size :]
        if rest.numel():
            rest.add_((self.basis @ coordinates[whole])[: rest.numel()], alpha=weight)
