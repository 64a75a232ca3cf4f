"""What every compressor is: parameters, a collective, and the rounds that it needs."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.requests import Rounds, Unit, Volume

if TYPE_CHECKING:
    from hvdcomp.plugin import BoundCompression


class Compressor(ABC):
    """A method of compressing gradients.

    An object holds parameters only; what a tensor needs from step to step lives in :attr:`Unit.state` and in its
    residual, so that one object serves all tensors. Subclasses store each constructor argument under its own name.
    """

    name: ClassVar[str]
    collective: ClassVar[str]
    """The collective that carries the payload: "allreduce", "allgather" or "alltoall"."""
    source: ClassVar[str]
    """The paper or page that defines the method."""
    error_feedback: bool = False
    """What was not sent is added to the next gradient; the default is the method's definition."""
    has_levels: ClassVar[bool] = False
    """The method has a parameter ``cf``, its compression factor."""
    takes_factors: ClassVar[bool] = False
    """A schedule may choose the compression factor, whatever the method's own parameter is."""
    needs_matrices: ClassVar[bool] = False
    """The method uses a tensor's shape, so that tensors cannot be put together before it."""
    default_exclude: ClassVar[tuple[str, ...]] = ("1d",)
    """What stays dense unless the user says otherwise: "1d", tensors with fewer than two dimensions, or nothing."""
    takes_momentum: bool = False
    """The method applies the optimizer's momentum and weight decay itself, so the optimizer must step without them."""
    keeps_gradients: ClassVar[bool] = False
    """State holds gradients, so that they come without a loss scale, in float32 or float64, as with error feedback."""
    residual_state: ClassVar[str | None] = None
    """The state that is the residual, for a method that has its own error feedback."""
    checks_finite: ClassVar[bool] = True
    """A step in which any worker meets a NaN or an Inf is skipped by all."""

    @abstractmethod
    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        """Yield the collectives that one step of one unit needs, and return the outcome.

        Args:
            acc: flat, error-compensated gradient in float32 or float64; it must not be written to.
            unit: what else is known about it.
        """

    @abstractmethod
    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        """What :meth:`rounds` asks for with a float32 tensor of this shape, without running it."""

    def expected_requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        """About what :meth:`rounds` asks for, where :meth:`requests` is a bound."""
        return self.requests(shape, workers)

    def wanted(self, unit: Unit) -> int:
        """How many of the largest elements of residual + gradient :meth:`rounds` will ask for; 0 if none.

        Telling it beforehand spares a pass: they are found while the gradient is added.
        """
        return 0

    def takes_state_of(self, before: Compressor) -> bool:
        """Whether what another compressor left in :attr:`Unit.state` is of use to this one, which takes its place."""
        return type(self) is type(before)

    def as_selector(self) -> Compressor:
        """What an adaptive schedule uses: it evaluates selections of residual + gradient, so no other state may be."""
        return self

    def for_excluded(self) -> Compressor | None:
        """What exchanges the tensors that are excluded; None leaves that to :class:`NoCompression`."""
        return None

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Horovod's interface, one round: what to hand to the collective, and what :meth:`decompress` needs.

        Raises:
            TypeError: the method needs several rounds, or more than the tensor.
        """
        raise TypeError(
            f"{self.name} cannot compress a tensor by itself (it needs the tensor's name, the step, or several "
            f"rounds): use hvdcomp.DistributedOptimizer(..., compression={self!r}), or with Horovod's own optimizer "
            f"compression={self!r}.bind(model.named_parameters())"
        )

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        """The dense tensor that one payload of :meth:`compress` stands for."""
        raise TypeError(f"{self.name} has no payload of one round; see compress()")

    def bind(
        self, named_parameters: Iterable[tuple[str, Tensor]], *, op: Any = None, process_set: Any = None
    ) -> BoundCompression:
        """This compressor as the ``compression=`` of Horovod's own optimizer.

        Args:
            named_parameters: those of the model, as ``hvd.DistributedOptimizer`` gets them.
            op: the optimizer's ``op``, ``hvd.Average`` by default.
            process_set: the optimizer's process set, the global one by default.

        Raises:
            ValueError: the compressor does not fit ``op``.
        """
        from hvdcomp.plugin import BoundCompression

        return BoundCompression(self, named_parameters, op=op, process_set=process_set)

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The constructor's arguments and their defaults (``inspect.Parameter.empty`` where there is none)."""
        return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}

    def with_parameters(self, **changed: Any) -> Compressor:
        """Another compressor with some parameters changed."""
        return type(self)(**{name: getattr(self, name) for name in self.parameters()} | changed)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.parameters())
        return f"{type(self).__name__}({arguments})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))
