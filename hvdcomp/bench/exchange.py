"""What an exchange takes over networks of chosen bandwidths, against plain Horovod: `hvdcomp bench exchange`."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdcomp.bench import prediction
from hvdcomp.bench.methods import GRAVAC, GRAVAC_WAYS, check_writable, own_parameters, split_methods
from hvdcomp.bench.network import Hosts, missing
from hvdcomp.bench.shapes import MODELS
from hvdcomp.buckets import Layout
from hvdcomp.checks import check_choice
from hvdcomp.compressors import create
from hvdcomp.config import ConfigError, did_you_mean, load
from hvdcomp.costmodel.probe import Probe
from hvdcomp.plugin import AUTO
from hvdcomp.training.checkpoint import write_atomically
from hvdcomp.training.launcher import INTERRUPTED, Interrupted, Job
from hvdcomp.training.launcher import run as run_job

log = logging.getLogger(__name__)

TOLERANCE = 0.02
"""Plain Horovod is timed against itself until the 95 % interval of that ratio is this narrow."""
WARMUP_STEPS, MIN_ROUNDS = 2, 5

_UNLIMITED = "none"
_PLAIN: list[tuple[str, dict[str, Any]]] = [("horovod", {}), ("horovod", {}), ("horovod-fp16", {})]
"""The reference, the same again (how much two equal things differ here), and Horovod's own compression."""
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

Row = dict[str, Any]


