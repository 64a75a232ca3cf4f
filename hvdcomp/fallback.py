"""The honest switch: compressed or dense, whichever is measured to be faster. Pure logic, on worker 0.

Steps are taken in blocks of one kind. The first step of a block is not counted (it sends what the residual holds, or
meets a cold cache). A trial alternates short blocks until one kind is clearly faster or enough was seen; then that kind
is held, and the other is looked at now and then, so rarely that it costs a hundredth of the time at most.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

BLOCK = 3
"""Steps of a trial's block, of which the first is not counted."""
ROUNDS = 3
"""Blocks of each kind in a trial, unless one kind is clearly faster before."""
CLEAR = 1.3
"""A ratio of times beyond which a trial ends early."""
WORTH = 0.97
"""Compression must take at most this share of the dense step: the model is none the better for it."""
SHARE = 0.01
"""Of the time that looking at the slower kind may cost."""
HOLD, LONGEST_HOLD = 200, 100_000
"""Steps between two looks."""
_RECENT = 50


@dataclass(frozen=True)
class Block:
    """So many steps of one kind."""

    dense: bool
    steps: int

    SIZE = 2

    def to_vector(self) -> list[float]:
        """`SIZE` floats."""
        return [float(self.dense), float(self.steps)]

    @classmethod
    def from_vector(cls, vector: list[float]) -> Block:
        dense, steps = vector
        return cls(bool(dense), int(steps))


@dataclass
class DenseFallback:
    """Chooses the next block from the times of the steps so far.

    Attributes:
        dense: what the last trial chose.
    """

    dense: bool = False
    _block: Block = field(default_factory=lambda: Block(False, BLOCK))
    _taken: int = 0
    _trial: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    _in_trial: bool = True
    _hold: int = HOLD
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _looked: list[float] = field(default_factory=list)

    @property
    def first(self) -> Block:
        """The block that a run begins with."""
        return Block(False, BLOCK)

    def observe(self, seconds: float) -> None:
        """Tell what a step of the present block took, exchange and backward pass; nan where that means nothing."""
        self._taken += 1
        if self._taken == 1 or not math.isfinite(seconds):
            return
        if self._in_trial:
            self._trial[self._block.dense].append(seconds)
        elif self._block.dense == self.dense:
            self._recent.append(seconds)
        else:
            self._looked.append(seconds)

    def next(self) -> Block:
        """The block after the present one."""
        self._block = self._after_trial() if self._in_trial else self._after_hold()
        self._taken = 0
        return self._block

    def _after_trial(self) -> Block:
        compressed, dense = self._trial[False], self._trial[True]
        if self._block.dense and compressed and dense:
            ratio = statistics.median(compressed) / statistics.median(dense)
            if min(len(compressed), len(dense)) >= ROUNDS * (BLOCK - 1) or not 1 / CLEAR < ratio < CLEAR:
                return self._choose(ratio)
        return Block(not self._block.dense, BLOCK)

    def _choose(self, ratio: float) -> Block:
        before, self.dense = self.dense, ratio > WORTH
        own, other = (statistics.median(self._trial[kind]) for kind in (self.dense, not self.dense))
        self._in_trial = False
        self._recent.clear()
        self._hold = self._longest(own, other) if before != self.dense else max(self._hold, self._longest(own, other))
        return Block(self.dense, self._hold)

    def _after_hold(self) -> Block:
        if self._block.dense == self.dense:
            self._looked.clear()
            return Block(not self.dense, BLOCK)
        if not self._looked or not self._recent:
            return Block(self.dense, self._hold)
        own, other = statistics.median(self._recent), statistics.median(self._looked)
        ratio = own / other if not self.dense else other / own
        if (ratio > WORTH) != self.dense:  # the other kind looks better now: look closer
            self._in_trial = True
            self._trial = {False: [], True: []}
            return Block(False, BLOCK)
        self._hold = min(max(2 * self._hold, self._longest(own, other)), LONGEST_HOLD)
        return Block(self.dense, self._hold)

    @staticmethod
    def _longest(own: float, other: float) -> int:
        """Steps over which a look at the other kind costs no more than its share."""
        return min(max(HOLD, math.ceil(BLOCK * max(other - own, 0.0) / (SHARE * own))), LONGEST_HOLD)
