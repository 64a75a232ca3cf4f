"""What the cost model says of the exchanges that a benchmark measures, from a probe on the same hosts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvdcomp.bench.methods import own_parameters
from hvdcomp.compressors import available
from hvdcomp.costmodel import probing
from hvdcomp.costmodel.model import DENSE, Method, Workload, predict
from hvdcomp.costmodel.probe import Probe
from hvdcomp.costmodel.rates import UnknownRates
from hvdcomp.training.launcher import Job

Row = dict[str, Any]


def probe(job: Job, methods: Sequence[tuple[str, dict[str, Any]]], before: Probe | None) -> Probe:
    """Probe the hosts of a job; what methods cost is taken over from a probe before, as links do not change it."""
    known = [(name, own_parameters(params)) for name, params in [("none", {}), *methods] if name in available()]
    without_cf = [(name, {key: value for key, value in params.items() if key != "cf"}) for name, params in known]
    found = probing.measure(job, without_cf if before is None else [], None, None)
    return found if before is None else found.model_copy(update={"rates": before.rates})


def beside(rows: Sequence[Row], shapes: Mapping[str, Sequence[int]], probe: Probe) -> list[Row]:
    """The rows with ``predicted_ms``; None of adaptive runs and of Horovod's fp16, which are not predicted."""
    return [row | {"predicted_ms": _predicted_ms(row, shapes, probe)} for row in rows]


def errors(rows: Sequence[Row]) -> str:
    """How far off the predicted steps are, in a sentence."""
    found = [abs(row["predicted_ms"] / row["step_ms"] - 1) for row in rows if row["predicted_ms"] is not None]
    return f"{len(found)} predictions: median error {statistics.median(found):.1%}, worst {max(found):.1%}"


def _predicted_ms(row: Row, shapes: Mapping[str, Sequence[int]], probe: Probe) -> float | None:
    name, params = row["method"], row["params"]
    if name == "horovod":
        method = Method.of(DENSE)
    elif name in available() and own_parameters(params) == params:
        method = Method.of(name, params)
    else:
        return None
    try:
        workload = Workload(shapes, 1e-3 * row["backward_ms"])
        cluster = replace(probe.cluster(), gamma=row["gamma"])
        return 1e3 * predict(workload, cluster, method, probe.codec_rates()).step_s
    except UnknownRates:
        return None