def run(
    model: str,
    workers: int,
    bandwidths: str,
    methods: str,
    *,
    per_host: int = 1,
    launcher: str = "mpirun",
    compute_s: float | None,
    limit_s: float,
    memory: bool = False,
    predict: bool = False,
    json_file: Path | None,
) -> list[Row]:
    """What the command does: checks everything, then measures.

    Args:
        bandwidths: for example "100mbit,1gbit,none"; "none" is unlimited.
        per_host: workers on each host.
        launcher: "mpirun", or "horovodrun", which reaches other hosts by ssh only, so that all workers share this one.
        compute_s: seconds of a simulated backward pass; None is that of the training configuration ``model``.
        limit_s: no further round is begun after so many seconds at a bandwidth.
        memory: first find out, in a job of its own each, how much memory a method adds.
        predict: probe at each bandwidth, too, and put what the cost model makes of it beside each row.

    Raises:
        ConfigError: an argument is not allowed, or a worker failed.
        Interrupted: a signal has ended the measurement.
    """
    shapes = shapes_of(model)
    chosen = split_methods(methods)
    for name, params in chosen:
        _check_method(name, params)
    wanted = [(text, bits_per_s(text)) for text in bandwidths.split(",")]
    if json_file is not None:
        check_writable(json_file)
    if workers % per_host:
        raise ConfigError(f"-np must be a multiple of --per-host {per_host}, got {workers}: hosts have workers alike")
    if compute_s is None and model in MODELS:
        raise ConfigError(
            f"--compute real needs the file of a training configuration as --model, with its data and batch size, got "
            f"{model}: give seconds, such as --compute 0.12"
        )
    reason = missing() if launcher == "mpirun" else "horovodrun reaches other hosts by ssh only"
    if reason is not None:
        limited = [text for text, rate in wanted if rate is not None]
        log.warning("workers share this machine's loopback, as %s%s", reason, f"; left out: {limited}" * bool(limited))
        wanted = [(text, rate) for text, rate in wanted if rate is None]
    rows: list[Row] = []
    probed: Probe | None = None
    methods_of_plan = [*_PLAIN, *chosen]
    with _hosts(0 if reason is not None else workers // per_host) as hosts:
        plan = {
            "shapes": shapes,
            "compute_s": compute_s or 0.0,
            "configuration": str(Path(model).resolve()) if compute_s is None else None,
            "limit_s": limit_s,
            "tolerance": TOLERANCE,
            "warmup": WARMUP_STEPS,
            "min_rounds": MIN_ROUNDS,
            "memory": False,
        }
        peaks: list[float | None] = [None] * len(methods_of_plan)
        for number, method in enumerate(methods_of_plan if memory else ()):
            alone = {"methods": [method], "bandwidth": _UNLIMITED, "memory": True}
            peaks[number] = _measure(plan | alone, workers, hosts, launcher)[0]["peak_mb"]
        for text, rate in wanted:
            if hosts is not None:
                hosts.shape(rate)
            probed = prediction.probe(_job([], workers, hosts, launcher), chosen, probed) if predict else None
            here = {"methods": methods_of_plan, "bandwidth": text}
            measured = _measure(plan | here, workers, hosts, launcher)
            if probed is not None:
                measured = prediction.beside(measured, shapes, probed)
            rows += [row | {"peak_mb": peak} for row, peak in zip(measured, peaks, strict=True)]
    if json_file is not None:
        write_atomically(json_file, (json.dumps(rows, indent=2) + "\n").encode())
    return rows


def shapes_of(model: str) -> dict[str, list[int]]:
    """Names and shapes of a model's trained tensors: a known one's, or those of a training configuration's."""
    if model in MODELS:
        return {name: list(shape) for name, shape in MODELS[model]().items()}
    if not Path(model).exists():
        raise ConfigError(
            f"there is no model {model!r}{did_you_mean(model, MODELS)}; allowed: {', '.join(MODELS)}, or the file of a "
            "training configuration"
        )
    from hvdcomp.training.parts import build_model

    network = build_model(load(Path(model)))
    return {name: list(p.shape) for name, p in network.named_parameters() if p.requires_grad}


def bits_per_s(text: str) -> float | None:
    """A bandwidth such as "1gbit" in bit/s; None for "none", which is unlimited."""
    if text.strip() == _UNLIMITED:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"bandwidth must be such as 100mbit, 1gbit, 2.5gbit or none (unlimited), got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def compute_s(text: str) -> float | None:
    """Seconds of a simulated backward pass; None for "real"."""
    if text == "real":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"--compute must be seconds >= 0, or real (with a training configuration), got {text!r}")
    return seconds


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows as text, under short titles."""
    seen: set[str] = set()
    shown = []
    for row in rows:
        again = row["method"] == _PLAIN[0][0] and row["bandwidth"] in seen
        seen |= {row["bandwidth"]}
        low, high = row["speedup_interval"]
        shown.append(
            {
                "bandwidth": row["bandwidth"],
                "method": f"{row['method']} again" if again else row["method"],
                "parameters": ", ".join(f"{key}={value}" for key, value in row["params"].items()),
                "MB sent": f"{row['nbytes'] / 1e6:.3g}",
                "MB more": "" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}",
                **{
                    f"{name} ms": "" if row[f"{name}_ms"] is None else f"{row[f'{name}_ms']:.1f}"
                    for name in ("encode", "exchange", "wait", "decode", "step")
                },
                "quartiles": "{:.1f}..{:.1f}".format(*row["step_ms_quartiles"]),
                "dense / this": f"{row['speedup']:.2f}",
                "95 % interval": f"{low:.2f}..{high:.2f}",
                **_predicted(row),
            }
        )
    return shown


def _predicted(row: Row) -> dict[str, str]:
    """What the cost model says, and how far off it is; nothing where it was not asked."""
    if "predicted_ms" not in row:
        return {}
    if row["predicted_ms"] is None:
        return {"predicted ms": "", "error": ""}
    error = row["predicted_ms"] / row["step_ms"] - 1
    return {"predicted ms": f"{row['predicted_ms']:.1f}", "error": f"{error:+.0%}"}


def _measure(plan: dict[str, Any], workers: int, hosts: Hosts | None, launcher: str) -> list[Row]:
    """All rows at one bandwidth."""
    log.info("%s", plan["bandwidth"])
    with tempfile.TemporaryDirectory(prefix="hvdcomp-") as folder:
        plan_file, rows_file = Path(folder) / "plan.json", Path(folder) / "rows.json"
        plan_file.write_text(json.dumps(plan))
        command = [sys.executable, "-m", "hvdcomp.bench.exchange_worker", str(plan_file), str(rows_file)]
        code = run_job(_job(command, workers, hosts, launcher), "lines")
        if code in INTERRUPTED:
            raise Interrupted(code)
        if code != 0:
            raise ConfigError(f"the workers ended with exit code {code}; what they said stands above")
        rows: list[Row] = json.loads(rows_file.read_text())
    return rows


def _job(command: Sequence[str], workers: int, hosts: Hosts | None, launcher: str) -> Job:
    return Job(
        command,
        workers,
        launcher,
        hosts=None if hosts is None else ",".join(f"{a}:{workers // hosts.count}" for a in hosts.addresses),
        options=() if hosts is None else hosts.launcher_options(),
        within=() if hosts is None else hosts.on_first(()),
    )


@contextmanager
def _hosts(count: int) -> Iterator[Hosts | None]:
    if count == 0:
        yield None
        return
    with Hosts(count) as hosts:
        yield hosts


def _check_method(name: str, params: dict[str, Any]) -> None:
    try:
        if GRAVAC in params:
            check_choice("way of gravac", params[GRAVAC], GRAVAC_WAYS)
        if name != AUTO:
            Layout(create(name, **own_parameters(params)))
    except ValueError as error:
        raise ConfigError(f"method {name!r}: {error}") from error
