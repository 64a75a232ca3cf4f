"""What every method costs one worker's CPU, without a network: `hvdcomp bench kernels`.

The step that is timed is the real one (:class:`hvdcomp.rounds.BucketRun`), as worker 0 of eight which all hold the same
gradient; their answers are made outside of the times. A round times a copy of the gradient, PyTorch's ``abs().topk(k)``
and the method, one after the other, so that a loaded machine slows all three; figures are medians of rounds. Before
the first round residuals have taken a few steps, and every step has another gradient.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from hvdcomp import indices
from hvdcomp.bench.methods import check_writable, split_methods
from hvdcomp.bench.samples import Pool, make_pool
from hvdcomp.buckets import Layout, Spec
from hvdcomp.checks import check_choice, check_number
from hvdcomp.compressors import Compressor, TopK, available, create
from hvdcomp.compressors.requests import SharedSparse, Sparse
from hvdcomp.compressors.sparsifier import GatheredSparsifier, kept_elements
from hvdcomp.config import ConfigError
from hvdcomp.kernels import largest, squared_norm
from hvdcomp.rounds import BucketRun, Context, Fused
from hvdcomp.simulation import collective
from hvdcomp.training.checkpoint import write_atomically
from hvdcomp.wire import HEADER_NBYTES, VALUE_TYPES, decode_frames

WORKERS = 8
"""Whose answers are decoded."""
CF = 100
"""Of methods that have a compression factor, unless told otherwise."""
INDEX_CODE = "index code"
"""The positions of a payload alone."""
_ONE_BUCKET_MB = 1e6
SETTLING_STEPS = 4
"""Steps before the first round of a method that keeps a residual; one before that of others."""
LEAST_ROUNDS, MOST_ROUNDS, BUDGET_S = 5, 50, 4.0
"""A method is timed for so many seconds, unless the number of rounds is given."""

_OWN: dict[str, dict[str, Any]] = {
    "dgc": {"cf": CF, "momentum": 0.9},
    "powersgd": {"rank": 4},
    "gradiveq": {"training_steps": 1},  # so that quantised steps are timed
    "atomo": {"budget": 3},
}
"""Settings of methods that need others than a compression factor."""
_ADAPTIVE = ({"levels": [100, 1000]}, {"levels": [10, 100]}, {"twice": [10, 100]})
_DENSITIES = (0.1, 0.01, 0.001)
_LARGEST_MATRIX = {"atomo": (512, 4608)}
"""The last layers of a ResNet-18: the SVD of a matrix of 25 million elements would take minutes."""

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: a compressor's, or :data:`INDEX_CODE`.
        params: the compressor's; "levels": the two factors that an adaptive schedule evaluates, the second of which is
            sent; "twice": the same, each level compressed by itself, as
            a schedule without multi-level compression would; "density" of the index code.
    """

    name: str
    params: dict[str, Any]

    def case(self, numel: int) -> Case:
        """What is timed. Raises ValueError for parameters that the method does not have or that are not allowed."""
        if self.name == INDEX_CODE:
            for parameter in self.params:
                check_choice(f"parameter of the {INDEX_CODE}", parameter, ("density",))
            return _IndexCode(numel, **self.params)
        params = dict(self.params)
        levels, twice = params.pop("levels", None), params.pop("twice", None)
        compressor = create(self.name, **params)
        if twice is not None:
            if type(compressor) is not TopK or levels is not None:
                raise ValueError("twice=[CF, CF] goes with topk, and without levels")
            return _Twice(compressor, _checked_levels(compressor, twice), numel)
        return MethodStep(compressor, None if levels is None else _checked_levels(compressor, levels), numel)


def parse_methods(text: str) -> list[Method]:
    """Methods from "topk:cf=100:values=fp16,topk:levels=[10,100],index code:density=0.1".

    Raises:
        ConfigError: there is no such method or parameter, or a value is not allowed.
    """
    methods = [Method(name, params) for name, params in split_methods(text)]
    for method in methods:
        try:
            method.case(1)
        except ValueError as error:
            raise ConfigError(f"method {method.name!r}: {error}") from error
    return methods


