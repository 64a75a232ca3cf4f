"""What methods that send a few bits of every element have in common: one allgather of uint8 payloads.

A payload is a header of numbers of the accumulator's type (a scale, two means, one scale a bucket: float32 unless the
gradient is float64), then the packed codes. Its length follows from the tensor's, and is checked.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.requests import Allgather, Reduced, Rounds, Unit, Volume
from hvdcomp.errors import WireError
from hvdcomp.kernels.running import empty

_ROUNDING = 1e-5
"""How far below a type's largest number a mean must stay, so that rounding the sum cannot carry it beyond."""


class Quantised(Compressor):
    """Sends a few bits of every element by allgather; a subclass says how one worker's payload is made and read.

    Each compresses every tensor unless it says otherwise: a payload is at most a few bytes larger than its tensor.
    """

    collective: ClassVar[str] = "allgather"
    default_exclude: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        """Bytes of every payload of ``numel`` elements whose accumulator has numbers of ``itemsize`` bytes."""

    @abstractmethod
    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        """The payload of flat, contiguous float32 or float64 ``values``; if they hold NaN or Inf, any bytes will do."""

    @abstractmethod
    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        """out += weight * what a payload of the right length stands for."""

    def largest(self, payload: Tensor, dtype: torch.dtype) -> float:
        """A bound on the magnitudes that a payload stands for. Needed with error feedback only."""
        raise NotImplementedError(f"{self.name} keeps no residual that an overflow could harm")

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        payloads = yield Allgather(self.encode(acc.contiguous(), unit))
        return Gathered(self, self.checked(payloads, unit.numel, acc.dtype), unit.worker, acc.dtype)

    def requests(self, shape: torch.Size | tuple[int, ...], workers: int) -> list[Volume]:
        return [Volume(0, "allgather", self.payload_nbytes(torch.Size(shape).numel()))]

    def checked(self, payloads: Sequence[Tensor], numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The payloads, if each has the length that ``numel`` elements take.

        Raises:
            WireError: one has another length.
        """
        return check_lengths(payloads, self.payload_nbytes(numel, dtype.itemsize), f"{self.name}, {numel} elements")


class Deterministic(Quantised):
    """A quantised method whose payload follows from the tensor alone, so that Horovod's interface can be met."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        flat = tensor.detach().reshape(-1).contiguous()
        flat = flat if flat.dtype.itemsize >= 4 else flat.float()
        return self.encode(flat, Unit("", tensor.shape)), (tensor.shape, tensor.dtype)

    def decompress(self, payload: Tensor, ctx: Any) -> Tensor:
        shape, dtype = ctx
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        dense = torch.zeros(shape.numel(), dtype=wide, device=payload.device)
        self.add_(dense, self.checked([payload], shape.numel(), wide)[0], 1.0)
        return dense.view(shape).to(dtype)


@dataclass
class Gathered(Reduced):
    """Every worker's payload; they are decoded straight into the mean, in worker order."""

    method: Quantised
    payloads: list[Tensor]
    own: int
    """This worker's index."""
    dtype: torch.dtype
    state: dict[str, Tensor] | None = None

    def write_mean_(self, out: Tensor) -> None:
        out.zero_()
        for payload in self.payloads:
            self.method.add_(out, payload, 1 / len(self.payloads))

    def settle_(self, acc: Tensor) -> None:
        self.method.add_(acc, self.payloads[self.own], -1.0)

    def finite(self) -> bool:
        if not self.method.error_feedback:
            return True
        bound = sum(self.method.largest(payload, self.dtype) / len(self.payloads) for payload in self.payloads)
        return bound <= torch.finfo(self.dtype).max * (1 - _ROUNDING)


def check_lengths(payloads: Sequence[Tensor], nbytes: int, what: str) -> list[Tensor]:
    """The payloads, if each has ``nbytes`` bytes.

    Raises:
        WireError: one has another length.
    """
    for worker, payload in enumerate(payloads):
        if payload.numel() != nbytes:
            raise WireError(f"worker {worker} sent {payload.numel()} bytes, expected {nbytes} ({what})")
    return list(payloads)


def blank(count: int, nbytes: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A payload to be written, and views of it: its header's ``count`` numbers, of the type and on the device of
    ``like``, and its ``nbytes`` bytes of codes."""
    split = count * like.dtype.itemsize
    payload = empty(split + nbytes, torch.uint8, like.device)
    return payload, payload[:split].view(like.dtype), payload[split:]


def split(payload: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The (count,) numbers of a payload's header as float64, and its codes as uint8."""
    nbytes = count * dtype.itemsize
    return payload[:nbytes].clone().view(dtype).double(), payload[nbytes:]


def as_sent(value: float, dtype: torch.dtype) -> float:
    """A number as the header holds it, at most the type's largest: what is encoded must use what will be decoded."""
    largest = torch.finfo(dtype).max
    return float(torch.tensor(max(-largest, min(value, largest)), dtype=dtype))
