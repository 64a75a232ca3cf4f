"""What each method makes of a small gradient, worked by hand, for any number of workers, simulated or real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdcomp.compressors import Compressor, create

HUNDRED = torch.arange(1.0, 101.0)
NOTHING = 0.0


@dataclass(frozen=True)
class Value:
    """The last of some equal steps.

    Attributes:
        compressor: compresses tensors of this size.
        given: the gradient of worker 0.
        mean: what is applied where one worker is alone.
        left: its residual.
        steps: how many are made.
        proportional: worker w has w + 1 times the gradient, and is left with as many times the residual; otherwise all
            have the same.
        vote: the mean does not grow with the gradients.
        somewhere: which elements are sent is up to a hash, so that only their number and values are known.
    """

    compressor: Compressor
    given: Tensor
    mean: Tensor
    left: Tensor | float = NOTHING
    steps: int = 1
    proportional: bool = True
    vote: bool = False
    somewhere: bool = False

    def gradient(self, worker: int) -> Tensor:
        return self.given * self._times(worker)

    def check(self, worker: int, workers: int, mean: Tensor, left: Tensor) -> None:
        average = sum(self._times(w) for w in range(workers)) / workers
        precision = 2e-3 if self.compressor.name == "fp16" else 1e-5
        expected = self.mean if self.vote else self.mean * average
        for found, wanted in ((mean, expected), (left, self.left * self._times(worker) + 0 * self.given)):
            ours, theirs = (t.flatten().sort().values if self.somewhere else t for t in (found, wanted))
            torch.testing.assert_close(ours, theirs, rtol=precision, atol=precision * float(self.given.abs().max()))

    def _times(self, worker: int) -> int:
        return worker + 1 if self.proportional else 1


def above(least: int) -> tuple[Tensor, Tensor]:
    """(what is sent, what is left) of 1 to 100 where all from ``least`` on are sent."""
    sent = torch.where(least <= HUNDRED, HUNDRED, 0)
    return sent, HUNDRED - sent


def row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def diagonal(shape: tuple[int, int], numbers: Sequence[float]) -> Tensor:
    matrix = torch.zeros(shape)
    matrix.diagonal()[: len(numbers)] = row(*numbers)
    return matrix


X = row(4, -3, 2, -1, 0.5)
Y = row(1, -2, 3, -4)
ONES = torch.ones(8)

VALUES = [
    Value(create("none"), X, X),
    Value(create("fp16"), row(40000, -2), row(40000, -2), proportional=False),  # two would add up to Inf
    Value(create("bf16"), row(257, 1), row(256, 1), proportional=False),  # 8 bits of precision; half-way, to even
    Value(create("topk", cf=2.5), X, row(4, -3, 0, 0, 0), row(0, 0, 2, -1, 0.5)),
    # u = .9 * 1 + 1 = 1.9, v = 1 + 1.9 = 2.9; with Nesterov u = .9 (.9 + 1) = 1.71, v = 1.9 + 1.71 + 1 = 4.61
    Value(create("dgc", cf=2, momentum=0.9), row(1, 100), row(0, 100), row(2.9, 0), steps=2),
    Value(create("dgc", cf=2, momentum=0.9, nesterov=True), row(1, 100), row(0, 190), row(4.61, 0), steps=2),
    Value(create("redsync", cf=10), HUNDRED, *above(88)),  # ratios .5 (25 selected), .75 (13): 87.625
    Value(create("redsync", cf=10, variant="trimmed"), HUNDRED, *above(91)),
    Value(
        create("redsync", cf=4, variant="trimmed", quantise=True),
        row(8, -6, 5, -2, 1, 0, 0, 0),
        row(6.5, 0, 6.5, 0, 0, 0, 0, 0),
        row(1.5, -6, -1.5, -2, 1, 0, 0, 0),
    ),
    Value(create("mstopk", cf=10, bisections=4), HUNDRED, *above(91)),  # t1 = 90.71875
    # 50.5 + 29.01 * 1.645 = 98.2 (2 reach it), then 49.1 (51), 73.7 (27), 110.5 (none): one is sent
    Value(create("gaussiank", cf=10), HUNDRED, *above(100)),
    Value(
        create("threshold", threshold=1.0, max_density=0.5),
        row(0.5, -1, 2, 0),
        row(0, -1, 2, 0),
        row(0.5, 0, 0, 0),
        proportional=False,
    ),
    # of 1, 2, 3, 4 half: exponential 2.5 ln 2 = 1.73; Pareto 5.94 (1 - .5^1.375) / 1.375 = 2.65; gamma 2.31
    Value(create("sidcoe", cf=2), Y, row(0, -2, 3, -4), row(1, 0, 0, 0)),
    Value(create("sidcogp", cf=2), Y, row(0, 0, 3, -4), row(1, -2, 0, 0)),
    Value(create("sidcop", cf=2), Y, row(0, 0, 3, -4), row(1, -2, 0, 0)),
    Value(create("randomk", cf=4), 3 * ONES, row(3, 3, 0, 0, 0, 0, 0, 0), row(0, 0, 3, 3, 3, 3, 3, 3), somewhere=True),
    Value(create("randomk", cf=4, error_feedback=False), 3 * ONES, row(12, 12, 0, 0, 0, 0, 0, 0), somewhere=True),
    Value(create("artopk", cf=4), row(4, 1, 0, 0), row(4, 0, 0, 0), row(0, 1, 0, 0)),
    Value(create("artopk", cf=4, selection="var"), row(4, 1, 0, 0), row(4, 0, 0, 0), row(0, 1, 0, 0)),
    Value(create("oktopk", cf=4), row(0, 0, 5, 0), row(0, 0, 5, 0)),
    Value(create("powersgd", rank=1), *[torch.outer(row(1, 2, 3), row(1, -1, 2, 0))] * 2),  # of rank 1
    # the second step sends coordinates: both slices are multiples of (.6, .8)
    Value(
        create("gradiveq", slice_size=2, components=1, training_steps=1, quantised_steps=2),
        row(3, 4, 6, 8),
        row(3, 4, 6, 8),
        steps=2,
    ),
    Value(create("signsgd"), row(1, -2, 0, -5), row(1, -1, 1, -1), vote=True),
    Value(create("signum"), row(1, -2, 0, -5), row(1, -1, 1, -1), vote=True),
    Value(create("efsignsgd"), Y, row(2.5, -2.5, 2.5, -2.5), row(-1.5, 0.5, 0.5, -1.5)),
    Value(create("onebit"), Y, row(2, -3, 2, -3), row(-1, 1, 1, -1)),
    Value(create("qsgd", levels=5), row(3, 4), row(3, 4)),  # norm 5: levels 3 and 4
    Value(create("terngrad", clip=None), row(2, -2, 0), row(2, -2, 0)),  # each is s, -s or 0: nothing is left to chance
    Value(create("terngrad", shared_scale=True), row(2, -2, 0), row(2, -2, 0), proportional=False),
    Value(create("natural"), row(8, -2, 0.25, 0), row(8, -2, 0.25, 0), proportional=False),  # powers of two
    Value(create("int8"), row(-1, 254, 2.4, 2.6), row(-1, 254, 2, 3), row(0, 0, 0.4, -0.4)),
    Value(create("atomo", budget=2), *[diagonal((6, 7), [3, -3])] * 2),  # p = min(1, 2 * 3 / 6)
]
