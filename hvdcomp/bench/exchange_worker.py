"""One rank of `hvdcomp bench exchange`: real optimizers, gradients of a network's shapes, a backward pass that waits.

    python -m hvdcomp.bench.exchange_worker PLAN.json ROWS.json

Every contestant wraps parameters of its own, which share their memory with the others'; the contestants take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn

from hvdcomp.bench.methods import GRAVAC, HIERARCHICAL, NEVER_SLOWER, own_parameters
from hvdcomp.compressors import create
from hvdcomp.config import load
from hvdcomp.horovod_api import DYNAMIC
from hvdcomp.optimizer import DistributedOptimizer
from hvdcomp.plugin import AUTO
from hvdcomp.schedules import GraVAC
from hvdcomp.training import parts
from hvdcomp.training.data import batches
from hvdcomp.training.models import begin_text

HOROVOD, HOROVOD_FP16 = "horovod", "horovod-fp16"
"""The contestants that are plain Horovod."""
GRAVAC_STEPS = 5
"""Until it is at its highest factor."""
_LEAST_ROUNDS = 2
"""However long they take."""
_DIFFERENT = 2
"""Sets of gradients that take turns."""
_RESAMPLINGS = 2000
_BACKWARD_STEPS, _DISTURBED_STEPS = 9, 3


class _Ready(torch.autograd.Function):
    """The identity, whose backward computes for a while and then hands one parameter its gradient."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.seconds > 0:
            time.sleep(ctx.seconds)
        return signals[0], ctx.gradient, None, None


@dataclass
class Contestant:
    """A method with its optimizer, and what its steps took.

    Attributes:
        peak_nbytes: by how much the process grew at most in its first steps; None where the system does not tell.
        step_s: seconds of each step, the slowest rank's.
        parts_s: rank 0's seconds of each step by name, of our own optimizer.
    """

    method: str
    params: dict[str, Any]
    parameters: list[nn.Parameter]
    optimizer: Any
    nbytes: int = 0
    peak_nbytes: int | None = None
    step_s: list[float] = field(default_factory=list)
    parts_s: list[dict[str, float]] = field(default_factory=list)
    _waiting: Any = None

    def pause(self) -> None:
        """What others do until :meth:`resume` is no part of this optimizer's iteration."""
        if hasattr(self.optimizer, "untimed"):
            self._waiting = self.optimizer.untimed()
            self._waiting.__enter__()

    def resume(self) -> None:
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None

    @property
    def settled(self) -> bool:
        """Its honest switch, if it has one, has made its choice."""
        exchange = getattr(self.optimizer, "_exchange", None)
        return exchange is None or exchange.referee is None or exchange.referee.settled


