"""What methods cost on this device: a few timed steps of tensors of several sizes, and the rates that explain them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from hvdcomp.bench.kernels import Method
from hvdcomp.compressors import available, create
from hvdcomp.costmodel.rates import Cost, Rates, key_of
from hvdcomp.costmodel.traffic import Work, work_of

SIZES = (2**12, 2**15, 2**18, 2**20, 2**22)
"""Elements of the tensors that are timed."""
WORLDS = (2, 8)
"""Workers whose answers are decoded."""
CFS = (10.0, 100.0, 1000.0)
"""Of methods that have a compression factor."""
RANKS = (1, 2, 4, 8)
STEPS = 5
"""Timed at least of each case; the median counts."""
UNITS, MOST_ELEMENTS = 8, 2**23
"""Tensors that take turns, at most, and of how many elements together: in training, too, a bucket's tensors come from
memory one after the other, while the code that encodes them stays in the caches."""
_TOO_LONG_S = 0.25
"""No larger tensors of a method that takes so long."""
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
    factors: Sequence[float | None] = CFS if available()[name].has_levels and "cf" not in params else (None,)
    own = {"training_steps": 1, **params} if name == "gradiveq" else params  # so that quantised steps are timed
    for cf in factors:
        changed = own if cf is None else own | {"cf": cf}
        compressor = create(name, **changed)
        for size in SIZES:
            cases = [Method(name, changed).case(size) for _ in range(min(UNITS, MOST_ELEMENTS // size))]
            shape, settling = cases[0].shape, cases[0].settling_steps
            given = cycle(gradients[: len(gradients) // shape.numel() * shape.numel()].split(shape.numel()))
            taken_s = 0.0
            for workers in WORLDS:
                steps = settling + math.ceil(STEPS / len(cases))
                taken = [case.step(next(given), workers) for _ in range(steps) for case in cases]  # type: ignore[call-arg]
                timed = taken[settling * len(cases) :]
                encode_s, decode_s = (statistics.median(column) for column in zip(*timed, strict=True))
                encode, decode = work_of(compressor, shape, workers)
                encodes.append((encode, encode_s))
                decodes.append((decode, decode_s))
                taken_s, settling = encode_s + decode_s, 1
            if taken_s > _TOO_LONG_S:
                break
    return Rates(fit_cost(encodes), fit_cost(decodes))


def memory_bandwidth(numel: int = 2**23, repeats: int = 5) -> float:
    """Bytes/s of a copy, read or written, counted once each way: so much of a fusion buffer is filled."""
    source, target = torch.ones(numel), torch.zeros(numel)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 4 * numel / statistics.median(times)