def default_methods(gradient: Tensor) -> list[Method]:
    """Every compressor at its recommended setting, what an adaptive schedule asks of top-k, and the index code.

    Args:
        gradient: 1 % of its elements reach the threshold of the method that has one; of residual + gradient, more do.
    """
    threshold = float(gradient.abs()[:: -(-gradient.numel() // 1_000_000)].quantile(1 - 1 / CF))
    own = _OWN | {"threshold": {"threshold": float(f"{threshold:.3g}") or 0.01}}
    methods = [Method(name, own.get(name, {"cf": CF} if cls.has_levels else {})) for name, cls in available().items()]
    adaptive = [Method(TopK.name, dict(params)) for params in _ADAPTIVE]
    return [*methods, *adaptive, *(Method(INDEX_CODE, {"density": density}) for density in _DENSITIES)]


def run(
    numel: int,
    dist: str,
    gradients: Path | None,
    methods: str | None,
    *,
    threads: int,
    repeat: int | None,
    json_file: Path | None,
) -> tuple[str, list[Row]]:
    """What the command does: checks everything, then measures. Returns a headline and the rows.

    Raises:
        ConfigError: an argument is not allowed, or does not fit another.
    """
    chosen = None if methods is None else parse_methods(methods)
    if json_file is not None:
        check_writable(json_file)
    pool = make_pool(dist, numel, gradients)
    rows = measure_all(chosen or default_methods(pool.gradient(0)), pool, threads=threads, repeat=repeat)
    if json_file is not None:
        write_atomically(json_file, (json.dumps(rows, indent=2) + "\n").encode())
    fewer = f", as only so many of {numel:,} were recorded" if pool.numel < numel else ""
    memcpy_ms = statistics.median(row["memcpy_ms"] for row in rows)
    return (
        f"{pool.numel:,} elements ({dist}){fewer}; threads: {threads}; memcpy: {memcpy_ms:.3g} ms; "
        f"decoding: {WORKERS} workers; times: medians of {min(row['rounds'] for row in rows)} rounds and more"
    ), rows


def measure_all(methods: Sequence[Method], pool: Pool, *, threads: int, repeat: int | None) -> list[Row]:
    """One row a method.

    Args:
        threads: of PyTorch and of the kernels.
        repeat: rounds of each method; None as many as :data:`BUDGET_S` allows.
    """
    rows = []
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn())
    with _threads(threads), Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(methods))
        for method in methods:
            progress.update(task, description=method.name)
            rows.append(measure(method, pool, repeat) | {"dist": pool.dist, "threads": threads})
            progress.advance(task)
    return rows


def measure(method: Method, pool: Pool, repeat: int | None) -> Row:
    """Medians of rounds; times in ms. What a method has no figure for is None.

    Keys, besides those of the sample:
        encode_ms: from a gradient to payloads: error feedback, selection, gains under levels, codes; and taking from
            the residual what was sent.
        decode_ms: from the answers of :data:`WORKERS` workers to the dense mean.
        memcpy_ratio: encode_ms over that of a copy; for the index code encode_ms + decode_ms.
        topk_speedup: time of PyTorch's ``abs().topk(k)`` over encode_ms, k that of the first selection.
        k_ratio: sent elements over k.
        bits_per_element: of everything handed to collectives.
        bits_per_index: without header and values.
        gain: ||sent||^2 / ||gradient + residual||^2; above 1 where a method adds noise to have no bias.
        relative_error: ||gradient + residual - sent|| / ||gradient + residual||.
    """
    case = method.case(pool.numel)
    copy = torch.zeros(case.shape.numel())
    gradients = (pool.gradient(step)[: copy.numel()] for step in itertools.count())
    for _ in range(case.settling_steps):
        case.step(next(gradients))
    times: list[tuple[float, float, float, float]] = []
    began = time.perf_counter()
    while not _enough(len(times), repeat, time.perf_counter() - began):
        gradient = next(gradients)
        copy_s, _ = timed(partial(copy.copy_, gradient))
        topk_s = timed(partial(_torch_topk, gradient, case.k))[0] if case.k else 0.0
        times.append((copy_s, topk_s, *case.step(gradient)))
    memcpy_ms, topk_ms, encode_ms, decode_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    compared_ms = encode_ms + decode_ms if case.name == INDEX_CODE else encode_ms
    return {
        "method": case.name,
        "params": method.params,
        "encode_ms": encode_ms,
        "decode_ms": decode_ms,
        "memcpy_ratio": compared_ms / memcpy_ms,
        "topk_speedup": topk_ms / encode_ms if case.k else None,
        **case.figures(next(gradients)),
        "shape": list(case.shape),
        "memcpy_ms": memcpy_ms,
        "topk_ms": topk_ms if case.k else None,
        "rounds": len(times),
    }


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows as text, under short titles."""
    return [
        {
            "method": row["method"],
            "parameters": _parameters(row),
            "encode ms": _text(row["encode_ms"]),
            "decode ms": _text(row["decode_ms"]),
            "GB/s": _text(4e-6 * math.prod(row["shape"]) / row["encode_ms"]),
            "/ memcpy": _text(row["memcpy_ratio"]),
            "topk /": _text(row["topk_speedup"]),
            "k^/k": _text(row["k_ratio"]),
            "bits/element": _text(row["bits_per_element"]),
            "bits/index": _text(row["bits_per_index"]),
            "gain": _text(row["gain"]),
            "rel. error": _text(row["relative_error"]),
        }
        for row in rows
    ]


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Seconds that it took, and what it returned."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


class Case(Protocol):
    """A method on gradients of one shape.

    Attributes:
        name: the compressor's, or :data:`INDEX_CODE`.
        k: elements of the first selection; None where nothing is selected that top-k could replace.
        settling_steps: to take before the first one that is timed.
    """

    name: str
    shape: torch.Size
    k: int | None
    settling_steps: int

    def step(self, gradient: Tensor) -> tuple[float, float]:
        """Seconds of encoding and of decoding."""

    def figures(self, gradient: Tensor) -> dict[str, float | None]:
        """Of one more step: k_ratio, bits_per_element, bits_per_index, gain, relative_error."""


class MethodStep:
    """The step of units that make a bucket, on one of :data:`WORKERS` workers that all have the same gradients.

    Args:
        numel: elements of a unit.
        units: how many there are, alike.
    """

    def __init__(self, compressor: Compressor, levels: tuple[float, float] | None, numel: int, units: int = 1) -> None:
        compressor = compressor if levels is None else compressor.as_selector()
        self.compressor, self.levels, self.name = compressor, levels, compressor.name
        self.shape = _shape(compressor, numel)
        self.cfs = (getattr(compressor, "cf", 1.0),) if levels is None else levels
        self.k = kept_elements(self.shape.numel(), self.cfs[0]) if compressor.has_levels else None
        specs = [Spec(f"gradient{unit}", self.shape, torch.float32, torch.device("cpu")) for unit in range(units)]
        (self._bucket,) = Layout(compressor, bucket_mb=_ONE_BUCKET_MB, exclude=()).buckets(specs)
        self._part = self._bucket.parts[0]
        keeps = self._part.feedback is not None or compressor.residual_state is not None
        self.settling_steps = SETTLING_STEPS if keeps else 1
        self.begin_s = 0.0
        """What the last step took to the decision, or to the payload where none is made."""
        self._mean = torch.zeros(units * self.shape.numel())
        self._steps = 0

    def step(self, gradient: Tensor, workers: int = WORKERS) -> tuple[float, float]:
        """Seconds of encoding and of decoding; ``gradient``: (units * shape.numel(),)."""
        workers = min(workers, self.shape.numel())
        context = Context(0, workers, self._steps, self.levels, self.compressor.checks_finite)
        self._run = run = BucketRun(self._bucket, _Given(self._by_unit(gradient), self._by_unit(self._mean)), context)
        self.begin_s, _ = timed(partial(self._begin, run))
        fuse_s, fused = timed(partial(self._fuse, run))
        encode_s = self.begin_s + fuse_s
        decode_s = 0.0
        self._sent: list[Fused] = []
        while fused:
            self._sent += fused
            answers = [collective([request] * workers)[0] for request in fused]
            spent_s, fused = timed(partial(_answer, run, fused, answers))
            if fused:  # more is to be sent
                encode_s += spent_s
            else:
                decode_s += spent_s
        settled_s, settled = timed(run.settled)
        assert settled, f"{self.compressor!r} made a number that is not finite"
        decode_s += settled_s + timed(run.write_means)[0]
        encode_s += timed(run.keep)[0]
        self._steps += 1
        return encode_s, decode_s

    @property
    def shapes(self) -> list[torch.Size]:
        """Of what is compressed by itself: small tensors that are not compressed at all are one."""
        return [part.unit.shape for part in self._bucket.parts]

    def _by_unit(self, flat: Tensor) -> dict[str, Tensor]:
        names = [member.name for member in self._bucket.members]
        return dict(zip(names, flat.split(self.shape.numel()), strict=True))

    def figures(self, gradient: Tensor) -> dict[str, float | None]:
        nbytes = sum(request.buffer.nbytes for request in self._sent)
        self.step(gradient, workers=1)  # where workers share the reducing, other workers' parts are known only so
        if all(request.kind == "allgather" for request in self._sent):  # the same to any number of workers
            nbytes = sum(request.buffer.nbytes for request in self._sent)
        outcome = self._run.outcomes[0]
        count = None
        if isinstance(outcome, Sparse):
            count = outcome.contributions[0].positions.numel()
        elif isinstance(outcome, SharedSparse):
            count = outcome.indices.numel()
        numel = self.shape.numel()
        index_nbytes = self._index_nbytes(count) if count else 0
        gain, error = (None, None) if outcome.ignores_scale else self._quality(gradient)
        return {
            "k_ratio": count / kept_elements(numel, self.cfs[-1]) if self.k and count is not None else None,
            "bits_per_element": 8 * nbytes / numel,
            "bits_per_index": 8 * index_nbytes / count if count and index_nbytes else None,
            "gain": gain,
            "relative_error": error,
        }

    def _begin(self, run: BucketRun) -> None:
        run.begin()
        if self.levels is not None:
            run.statistics()

    def _fuse(self, run: BucketRun) -> list[Fused]:
        if self.levels is not None:
            run.decide(1)
        return run.fuse()

    def _quality(self, gradient: Tensor) -> tuple[float | None, float | None]:
        """Gain and relative error of a step alone, whose mean is what was sent."""
        feedback, state = self._part.feedback, self._part.unit.state
        left = feedback.residual if feedback is not None else state.get(self.compressor.residual_state or "")
        whole = gradient if left is None else left + self._mean
        rest = gradient - self._mean if left is None else left
        total_sq = float(squared_norm(whole))
        if total_sq == 0:
            return None, None
        return float(squared_norm(self._mean)) / total_sq, math.sqrt(float(squared_norm(rest)) / total_sq)

    def _index_nbytes(self, count: int) -> int:
        """What of the payloads is positions."""
        if isinstance(self.compressor, GatheredSparsifier):
            (payload,) = decode_frames(self._sent[-1].buffer, 1, 1)[0].payloads
            return payload.numel() - HEADER_NBYTES - count * VALUE_TYPES[self.compressor.values].itemsize
        return sum(request.buffer.nbytes for request in self._sent if request.kind == "broadcast")


@dataclass
class _Given:
    """Flat gradients by name, and where their means go."""

    gradients: dict[str, Tensor]
    means: dict[str, Tensor]

    def read(self, spec: Spec) -> Tensor:
        return self.gradients[spec.name].view(spec.shape)

    def target(self, spec: Spec, dtype: torch.dtype) -> Tensor:
        return self.means[spec.name]

    def write(self, spec: Spec, mean: Tensor) -> None:
        self.means[spec.name].copy_(mean)


class _Twice(MethodStep):
    """Two compressions of one gradient, from its adding to the residual on: what multi-level compression spares.

    The first ends with its gain, as it is not sent; the second is the step of a static factor.
    """

    def __init__(self, compressor: Compressor, levels: tuple[float, float], numel: int) -> None:
        super().__init__(compressor, (levels[1], levels[1]), numel)
        self._first = MethodStep(compressor, (levels[0], levels[0]), numel)
        self.k = self._first.k

    def step(self, gradient: Tensor, workers: int = WORKERS) -> tuple[float, float]:
        self._first.step(gradient, workers)
        encode_s, decode_s = super().step(gradient, workers)
        return self._first.begin_s + encode_s, decode_s


class _IndexCode:
    """The positions of the largest elements, from int32 to bits and back."""

    name = INDEX_CODE
    k: int | None = None
    settling_steps = 1

    def __init__(self, numel: int, density: float = 1 / CF) -> None:
        density = check_number("density", density, 1e-9, 1, hint="share of the elements that is sent")
        self.shape = torch.Size([numel])
        self._count = kept_elements(numel, 1 / density)
        self._nbytes = 0

    def step(self, gradient: Tensor) -> tuple[float, float]:
        positions = largest(gradient, self._count).positions
        encode_s, code = timed(lambda: indices.encode(positions, gradient.numel()))
        decode_s, _ = timed(lambda: indices.decode(code, self._count, gradient.numel()))
        self._nbytes = code.data.nbytes
        return encode_s, decode_s

    def figures(self, gradient: Tensor) -> dict[str, float | None]:
        missing = dict.fromkeys(("k_ratio", "bits_per_element", "gain", "relative_error"))
        return {**missing, "bits_per_index": 8 * self._nbytes / self._count}


def _torch_topk(gradient: Tensor, k: int) -> Any:
    return gradient.abs().topk(k)


def _answer(run: BucketRun, fused: list[Fused], answers: list[Tensor]) -> list[Fused]:
    """Hand over what collectives returned. Returns the next ones."""
    run.answer(fused, answers)
    return run.fuse()


def _shape(compressor: Compressor, numel: int) -> torch.Size:
    """Flat, or for a method of matrices the largest near-square one of so many elements.

    Where each worker reduces a part, parts are alike, so that this worker's can stand in for all.
    """
    if compressor.collective == "alltoall":
        return torch.Size([numel - numel % min(WORKERS, numel)])
    if not compressor.needs_matrices:
        return torch.Size([numel])
    rows_limit, columns_limit = _LARGEST_MATRIX.get(compressor.name, (numel, numel))
    rows = min(math.isqrt(numel), rows_limit)
    return torch.Size([rows, min(numel // rows, columns_limit)])


def _checked_levels(compressor: Compressor, levels: Any) -> tuple[float, float]:
    if not compressor.has_levels:
        raise ValueError(f"levels are compression factors, {compressor.name} has none")
    if not isinstance(levels, list) or len(levels) != 2:
        raise ValueError(f"levels must be two compression factors, got {levels!r} (write levels=[10,100])")
    hint = "cf is original size / compressed size; for 1 % use 100"
    low = check_number("the first level", levels[0], 1, hint=hint)
    return low, check_number("the second level", levels[1], low, hint=hint)


def _enough(rounds: int, repeat: int | None, seconds: float) -> bool:
    if repeat is not None:
        return rounds >= repeat
    return rounds >= MOST_ROUNDS or (rounds >= LEAST_ROUNDS and seconds >= BUDGET_S)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _parameters(row: Row) -> str:
    """The method's, and the shape of a matrix."""
    matrix = ["x".join(map(str, row["shape"]))] if len(row["shape"]) > 1 else []
    return ", ".join([f"{name}={value}" for name, value in row["params"].items()] + matrix)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