class Arena:
    """What the contestants share: memory of parameters and gradients, and the gradients that a step brings.

    Args:
        shapes: of the tensors, by name, in the order of the forward pass.
        compute_s: seconds of the simulated backward pass, spread over tensors of two and more dimensions.
        task: whose forward and backward pass takes the place of the simulated one.
    """

    def __init__(self, shapes: Mapping[str, list[int]], compute_s: float, task: Task | None = None) -> None:
        self.task = task
        self.names = list(shapes)
        self.values = [torch.zeros(shape) for shape in shapes.values()]
        self.grads = [torch.zeros(shape) for shape in shapes.values()]
        generator = torch.Generator().manual_seed(hvd.rank())
        self.given = [[torch.randn(s, generator=generator) for s in shapes.values()] for _ in range(_DIFFERENT)]
        layers = max(1, sum(len(shape) > 1 for shape in shapes.values()))
        self.compute_s = [compute_s / layers if len(shape) > 1 else 0.0 for shape in shapes.values()]
        self.steps = 0

    def contestant(self, method: str, params: dict[str, Any]) -> Contestant:
        parameters = [nn.Parameter(value) for value in self.values]
        named = list(zip(self.names, parameters, strict=True))
        stock = torch.optim.SGD(parameters, lr=0.1)
        if method in (HOROVOD, HOROVOD_FP16):
            kind = hvd.Compression.fp16 if method == HOROVOD_FP16 else hvd.Compression.none
            optimizer = hvd.DistributedOptimizer(stock, named_parameters=named, compression=kind)
            nbytes = sum(p.numel() for p in parameters) * (2 if method == HOROVOD_FP16 else 4)
            return Contestant(method, params, parameters, optimizer, nbytes)
        schedule = None
        if GRAVAC in params:  # every gain will do, so that it goes to the highest factor and stays there
            once = params[GRAVAC] == "once"
            schedule = GraVAC(cf_min=10, cf_max=1000, epsilon=0, omega=0, window=1, exact=not once)
        optimizer = DistributedOptimizer(
            stock,
            named,
            compression=method if method == AUTO else create(method, **own_parameters(params)),
            schedule=schedule,
            never_slower=params.get(NEVER_SLOWER),
            hierarchical=params.get(HIERARCHICAL, False),
        )
        return Contestant(method, params, parameters, optimizer)

    def step(self, contestant: Contestant) -> None:
        """One step of a contestant, from a common start; its time is kept."""
        self.steps += 1
        backward = self._prepared(contestant.parameters)
        hvd.allreduce(torch.zeros(1), name="start")
        contestant.resume()
        began = time.perf_counter()
        backward()
        contestant.optimizer.synchronize()
        contestant.step_s.append(time.perf_counter() - began)
        contestant.pause()
        record = getattr(contestant.optimizer, "last_step", None)
        if record is not None:
            contestant.nbytes = record.bytes_sent
            names = ("encode_s", "exchange_s", "wait_s", "decode_s")
            contestant.parts_s.append({name: getattr(record, name) for name in names})
        for parameter in contestant.parameters:
            parameter.grad = None

    def backward_s(self, steps: int, disturbed: bool = False) -> float:
        """Seconds of a step's computation that no optimizer watches: the slowest rank's median.

        Args:
            disturbed: while an allreduce of all gradients' size is on its way.
        """
        parameters = [nn.Parameter(value) for value in self.values]
        load = torch.zeros(sum(value.numel() for value in self.values) if disturbed else 1)
        taken = []
        for _ in range(steps):
            backward = self._prepared(parameters)
            hvd.allreduce(torch.zeros(1), name="start")
            handle = hvd.allreduce_async_(load, name="load")
            began = time.perf_counter()
            backward()
            taken.append(time.perf_counter() - began)
            hvd.synchronize(handle)
        return float(hvd.allgather(torch.tensor([float(np.median(taken))]), name="backward").max())

    def _prepared(self, parameters: list[nn.Parameter]) -> Callable[[], None]:
        """A step's computation, which gives every parameter its gradient."""
        for parameter, grad in zip(parameters, self.grads, strict=True):
            parameter.grad = grad.zero_()
        task = self.task
        if task is not None:
            return lambda: task.loss(dict(zip(self.names, parameters, strict=True))).backward()
        signal = torch.ones(1, requires_grad=True)
        for parameter, given, seconds in zip(
            parameters, self.given[self.steps % _DIFFERENT], self.compute_s, strict=True
        ):
            signal = _Ready.apply(signal, parameter, given, seconds)
        return signal.backward


