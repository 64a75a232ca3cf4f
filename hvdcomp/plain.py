"""Dense means as plain Horovod makes them: a collective a tensor, in place, as soon as its gradient is ready."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvdcomp.buckets import Spec
from hvdcomp.rounds import Fused, Gradients


class PlainMeans:
    """One step's tensors that nothing is to be done to but to average them.

    Args:
        start: begins a collective of that name; the returned call waits for its result.
        label: prefix of the names.
        workers: that the mean is over.
    """

    def __init__(self, start: Callable[[Fused, str], Callable[[], Tensor]], label: str, workers: int) -> None:
        self._start = start
        self._label = label
        self._workers = workers
        self._flights: dict[str, tuple[Spec, Fused, Callable[[], Tensor], Gradients | None]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the tensor of that name is under way."""
        return name in self._flights

    def __bool__(self) -> bool:
        return bool(self._flights)

    def start(self, spec: Spec, gradients: Gradients) -> None:
        """Begin a tensor's mean, without waiting for anybody; a missing gradient is zero."""
        gradient = gradients.read(spec)
        written: Gradients | None = None  # what travels is the gradient itself
        if gradient is None:
            gradient, written = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device), gradients
        elif gradient.dtype != spec.dtype or gradient.is_sparse or not gradient.is_contiguous():
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            gradient, written = dense.to(spec.dtype).contiguous(), gradients
        fused = Fused("allreduce", gradient, [0], owned=True)
        self._flights[spec.name] = spec, fused, self._start(fused, f"{self._label}.{spec.name}"), written

    @property
    def fused(self) -> list[Fused]:
        """The collectives under way."""
        return [fused for _, fused, _, _ in self._flights.values()]

    @property
    def sent(self) -> list[tuple[list[Spec], int]]:
        """The tensors under way, and their bytes."""
        return [([spec], fused.buffer.nbytes) for spec, fused, _, _ in self._flights.values()]

    def finish(self, *, summed: bool) -> None:
        """Wait for all, and write their means, or where ``summed`` their sums over workers."""
        for spec, _, wait, written in self._flights.values():
            mean = wait()
            if summed:
                mean.mul_(self._workers)
            if written is not None:
                written.write(spec, mean)
        self._flights.clear()

    def drop(self) -> None:
        """Forget what is under way."""
        self._flights.clear()
