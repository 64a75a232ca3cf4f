"""What methods cost on this device: a few timed steps of tensors of several sizes, and the rates that explain them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, zip_longest
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from hvdcomp.bench.kernels import MethodStep
from hvdcomp.compressors import available, create
from hvdcomp.costmodel.rates import Cost, Rates, key_of
from hvdcomp.costmodel.traffic import Work, work_of

SIZES = tuple(4**power for power in range(6, 12))
"""Elements of the tensors that are timed: 4,096 to 4 million."""
WORLDS = (2, 8)
"""Workers whose answers are decoded."""
CFS, CF = (10.0, 100.0, 1000.0), 100.0
"""Of methods that have a compression factor; the one of tensors of more elements than :data:`_ALL_FACTORS`."""
RANKS = (1, 2, 4, 8)
STEPS = 5
"""Timed at least of each case; the median counts."""
UNITS, MOST_ELEMENTS = 8, 2**24
"""Tensors that take turns, at most, and of how many elements together: in training, too, tensors come from memory one
after the other in each phase, while the code that works on them stays in the caches."""
_ALL_FACTORS = 2**18
_TURNS_S, _TOO_LONG_S = 0.06, 0.15
"""Fewer tensors take turns where a step of all would take longer; no tensors that take longer each."""
_UNKNOWN_FACTOR = ("threshold",)
"""Methods whose payloads' sizes cannot be told beforehand."""

Sample = tuple[Work, float]


def default_methods() -> list[tuple[str, dict[str, Any]]]:
    """Every method that can be predicted; PowerSGD of several ranks."""
    names = [name for name in available() if name not in _UNKNOWN_FACTOR]
    ranks = [("powersgd", {"rank": rank}) for rank in RANKS]
    return [(name, {}) for name in names if name != "powersgd"] + ranks


def measure_rates(
    methods: Iterable[tuple[str, Mapping[str, Any]]], together: Callable[[], None] = lambda: None
) -> dict[str, Rates]:
    """The rates of each method, by :func:`key_of`.

    Args:
        together: called before each method, so that all workers of a machine encode at the same time, as in training.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(3 * max(SIZES), generator=generator)
    rates = {}
    for name, params in methods:
        together()
        rates[key_of(name, params)] = _measured(name, dict(params), gradients)
    return rates


def fit_cost(samples: Sequence[Sample]) -> Cost:
    """The cost, not below zero in any part, whose relative errors are the least."""
    rows = np.array([[work.units, work.elements, work.nbytes] for work, _ in samples], float)
    seconds = np.array([max(spent, 1e-9) for _, spent in samples])
    scale = np.maximum(rows.max(axis=0), 1.0)
    solved, _ = nnls(rows / scale / seconds[:, None], np.ones(len(samples)))
    return Cost(*(float(value) for value in solved / scale))


def _measured(name: str, params: dict[str, Any], gradients: Tensor) -> Rates:
    encodes: list[Sample] = []
    decodes: list[Sample] = []
    own = {"training_steps": 1, **params} if name == "gradiveq" else params  # so that quantised steps are timed
    has_factor = available()[name].has_levels and "cf" not in params
    expected_s = 0.0
    for size in SIZES:
        if expected_s > _TOO_LONG_S:
            break
        longest_s = 0.0
        factors: Sequence[float | None] = (None,) if not has_factor else CFS if size <= _ALL_FACTORS else (CF,)
        for cf in factors:
            compressor = create(name, **(own if cf is None else own | {"cf": cf}))
            units = max(1, min(UNITS, MOST_ELEMENTS // size, int(_TURNS_S / max(expected_s, 1e-9))))
            cases = [MethodStep(compressor, None, size) for _ in range(units)]
            shape, settling = cases[0].shape, cases[0].settling_steps
            given = cycle(gradients[: len(gradients) // shape.numel() * shape.numel()].split(shape.numel()))
            for works, workers in {
                work_of(compressor, shape, workers): workers for workers in reversed(WORLDS)
            }.items():
                steps = settling + math.ceil(STEPS / units)
                timed = [_step(cases, given, workers) for _ in range(steps)][settling:]
                encode_s, decode_s = (statistics.median(column) for column in zip(*chain(*timed), strict=True))
                encodes.append((works[0], encode_s))
                decodes.append((works[1], decode_s))
                longest_s, settling = max(longest_s, encode_s + decode_s), 1
        expected_s = longest_s * SIZES[1] / SIZES[0]
    return Rates(fit_cost(encodes), fit_cost(decodes))


def _step(cases: Sequence[MethodStep], given: Iterator[Tensor], workers: int) -> list[tuple[float, float]]:
    """A step of all tensors, one phase of all after the other: seconds of encoding and of decoding each."""
    running = [case.phases(next(given), workers) for case in cases]
    phases = list(zip_longest(*running, fillvalue=(0.0, 0.0)))
    return [(sum(s for s, _ in own), sum(s for _, s in own)) for own in zip(*phases, strict=True)]


def memory_bandwidth(numel: int = 2**23, repeats: int = 5) -> float:
    """Bytes/s of a copy, read or written, counted once each way: so much of a fusion buffer is filled."""
    source, target = torch.ones(numel), torch.zeros(numel)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 4 * numel / statistics.median(times)
