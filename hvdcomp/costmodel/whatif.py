"""`hvdcomp whatif`: how a step would change with a network, a cluster, a batch, a device or a method that is not there.

Sources of the sweeps: Agarwal et al. 2022, "On the Utility of Gradient Compression in Distributed Training Systems",
figures 3, 8 and 11 and appendix D.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from hvdcomp.bench.methods import check_writable, split_methods
from hvdcomp.checks import check_choice, check_flag
from hvdcomp.config import ConfigError
from hvdcomp.costmodel import paper
from hvdcomp.costmodel.collectives import Network
from hvdcomp.costmodel.model import DENSE, Method, predict
from hvdcomp.costmodel.question import Options, Question, ask
from hvdcomp.costmodel.rates import Rates, UnknownRates
from hvdcomp.training.checkpoint import write_atomically

LOWEST, HIGHEST = 1e5, 1e13
"""bits/s between which crossovers are looked for."""
TOLERANCE = 0.1
"""A dense step counts as scaled linearly where the network adds so little to its computation."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What is varied.

    Attributes:
        unit: of its values.
        values: by default; those of ratios are factors.
        apply: the question with a value.
    """

    unit: str
    values: Sequence[float]
    apply: Callable[[Question, float], Question]


def with_bandwidth(question: Question, bits_per_s: float) -> Question:
    """Another network, of which nothing was measured."""
    network = Network(bits_per_s, question.cluster.network.latency)
    return replace(question, cluster=question.cluster.on(network))


def _with_workers(question: Question, workers: float) -> Question:
    return replace(question, cluster=replace(question.cluster, workers=int(workers)))


def _with_batch(question: Question, factor: float) -> Question:
    """So many times the samples: a backward pass takes as many times as long."""
    workload = question.workload
    changed = replace(workload, backward_s=workload.backward_s * factor, rest_s=workload.rest_s * factor)
    return replace(question, workload=changed)


def _with_compute(question: Question, factor: float) -> Question:
    """So many times faster a device: computing, encoding and decoding."""
    return _with_encoding(_with_batch(question, 1 / factor), factor)


def _with_encoding(question: Question, factor: float) -> Question:
    """So many times faster encoding and decoding."""
    return replace(question, rates=_scaled(question.rates, 1 / factor))


def _with_nodes(question: Question, per_node: float) -> Question:
    return replace(question, cluster=replace(question.cluster, per_node=int(per_node)))


def _scaled(rates: Mapping[str, Rates], factor: float) -> dict[str, Rates]:
    return {key: found.scaled(factor) for key, found in rates.items()}


SWEEPS: dict[str, Sweep] = {
    "bandwidth": Sweep(
        "Gbit/s", (0.1, 0.3, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100), lambda q, v: with_bandwidth(q, 1e9 * v)
    ),
    "workers": Sweep("workers", tuple(2**power for power in range(1, 13)), _with_workers),
    "batch": Sweep("times the batch", (0.125, 0.25, 0.5, 1, 2, 4), _with_batch),
    "compute": Sweep("times faster compute", (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 8), _with_compute),
    "encoding": Sweep("times faster encoding", (0.5, 1, 2, 4, 8, 16, 32), _with_encoding),
    "nodes": Sweep("workers of a node", (1, 2, 4, 8), _with_nodes),
}
"""By name: of one thing each."""
WHOLE = ("workers", "nodes")
"""Sweeps over whole numbers only."""
OTHERS = ("ratio", "tradeoff", "grid")
"""How much compression linear scaling needs; faster but weaker encoding; the set-ups of a data centre, at once."""
GRID = {"resnet50": 0.122, "resnet101": 0.244, "bert-base": 0.28}
"""Seconds of a backward pass on a V100: the paper's of ResNet-50; twice that, as it has twice the operations (He et al.
2016, table 1); and what puts BERT's crossover where the paper has it, which gives no time."""
GRID_WORKERS = (2, 4, 8, 16, 32, 64, 96)
GRID_BATCHES = (1, 2)
GRID_METHODS = tuple(
    [Method.of("powersgd", {"rank": rank}) for rank in (4, 8, 16)]
    + [Method.of("mstopk", {"cf": cf}) for cf in (100, 1000)]
    + [Method.of("signsgd")]
)
"""The paper's."""


def sweep(
    question: Question, name: str, methods: Sequence[Method], model: str = "ours", values: Sequence[float] | None = None
) -> list[Row]:
    """A row for each value: the dense step, then each method's step and speedup.

    Raises:
        ValueError: there is no such sweep, or a value is not allowed.
        UnknownRates: a method's costs are not known.
    """
    chosen = SWEEPS[check_choice("sweep", name, SWEEPS)]
    if values is None:
        values = [v for v in chosen.values if name != "nodes" or question.cluster.workers % v == 0]
    rows = []
    for value in values:
        if not 0 < value < math.inf or (name in WHOLE and value % 1):
            raise ValueError(f"--values of {name} must be {'whole ' * (name in WHOLE)}numbers above 0, got {value:g}")
        changed = chosen.apply(question, value)
        dense_s = step_s(changed, Method.of(DENSE), model)
        row: Row = {chosen.unit: value, "dense ms": 1e3 * dense_s}
        for method in methods:
            method_s = step_s(changed, method, model)
            row[f"{method} ms"] = 1e3 * method_s
            row[f"{method} speedup"] = dense_s / method_s
        rows.append(row)
    return rows


