"""`hvdcomp plan`: what each method would take, what to use, and whether to use any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hvdcomp.compressors import available
from hvdcomp.config import parse
from hvdcomp.costmodel.cluster import Cluster
from hvdcomp.costmodel.collectives import Network
from hvdcomp.costmodel.model import DENSE, Method, Prediction, Workload, predict
from hvdcomp.costmodel.question import Question
from hvdcomp.costmodel.rates import UnknownRates, key_of
from hvdcomp.training.checkpoint import write_atomically

CFS = (10, 30, 100, 300, 1000)
"""Compression factors that are tried."""
LEAST_GAIN = 1.03
"""Compression must save 3 % to be chosen, as in the optimizer's honest switch."""
NEAR_BEST = 0.05
"""Of methods so near to the fastest, the one that keeps the most of a gradient is taken."""
DRAWS = 40
"""Of the inputs, for intervals."""
_CASTS = ("fp16", "bf16")
_GRADIVEQ = "gradiveq"
"""Predicted in its steps that compress; it needs to be retrained now and then, so that it is not recommended."""


@dataclass(frozen=True)
class Row:
    """A method's step.

    Attributes:
        speedup: dense step / this one, and its 95 % interval.
        drop_in: it needs no other learning rate: a cast, or a method with error feedback.
    """

    method: Method
    prediction: Prediction
    speedup: float
    interval: tuple[float, float]
    drop_in: bool


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        headroom: how many times shorter a dense step would be if communication were free: no method can gain more.
        rows: the dense step first, then from the fastest to the slowest.
        best: the recommended one, None where nothing is to be compressed.
        unknown: keys of methods whose costs on this device nobody has measured.
    """

    question: Question
    model: str
    headroom: float
    rows: list[Row]
    best: Row | None
    reason: str
    unknown: list[str]

    def as_json(self) -> dict[str, Any]:
        chosen = self.best
        recommendation: Any = "none"
        if chosen is not None:
            recommendation = {"name": chosen.method.name, **dict(chosen.method.params)}
            if chosen.method.hierarchical:
                recommendation["hierarchical"] = True
        return {
            "recommendation": recommendation,
            "expected_speedup": 1.0 if chosen is None else chosen.speedup,
            "interval": [1.0, 1.0] if chosen is None else list(chosen.interval),
            "headroom": self.headroom,
            "reason": self.reason,
            "notes": self.question.notes,
            "rows": [
                {
                    "method": row.method.name,
                    "params": dict(row.method.params),
                    "hierarchical": row.method.hierarchical,
                    **vars(row.prediction),
                    "speedup": row.speedup,
                    "interval": list(row.interval),
                    "drop_in": row.drop_in,
                }
                for row in self.rows
            ],
        }


def make_plan(question: Question, model: str = "ours") -> Plan:
    """Predict every method that is known, and choose."""
    workload, cluster = question.workload, question.cluster
    dense = Method.of(DENSE)
    base = predict(workload, cluster, dense, question.rates, model)
    drawn = list(_drawn(question))
    dense_s = [predict(w, c, dense, question.rates, model).step_s for w, c, _, _ in drawn]
    rows, unknown = [], []
    for method in candidates(question):
        try:
            prediction = predict(workload, cluster, method, question.rates, model)
        except UnknownRates:
            unknown.append(key_of(method.name, dict(method.params)))
            continue
        ratios = [
            reference_s / (off * predict(w, c, method, _scaled(question, codec), model).step_s)
            for reference_s, (w, c, codec, off) in zip(dense_s, drawn, strict=True)
        ]
        low, high = np.percentile(ratios, [2.5, 97.5])
        speedup = base.step_s / prediction.step_s
        interval = (min(float(low), speedup), max(float(high), speedup))
        rows.append(Row(method, prediction, speedup, interval, _is_drop_in(method)))
    rows.sort(key=lambda row: row.prediction.step_s)
    headroom = (
        base.step_s / (workload.backward_s + workload.rest_s) if workload.backward_s + workload.rest_s else np.inf
    )
    best = choose(rows)
    reason = _reason(base, rows, best, headroom, cluster.workers)
    first = Row(dense, base, 1.0, (1.0, 1.0), True)
    return Plan(question, model, float(headroom), [first, *rows], best, reason, sorted(set(unknown)))


def candidates(question: Question) -> Iterator[Method]:
    """Every method whose payloads can be told beforehand, over the grid of factors; hierarchically, too, where there
    are nodes of several workers."""
    nodes = question.cluster.per_node > 1 and question.cluster.nodes > 1
    for name, cls in available().items():
        if name in ("none", "threshold"):
            continue
        grid: Sequence[dict[str, Any]] = [{"cf": cf} for cf in CFS] if cls.has_levels else [{}]
        if "rank" in cls.parameters():
            prefix = f"{name}:rank="
            grid = [{"rank": int(k.removeprefix(prefix))} for k in question.rates if k.startswith(prefix)] or [{}]
        for params in grid:
            yield Method.of(name, params)
            if nodes:
                yield Method.of(name, params, hierarchical=True)


def choose(rows: Sequence[Row]) -> Row | None:
    """Of the methods that surely pay, the mildest of those that are about as fast as the fastest."""
    paying = [row for row in rows if row.drop_in and row.interval[0] > LEAST_GAIN]
    if not paying:
        return None
    fastest_s = min(row.prediction.step_s for row in paying)
    near = [row for row in paying if row.prediction.step_s <= (1 + NEAR_BEST) * fastest_s]
    return max(near, key=lambda row: (row.prediction.nbytes, -row.prediction.step_s))


def headline(plan: Plan) -> str:
    """What no method can exceed."""
    cluster, workload = plan.question.cluster, plan.question.workload
    bandwidth = f"{cluster.network.bandwidth / 1e9:.3g} Gbit/s"
    return (
        f"{plan.question.name}, {workload.nbytes / 1e6:.3g} MB of gradients, {cluster.workers} workers at {bandwidth}. "
        f"Headroom: {plan.headroom:.2f} times, if communication were free."
    )


def footnotes(plan: Plan) -> list[str]:
    """What was assumed, and what could not be predicted."""
    notes = [f"* {note}" for note in plan.question.notes]
    if plan.unknown:
        notes.append(f"* left out, since nobody measured what they cost there: {', '.join(plan.unknown)}")
    return notes


def table(plan: Plan) -> list[dict[str, str]]:
    """The rows as text."""
    return [
        {
            "method": row.method.name + ", hierarchical" * row.method.hierarchical,
            "parameters": ", ".join(f"{key}={value}" for key, value in row.method.params),
            "MB sent": f"{row.prediction.nbytes / 1e6:.3g}",
            "compute ms": _ms(row.prediction.compute_s),
            "encode ms": _ms(row.prediction.encode_s),
            "wait ms": _ms(row.prediction.wait_s),
            "decode ms": _ms(row.prediction.decode_s),
            "step ms": _ms(row.prediction.step_s),
            "dense / this": f"{row.speedup:.2f}",
            "95 % interval": "" if row.method.name == DENSE else f"{row.interval[0]:.2f}..{row.interval[1]:.2f}",
            "": "recommended" if row is plan.best else "" if row.drop_in else "needs another learning rate",
        }
        for row in plan.rows
    ]


def write_config(plan: Plan, output: Path) -> None:
    """The configuration that was asked about with the recommended compression; for a model alone, that section."""
    section: dict[str, Any] = {"name": "none"}
    if plan.best is not None:
        section = {"name": plan.best.method.name, **dict(plan.best.method.params)}
    head = f"# {plan.reason}\n"
    if plan.question.config is None:
        text = yaml.safe_dump({"compression": section}, sort_keys=False)
    else:
        values = plan.question.config.model_dump() | {"compression": section, "schedule": {"name": "static"}}
        text = parse(values).to_yaml()
    write_atomically(output, (head + text).encode())


def _is_drop_in(method: Method) -> bool:
    if method.name == _GRADIVEQ:
        return False
    return method.name in _CASTS or bool(method.compressor().error_feedback) or method.name == "dgc"


# -- uncertainty


def _drawn(question: Question) -> Iterator[tuple[Workload, Cluster, float, float]]:
    """The question with other inputs that could be as true; factors of what methods cost, and of the model's error."""
    draw = np.random.default_rng(0)
    spread, cluster, workload = question.spread, question.cluster, question.workload
    for _ in range(DRAWS):
        slower, later, codec, compute, off = np.exp(
            draw.normal(0, [spread.bandwidth, spread.latency, spread.codec, spread.compute, spread.model])
        ).tolist()
        network = _changed(cluster.network, slower, later)
        inside = None if cluster.inside is None else _changed(cluster.inside, slower, later)
        curves = {kind: curve.scaled(slower) for kind, curve in cluster.curves.items()}
        changed = replace(workload, backward_s=workload.backward_s * compute, rest_s=workload.rest_s * compute)
        yield changed, replace(cluster, network=network, inside=inside, curves=curves), codec, off


