"""Deep Gradient Compression: a sampled threshold on a velocity that holds what was not sent, momentum included."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from hvdcomp.checks import check_flag, check_number
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.none import NoCompression
from hvdcomp.compressors.requests import Allreduce, Dense, Rounds, Sparse, Unit, keep_spare, spare
from hvdcomp.compressors.sparsifier import GatheredSparsifier, kept_elements, limited, tail_of
from hvdcomp.kernels import Collected, advance, clear_, empty, largest, squared_norm

BAND = (0.8, 1.3)
"""Elements that are sent / k; fewer lower the sampled threshold, more are cut to k."""
_CORRECTIONS = 10
_SAMPLED_SHARE = 0.01


class DGC(GatheredSparsifier):
    """Every worker keeps a momentum u and a velocity v: u = m u + g, v = v + u; v is sent where it is largest.

    What is sent is cleared in v, which is thereby the residual, and in u (momentum factor masking). With Nesterov,
    u = m (u + g) and v = v + u + g. The base optimizer must apply no momentum of its own. At cf 1, and for tensors
    that are excluded, momentum is applied to the mean gradient instead, without masking: plain momentum SGD.

    The threshold is that of a sample of max(1 %, 2 n / k elements), lowered by a factor of .8 in at most 10 rounds
    until .8 k elements reach it; where more than 1.3 k do, they are cut by magnitude to k = max(1, floor(n / cf)).

    On a CPU a worker holds u and v twice, as they are and as they were a step before: a step that is skipped leaves
    them alone, and one that is not need not fetch fresh memory.

    Args:
        cf: compression factor >= 1, original floats / sent floats; 1 sends all.
        momentum: m in [0, 1); None takes the optimizer's.
        nesterov: None takes the optimizer's.
        weight_decay: >= 0, times the parameters, which enters the gradient before it is accumulated; None takes the
            optimizer's. ``hvdcomp.DistributedOptimizer`` adds it, since it knows the parameters.
        clip: > 0, a norm; each worker clips a tensor's gradient at clip / sqrt(workers) before it is accumulated; None
            does not clip.
        correction: keep u and v. Without, this is the sampled threshold alone, with plain error feedback and no state:
            what GraVAC means by DGC, and what an adaptive schedule uses.
        values: type of the values on the wire: "fp32", "fp16", "bf16" or "int8"; what they round off stays in v.
    """

    name: ClassVar[str] = "dgc"
    source: ClassVar[str] = "Lin et al. 2018, Algorithms 1 to 4"
    keeps_gradients: ClassVar[bool] = True
    residual_state: ClassVar[str | None] = "own.v"

    def __init__(
        self,
        cf: float = 100.0,
        momentum: float | None = None,
        nesterov: bool | None = None,
        weight_decay: float | None = None,
        clip: float | None = None,
        correction: bool = True,
        values: str = "fp32",
    ) -> None:
        super().__init__(cf, values, error_feedback=not correction)
        self.correction = self.takes_momentum = check_flag(
            "correction", correction, hint="keep u and v, as in the paper"
        )
        if nesterov is not None:
            check_flag("nesterov", nesterov, hint="None takes the optimizer's")
        if momentum is not None and check_number("momentum", momentum, 0, 1, hint="m of u = m u + g") == 1:
            raise ValueError("momentum must be below 1, got 1 (m of u = m u + g, which would never forget)")
        if weight_decay is not None:
            check_number("weight_decay", weight_decay, 0, hint="times the parameters, added to the gradient")
        if clip is not None:
            check_number("clip", clip, torch.finfo(torch.float32).tiny, hint="largest norm of a tensor's gradient")
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.clip = clip

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        if not self.correction:
            return (yield from super().rounds(acc, unit))
        gradient = self._clipped(acc, unit)
        cf = self.factor(unit)
        dense = cf == 1 or acc.numel() == 0
        if dense and "own.v" not in unit.state:
            return (yield from self.momentum_after(gradient, unit))
        u, v = self._advanced(gradient, unit, cf)
        if dense:  # the factor fell to 1: all that was left behind is sent, and u masked with it
            unit.spare = {}
            everything = Dense((yield Allreduce(v)))
            everything.state = {}
            return everything
        kept = self.select(v, kept_elements(v.numel(), cf), unit, level=0)
        outcome = yield from self.send(kept, v, unit)
        assert isinstance(outcome, Sparse)
        outcome.settle_(v)
        clear_(u, outcome.contributions[outcome.own].positions)
        keep_spare(unit, v, unit.state)
        outcome.state = {"own.u": u, "own.v": v}
        return outcome

    def momentum_after(self, gradient: Tensor, unit: Unit) -> Rounds:
        """The dense path: the mean gradient, then momentum, alike on all workers."""
        mean = yield Allreduce(gradient)
        mean = mean.view(-1)
        u, momentum = unit.state.get("u"), self._momentum(unit)
        u = torch.zeros_like(mean) if u is None else u
        u = (u + mean) * momentum if self._nesterov(unit) else torch.add(mean, u, alpha=momentum)
        outcome = Dense(u + mean if self._nesterov(unit) else u)
        outcome.state = {"u": u}
        return outcome

    def select(self, values: Tensor, k: int, unit: Unit, level: int) -> Collected:
        if k >= values.numel():
            return largest(values, k)
        threshold = sampled_threshold(values, k)
        top = tail_of(values, self.searched(k), unit, level)
        for _ in range(_CORRECTIONS):
            if top.count(threshold) >= BAND[0] * k:
                break
            threshold *= BAND[0]
        found = top.at_least(threshold) if threshold >= top.bound else top.found
        return limited(found, k, self.most(k), values)

    def searched(self, k: int) -> int:
        return self.most(k) + 1

    def most(self, k: int) -> int:
        return max(1, int(BAND[1] * k))

    def for_excluded(self) -> Compressor | None:
        return MomentumAfter(self) if self.correction else None

    def as_selector(self) -> Compressor:
        return self.with_parameters(correction=False)

    def _clipped(self, gradient: Tensor, unit: Unit) -> Tensor:
        if self.clip is None:
            return gradient
        limit = self.clip / math.sqrt(unit.workers)
        norm = math.sqrt(float(squared_norm(gradient)))
        return gradient * (limit / norm) if norm > limit else gradient

    def _nesterov(self, unit: Unit) -> bool:
        return unit.hyper.nesterov if self.nesterov is None else self.nesterov

    def _momentum(self, unit: Unit) -> float:
        return unit.hyper.momentum if self.momentum is None else self.momentum

    def _advanced(self, gradient: Tensor, unit: Unit, cf: float) -> tuple[Tensor, Tensor]:
        """The next u and v; the largest elements of v become the unit's tail."""
        old = {"own.u": unit.state.get("own.u", unit.state.get("u")), "own.v": unit.state.get("own.v")}
        u, v = (torch.zeros_like(gradient) if tensor is None else tensor for tensor in old.values())
        made = [spare(unit, name) for name in old]
        next_u, next_v = (
            empty(gradient.numel(), gradient.dtype, gradient.device) if tensor is None else tensor for tensor in made
        )
        wanted = 0 if cf == 1 else self.searched(kept_elements(gradient.numel(), cf))
        unit.tail = advance(u, v, gradient, self._momentum(unit), self._nesterov(unit), (next_u, next_v), wanted)
        return next_u, next_v


class MomentumAfter(NoCompression):
    """What DGC leaves uncompressed: momentum on the mean gradient, as the optimizer would apply it.

    Args:
        dgc: whose momentum and clipping it has.
    """

    keeps_gradients: ClassVar[bool] = True

    def __init__(self, dgc: DGC) -> None:
        self.dgc = dgc

    def rounds(self, acc: Tensor, unit: Unit) -> Rounds:
        return (yield from self.dgc.momentum_after(self.dgc._clipped(acc, unit), unit))


def sampled_threshold(values: Tensor, k: int) -> float:
    """The magnitude that a share k / n of a strided sample reaches."""
    numel = values.numel()
    size = min(numel, max(int(_SAMPLED_SHARE * numel), math.ceil(2 * numel / k)))
    sample = values[:: max(1, numel // max(size, 1))].contiguous()
    among = max(1, min(sample.numel(), int(sample.numel() * k / numel)))
    return float(largest(sample, among).values.abs().min())
