"""What methods cost on this device: a few timed steps of tensors of several sizes, and the rates that explain them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from hvdcomp.bench.kernels import MethodStep
from hvdcomp.compressors import Compressor, available, create
from hvdcomp.costmodel.rates import Cost, Rates, key_of
from hvdcomp.costmodel.traffic import Work, work_of

SIZES = tuple(4**power for power in range(6, 12))
"""Elements of the tensors that are timed: 4,096 to 4 million."""
WORLDS = (2, 8)
"""Workers whose answers are decoded."""
CFS, CF = (10.0, 100.0, 1000.0), 100.0
"""Of methods that have a compression factor; the one of tensors of more elements than :data:`_ALL_FACTORS`."""
RANKS = (1, 2, 4, 8)
STEPS, _SETTLING_STEPS = 3, 2
"""Timed of each case, whose median counts, and taken before where residuals are kept."""
UNITS, MOST_ELEMENTS = 8, 2**24
"""Tensors of a bucket, at most, and of how many elements together: in training, too, tensors come from memory one after
the other in each phase, while the code that works on them stays in the caches."""
_ALL_FACTORS = 2**18
_BUCKET_S, _TOO_LONG_S = 0.06, 0.15
"""Fewer tensors make a bucket whose step would take longer than that; no tensors that take so long each."""
_UNKNOWN_FACTOR = ("threshold",)
"""Methods whose payloads' sizes cannot be told beforehand."""

Sample = tuple[Work, float]


def default_methods() -> list[tuple[str, dict[str, Any]]]:
    """Every method that can be predicted; PowerSGD of several ranks."""
    names = [name for name in available() if name not in _UNKNOWN_FACTOR]
    ranks = [("powersgd", {"rank": rank}) for rank in RANKS]
    return [(name, {}) for name in names if name != "powersgd"] + ranks


def measure_rates(
    methods: Sequence[tuple[str, Mapping[str, Any]]], together: Callable[[], None] = lambda: None
) -> dict[str, Rates]:
    """The rates of each method, by :func:`key_of`.

    Args:
        together: called before each method, so that all workers of a machine encode at the same time, as in training.
    """
    rates: dict[str, Rates] = {}
    if not methods:
        return rates
    gradients = torch.randn(2 * MOST_ELEMENTS, generator=torch.Generator().manual_seed(0))
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
            units = max(1, min(UNITS, MOST_ELEMENTS // size, int(_BUCKET_S / max(expected_s, 1e-9))))
            case = MethodStep(compressor, None, size, units)
            numel, settling = units * case.shape.numel(), min(_SETTLING_STEPS, case.settling_steps)
            given = cycle(gradients[: len(gradients) // numel * numel].split(numel))
            worlds = {_works(compressor, case.shapes, workers): workers for workers in reversed(WORLDS)}
            for (encode, decode), workers in worlds.items():
                timed = [case.step(next(given), workers) for _ in range(settling + STEPS)][settling:]
                encode_s, decode_s = (statistics.median(column) for column in zip(*timed, strict=True))
                encodes.append((encode, encode_s))
                decodes.append((decode, decode_s))
                longest_s, settling = max(longest_s, (encode_s + decode_s) / units), 0
        expected_s = longest_s * SIZES[1] / SIZES[0]
    return Rates(fit_cost(encodes), fit_cost(decodes))


def _works(compressor: Compressor, shapes: Iterable[Sequence[int]], workers: int) -> tuple[Work, Work]:
    """What encoding and decoding a bucket of such units has to do."""
    encodes, decodes = zip(*(work_of(compressor, shape, workers) for shape in shapes), strict=True)
    return sum(encodes, Work()), sum(decodes, Work())


def memory_bandwidth(numel: int = 2**23, repeats: int = 5) -> float:
    """Bytes/s of a copy, read or written, counted once each way: so much of a fusion buffer is filled."""
    source, target = torch.ones(numel), torch.zeros(numel)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 4 * numel / statistics.median(times)
