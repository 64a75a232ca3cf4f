"""signSGD with majority vote, and Signum: one bit an element, and the aggregate is a vote, not a mean."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_number
from hvdcomp.compressors.quantised import Deterministic, Gathered, Quantised, blank
from hvdcomp.compressors.requests import Allgather, Rounds, Unit, keep_spare, spare
from hvdcomp.kernels.codes import add_lookup_, blended, codes_nbytes, pack_signs

_SIGNS = torch.tensor([-1.0, 1.0])
_AT_ONCE = 2**19
"""Elements that a thread votes on while they are in its cache."""


class Vote(Gathered):
    """+1 or -1 where most workers sent that sign, 0 where they tie."""

    ignores_scale: ClassVar[bool] = True

    def write_mean_(self, out: Tensor) -> None:
        size = _AT_ONCE * torch.get_num_threads() if out.device.type == "cpu" else max(1, out.numel())
        for start in range(0, out.numel(), size):
            part = out[start : start + size].zero_()
            for payload in self.payloads:
                signs = payload[start // 8 :][: codes_nbytes(part.numel(), 1)]
                self.method.add_(part, signs, 1.0)  # whole numbers: exact
            part.sign_()


class _Signs(Quantised):
    """What both methods send: ceil(n / 8) bytes of signs."""

    def payload_nbytes(self, numel: int, itemsize: int = 4) -> int:
        return codes_nbytes(numel, 1)

    def encode(self, values: Tensor, unit: Unit) -> Tensor:
        payload, _, signs = blank(0, codes_nbytes(values.numel(), 1), values)
        pack_signs(values, signs)
        return payload

    def add_(self, out: Tensor, payload: Tensor, weight: float) -> None:
        add_lookup_(out, payload, 1, weight * _SIGNS)


class SignSGD(_Signs, Deterministic):
    """The majority's sign of each element: +1, -1, or 0 where the workers tie. It takes a learning rate of its own.

    A zero is sent as +1: there is one bit. Nothing is kept of what was not sent, as the decoded signs have no scale.
    Every tensor is compressed, those with one dimension too: a vote and a mean would need different learning rates.
    """

    name: ClassVar[str] = "signsgd"
    source: ClassVar[str] = "Bernstein et al. 2018 and 2019, signSGD with majority vote"

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        payloads = yield Allgather(self.encode(acc.contiguous(), unit))
        return Vote(self, self.checked(payloads, unit.numel, acc.dtype), unit.worker, acc.dtype)


class Signum(_Signs):
    """The majority's sign of each worker's momentum, m = momentum * m + (1 - momentum) * gradient.

    The momentum is the worker's own and changes with a committed step only. The wrapped optimizer should have none. As
    in signSGD a zero is sent as +1, nothing is kept of what was not sent, and every tensor is compressed. On a CPU the
    momentum is held twice, as it is and as it was a step before.

    Args:
        momentum: weight of the past, 0 (signSGD) <= momentum < 1.
    """

    name: ClassVar[str] = "signum"
    source: ClassVar[str] = "Bernstein et al. 2018, Algorithm 2"

    keeps_gradients: ClassVar[bool] = True

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = check_number(
            "momentum", momentum, 0, math.nextafter(1, 0), hint="weight of the past; the paper uses 0.9"
        )

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        before = unit.state.get("own.momentum")
        momentum = blended(before, acc, self.momentum, spare(unit, "own.momentum"))
        payloads = yield Allgather(self.encode(momentum, unit))
        received = self.checked(payloads, unit.numel, acc.dtype)
        keep_spare(unit, acc, unit.state)
        return Vote(self, received, unit.worker, acc.dtype, state={"own.momentum": momentum})