def step_s(question: Question, method: Method, model: str = "ours") -> float:
    """What a step takes, seconds; a hierarchical exchange without nodes is a flat one."""
    cluster = question.cluster
    if method.hierarchical and (cluster.per_node == 1 or cluster.nodes == 1):
        method = replace(method, hierarchical=False)
    return predict(question.workload, cluster, method, question.rates, model).step_s


def crossover(question: Question, method: Method, model: str = "ours") -> float | None:
    """The bandwidth, bits/s, below which a method's step is shorter than a dense one.

    None where there is none between :data:`LOWEST` and :data:`HIGHEST`: the method always pays, or never does.
    """

    def advantage_s(log_bits: float) -> float:
        changed = with_bandwidth(question, math.exp(log_bits))
        return step_s(changed, Method.of(DENSE), model) - step_s(changed, method, model)

    # The last change of sign, from above: a dense step need not be monotone, as its last bucket never overlaps.
    grid = np.linspace(math.log(HIGHEST), math.log(LOWEST), 60)
    signs = [advantage_s(point) > 0 for point in grid]
    for above, below, high, low in zip(signs, signs[1:], grid, grid[1:], strict=False):
        if not above and below:
            return float(math.exp(brentq(advantage_s, low, high, xtol=1e-12)))
    return None


def needed_ratio(question: Question, tolerance: float = TOLERANCE) -> float:
    """How many times fewer bytes a dense step must send so that T <= gamma * T_comp * (1 + tolerance).

    The paper's model, whose number of buckets is kept while they shrink: else a step is not monotone in its size. 1
    where nothing is needed; infinite where latency alone is too long.
    """
    cluster, workload = question.cluster, question.workload
    allowed_s = cluster.gamma * workload.backward_s * (1 + tolerance)

    def excess_s(ratio: float) -> float:
        return paper.dense_step_s(
            workload.nbytes / ratio, cluster.workers, cluster.network, workload.backward_s,
            bucket_nbytes=paper.BUCKET_NBYTES / ratio, gamma=cluster.gamma,
        ) - allowed_s  # fmt: skip

    if excess_s(1.0) <= 0:
        return 1.0
    if excess_s(1e9) > 0:
        return math.inf
    return float(brentq(excess_s, 1.0, 1e9, xtol=1e-9))


def grid(question_of: Callable[[str, float], Question], model: str = "ours") -> list[Row]:
    """The paper's methods on its networks, over workers and batches; the best gain first.

    Args:
        question_of: a network's name and the seconds of its backward pass, as a question.
    """
    rows = []
    for name, compute_s in GRID.items():
        asked = question_of(name, compute_s)
        for workers, batch, method in itertools.product(GRID_WORKERS, GRID_BATCHES, GRID_METHODS):
            changed = _with_batch(_with_workers(asked, workers), batch)
            speedup = step_s(changed, Method.of(DENSE), model) / step_s(changed, method, model)
            rows.append(
                {
                    "network": name,
                    "workers": workers,
                    "times the batch": batch,
                    "method": str(method),
                    "speedup": speedup,
                }
            )
    return sorted(rows, key=lambda row: -row["speedup"])


def ratios(question: Question, tolerance: float = TOLERANCE, model: str = "paper") -> list[Row]:
    """The compression that linear scaling needs, over bandwidths and batches."""
    batches = (0.25, 0.5, 1, 2)
    rows = []
    for gbits in (1, 2, 5, 10, 20, 40, 100):
        row: Row = {"Gbit/s": gbits}
        for batch in batches:
            changed = _with_batch(with_bandwidth(question, 1e9 * gbits), batch)
            row[f"ratio at {batch:g} times the batch"] = needed_ratio(changed, tolerance)
        rows.append(row)
    return rows


def tradeoffs(question: Question, method: Method, model: str = "ours") -> list[Row]:
    """A method whose encoding is k times faster and sends l k times the bytes; k from 1 to 4, l from 1 to 3."""
    base = predict(question.workload, question.cluster, method, question.rates, model)
    dense_s = step_s(question, Method.of(DENSE), model)
    network = question.cluster.network
    rows = []
    for k in (1, 2, 3, 4):
        row: Row = {"times faster encoding": k}
        for more in (1, 2, 3):
            slower = Network(network.bandwidth / (k * more), network.latency)
            heavier = replace(question, cluster=question.cluster.on(slower), rates=_scaled(question.rates, 1 / k))
            taken_s = step_s(heavier, method, model)
            row[f"step ms, {more} k times the bytes"] = 1e3 * taken_s
            row[f"speedup, {more} k times the bytes"] = dense_s / taken_s
        row["now ms"] = 1e3 * base.step_s
        rows.append(row)
    return rows