def _changed(network: Network, slower: float, later: float) -> Network:
    return Network(network.bandwidth / slower, network.latency * later)


def _scaled(question: Question, factor: float) -> Any:
    return _scaled_rates(tuple(question.rates.items()), factor)


@lru_cache(maxsize=2 * DRAWS)
def _scaled_rates(rates: tuple[tuple[str, Any], ...], factor: float) -> dict[str, Any]:
    return {key: found.scaled(factor) for key, found in rates}


# -- words


def _reason(base: Prediction, rows: Sequence[Row], best: Row | None, headroom: float, workers: int) -> str:
    if workers == 1:
        return "Do not compress: a single worker sends nothing."
    exposed = base.wait_s / base.step_s
    if best is not None:
        fewer = base.nbytes / max(1, best.prediction.nbytes)
        return (
            f"Compress with {best.method}: a step takes about {_duration(best.prediction.step_s)} instead of "
            f"{_duration(base.step_s)}, {best.speedup:.2g} times faster, since workers now wait for the network during "
            f"{exposed:.0%} of each step and {fewer:.0f} times fewer bytes would travel."
        )
    usable = [row for row in rows if row.drop_in]
    free = f"even a network that took no time would make a step only {headroom:.2f} times faster"
    if not usable:
        return f"Do not compress: what methods cost on this device is not known; {free}."
    first = usable[0]
    if headroom < LEAST_GAIN:
        return f"Do not compress: training hardly waits for the network; {free}."
    if first.speedup <= LEAST_GAIN:
        return (
            f"Do not compress: workers wait for the network during {_duration(base.wait_s)} of a step of "
            f"{_duration(base.step_s)}, and no method wins enough of that back: with the best, {first.method}, a step "
            f"would take {_duration(first.prediction.step_s)}; {free}."
        )
    low, high = first.interval
    return (
        f"Do not compress yet: {first.method} may make a step {first.speedup:.2f} times faster, but what is known of "
        f"this cluster allows {low:.2f} to {high:.2f}; `hvdcomp probe` on it would tell; {free}."
    )


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 0.01
        else f"{1e3 * seconds:.2g} ms"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