class Task:
    """A training configuration's network and loss, on one batch of its data."""

    def __init__(self, configuration: Path) -> None:
        config = parts.resolve(load(configuration), hvd.size())
        self._model = parts.build_model(config)
        data = parts.build_data(config)
        self._loss = data.loss
        size = config.data.batch_size
        spread = {"seed": config.seed, "worker": hvd.rank(), "workers": hvd.size(), "batch_size": size}
        self._batch = next(batches(data.train, epoch=0, start=0, **spread))

    def loss(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """With these parameters in place of its own."""
        begin_text(self._model)
        output = torch.func.functional_call(self._model, dict(parameters), (self._batch.inputs,))
        return self._loss(output, self._batch.targets)


def run(plan: Mapping[str, Any], progress: Callable[[int, float], None]) -> list[dict[str, Any]]:
    """Let the contestants of a plan take turns, in another order each round, until the A/A interval is narrow enough.

    With ``plan["memory"]`` no round is taken: what the first steps add to the process is all that is looked at.

    Returns a row each, alike on all ranks but for rank 0's own figures.
    """
    task = None if plan["configuration"] is None else Task(Path(plan["configuration"]))
    arena = Arena(plan["shapes"], plan["compute_s"], task)
    contestants = [arena.contestant(method, params) for method, params in plan["methods"]]
    began = time.perf_counter()
    order = np.random.default_rng(0)
    rounds = 0
    for contestant in contestants:  # compiles, negotiates, fills residuals
        before = _resident_nbytes("VmRSS") if _reset_peak() else None
        climbing = GRAVAC_STEPS if GRAVAC in contestant.params else 0
        for _ in range(plan["warmup"] + climbing):
            arena.step(contestant)
        if before is not None:
            contestant.peak_nbytes = _resident_nbytes("VmHWM") - before
        while not contestant.settled:
            arena.step(contestant)
        contestant.step_s.clear()
        contestant.parts_s.clear()
    while not plan["memory"]:
        for number in order.permutation(len(contestants)):
            arena.step(contestants[number])
        rounds += 1
        latest = torch.tensor([[c.step_s[-1] for c in contestants] + [time.perf_counter() - began]])
        slowest = hvd.allgather(latest, name="times").amax(dim=0).tolist()
        for contestant, seconds in zip(contestants, slowest, strict=False):
            contestant.step_s[-1] = seconds
        low, high = interval(contestants[0].step_s, contestants[1].step_s)
        progress(rounds, max(1 - low, high - 1))
        settled = rounds >= plan["min_rounds"] and 1 - plan["tolerance"] <= low and high <= 1 + plan["tolerance"]
        if settled or (rounds >= _LEAST_ROUNDS and slowest[-1] > plan["limit_s"]):
            alone_s = arena.backward_s(_BACKWARD_STEPS)
            gamma = max(1.0, arena.backward_s(_DISTURBED_STEPS, disturbed=True) / alone_s)
            backward = {"backward_ms": 1e3 * alone_s, "gamma": gamma}
            return [_row(contestant, contestants[0], plan) | backward for contestant in contestants]
    return [{"peak_mb": None if c.peak_nbytes is None else c.peak_nbytes / 1e6} for c in contestants]


def _reset_peak() -> bool:
    """Let the process's peak begin anew. Returns whether the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_nbytes(field: str) -> int:
    """The process's resident memory, "VmRSS", or its peak, "VmHWM"."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def interval(reference_s: list[float], steps_s: list[float]) -> tuple[float, float]:
    """95 % interval, by bootstrap over rounds, of median(steps) / median(reference)."""
    reference, steps = np.asarray(reference_s), np.asarray(steps_s)
    drawn = np.random.default_rng(0).integers(len(steps), size=(_RESAMPLINGS, len(steps)))
    ratios = np.median(steps[drawn], axis=1) / np.median(reference[drawn], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _row(contestant: Contestant, dense: Contestant, plan: Mapping[str, Any]) -> dict[str, Any]:
    low, high = interval(contestant.step_s, dense.step_s)
    step_s = np.asarray(contestant.step_s)
    ours = bool(contestant.parts_s)
    parts = {
        f"{name.removesuffix('_s')}_ms": 1e3 * float(np.median([p[name] for p in contestant.parts_s])) if ours else None
        for name in ("encode_s", "exchange_s", "wait_s", "decode_s")
    }
    if not ours:  # all of its step but the backward pass is the exchange
        parts["exchange_ms"] = 1e3 * (float(np.median(step_s)) - plan["compute_s"])
    return {
        "method": contestant.method,
        "params": contestant.params,
        "bandwidth": plan["bandwidth"],
        "ranks": hvd.size(),
        "nbytes": contestant.nbytes,
        **parts,
        "step_ms": 1e3 * float(np.median(step_s)),
        "step_ms_quartiles": [1e3 * float(q) for q in np.percentile(step_s, [25, 75])],
        "speedup": float(np.median(dense.step_s) / np.median(step_s)),
        "speedup_interval": [low, high],
        "rounds": len(contestant.step_s),
    }


def main() -> None:
    plan_file, rows_file = map(Path, sys.argv[1:3])
    plan = json.loads(plan_file.read_text())
    torch.set_num_threads(1)
    if any(HIERARCHICAL in params for _, params in plan["methods"]):
        os.environ[DYNAMIC] = "1"
    hvd.init()

    def progress(rounds: int, spread: float) -> None:
        if hvd.rank() == 0:
            print(f"  round {rounds}: horovod against itself within {100 * spread:.1f} %", file=sys.stderr, flush=True)

    rows = run(plan, progress)
    if hvd.rank() == 0:
        rows_file.write_text(json.dumps(rows))
    hvd.shutdown()


if __name__ == "__main__":
    main()