def answer(
    what: str, options: Options, methods: Sequence[Method], model: str, values: Sequence[float] | None
) -> tuple[list[Row], list[str]]:
    """What the command shows: rows, and sentences about them.

    Raises:
        ConfigError: an option or a value is not allowed, or a method's costs are not known.
    """
    try:
        check_choice("sweep", what, (*SWEEPS, *OTHERS))
        if values is not None and what in OTHERS:
            raise ConfigError(f"--values is for {', '.join(SWEEPS)}; {what} has its own")
        if what == "grid":
            rows = grid(
                lambda name, compute_s: ask(replace(options, config=None, model=name, compute=compute_s)), model
            )
            gaining = sum(row["speedup"] > 1 for row in rows)
            return rows, [
                f"{gaining} of {len(rows)} set-ups gain, {sum(r['speedup'] > 1.1 for r in rows)} more than 10 %"
            ]
        question = ask(options)
        notes = [f"* {note}" for note in question.notes]
        if what == "ratio":
            needed = needed_ratio(question)
            return ratios(question), [
                *notes,
                f"{needed:.2f} times fewer bytes would be enough here, within {TOLERANCE:.0%}",
            ]
        if what == "tradeoff":
            return tradeoffs(question, methods[0], model), notes
        rows = sweep(question, what, methods, model, values)
        if what == "nodes" and not any(method.hierarchical for method in methods):
            notes.append("* nodes matter to hierarchical exchanges: --methods powersgd:rank=4:hierarchical=true")
        return rows, notes + (crossovers(question, methods, model) if what == "bandwidth" else [])
    except UnknownRates as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def parse_methods(text: str) -> list[Method]:
    """Methods from "topk:cf=100,powersgd:rank=4:hierarchical=true". Raises ConfigError for what there is not."""
    methods = []
    for name, params in split_methods(text):
        try:
            flag = check_flag("hierarchical", params.pop("hierarchical", False), hint="dense inside a node first")
            method = Method.of(name, params, flag)
            method.compressor()
        except ValueError as error:
            raise ConfigError(f"method {name!r}: {error}") from error
        methods.append(method)
    return methods


def parse_values(text: str | None) -> list[float] | None:
    """Numbers from "1,10,100". Raises ConfigError for anything else."""
    try:
        return None if text is None else [float(value) for value in text.split(",")]
    except ValueError:
        raise ConfigError(f"--values must be numbers such as 1,10,100, got {text!r}") from None


def as_csv(rows: Sequence[Row]) -> str:
    """The rows, figures in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows as text."""
    return [{name: value if isinstance(value, str) else f"{value:.4g}" for name, value in row.items()} for row in rows]


def crossovers(question: Question, methods: Sequence[Method], model: str) -> list[str]:
    """A sentence for each method: up to which bandwidth it pays."""
    said = []
    for method in methods:
        found = crossover(question, method, model)
        if found is not None:
            said.append(f"{method} pays below {found / 1e9:.3g} Gbit/s")
            continue
        middle = with_bandwidth(question, math.sqrt(LOWEST * HIGHEST))
        pays = step_s(middle, method, model) < step_s(middle, Method.of(DENSE), model)
        said.append(f"{method} {'pays' if pays else 'does not pay'} at every bandwidth")
    return said


def write(rows: Sequence[Row], output: Path, title: str) -> None:
    """FILE.csv, or a figure as FILE.png or FILE.svg: the first column across, all that are of one kind up.

    Raises:
        ConfigError: the file's name has another ending, or it cannot be written.
    """
    suffix = output.suffix.lower()
    if suffix not in (".csv", ".png", ".svg"):
        raise ConfigError(f"--output {output}: the name must end in .csv, .png or .svg")
    check_writable(output, "--output")
    if suffix == ".csv":
        write_atomically(output, as_csv(rows).encode())
        return
    figure(rows, output.stem, title).save(output.parent, [suffix[1:]])


def figure(rows: Sequence[Row], name: str, title: str) -> Any:
    """Speedups over the first column, else steps or ratios."""
    from hvdcomp.report.plots import Line, curves

    across, *columns = rows[0]
    speedups = [column for column in columns if "speedup" in column]
    drawn = speedups or columns
    x = np.array([row[across] for row in rows], float)
    lines = [
        Line(
            column.replace(" speedup", "").replace("speedup, ", ""),
            slot,
            x,
            np.array([row[column] for row in rows], float),
        )
        for slot, column in enumerate(drawn)
    ]
    label = "dense step / this one" if speedups else "compression ratio"
    rules = {1.0: "dense"} if speedups else None
    return curves(
        lines, name=name, title=title, x=(across, "number"), y=(label, "number"),
        log_x=bool(x.max() / x.min() > 20), rules=rules,
    )  # fmt: skip
