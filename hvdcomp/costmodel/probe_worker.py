"""One rank of `hvdcomp probe`: times Horovod's collectives, methods, and a model's steps, all ranks at the same time.

python -m hvdcomp.costmodel.probe_worker PLAN PROBE.json
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvdcomp.buckets import Layout
from hvdcomp.config import load
from hvdcomp.costmodel.cluster import HALVES
from hvdcomp.costmodel.measure import default_methods, measure_rates, memory_bandwidth
from hvdcomp.costmodel.probe import FORMAT, Codec, Collective, Model, Pair, Probe, fitted, pair_bandwidth
from hvdcomp.costmodel.traffic import specs_of
from hvdcomp.horovod_api import DYNAMIC
from hvdcomp.training.checkpoint import write_atomically
from hvdcomp.training.worker import run_guarded

SIZES = tuple(4**power for power in range(5, 15))
"""Bytes: 1 KiB to 256 MiB."""
SIZE_BUDGET_S, LONGEST_S = 1.0, 1.0
"""Seconds for the repetitions of one size; a size that would take longer than the second is left out."""
MOST_GATHERED = 2**29
"""Bytes of all workers in an allgather: each holds them, and Horovod takes less than 2 GiB."""
LEAST, MOST = 5, 20
"""Repetitions of a size."""
BURST = 16
"""Small operations at once."""
TENSORS = 64
"""Whose hooks are timed together."""
ROTATED = 2**26
"""Bytes whose parts take turns in a collective of few bytes."""
OVERLAPPED_S, BUSY_NBYTES = 0.2, 2**22
"""Of an allreduce alone, at most, that is timed while workers compute, and of what they work on until it is there."""
PAIR_NBYTES = 2**22
MOST_ROUNDS_OF_PAIRS = 15
"""In a round every worker has another partner."""
MODEL_STEPS = 8

Times = dict[int, list[float]]


class Steps:
    """Progress for whoever watches rank 0."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def next(self, what: str) -> None:
        self._done += 1
        if hvd.rank() == 0:
            print(f"hvdcomp-probe {self._done}/{self._total} {what}", file=sys.stderr, flush=True)


def run(plan: Mapping[str, Any]) -> Probe:
    """Measure what a plan names; collective, the same on all ranks but for rank 0's own figures.

    Args:
        plan: "methods", pairs of a name and parameters, None for all; "config", a file's path and overrides, or None.
    """
    alone = hvd.size() == 1
    steps = Steps(2 + (0 if alone else 6) + (plan["config"] is not None))
    steps.next("memory")
    copied = _least(memory_bandwidth())
    cycle_s = own_s = tensor_s = 0.0
    busy_factor = 1.0
    collectives: dict[str, Collective] = {}
    pair = None
    if not alone:
        steps.next("Horovod's cycle")
        cycle_s, own_s = _cycle()
        tensor_s = _of_a_tensor()
        gathered = tuple(nbytes for nbytes in SIZES if nbytes * hvd.size() <= MOST_GATHERED)
        for kind, sizes in (("allreduce", SIZES), ("allgather", gathered), (HALVES, SIZES)):
            steps.next(kind)
            collectives[kind] = fitted(kind.split()[0], hvd.size(), _times(kind, sizes), cycle_s, own_s)
        steps.next("overlap")
        busy_factor = _busy_factor(collectives["allreduce"])
        steps.next("pairs")
        pair = _slowest_pair(collectives["allreduce"], cycle_s)
    methods = default_methods() if plan["methods"] is None else [(name, params) for name, params in plan["methods"]]
    steps.next(f"{len(methods)} methods")
    rates = measure_rates(methods, _meet)
    model = None
    if plan["config"] is not None:
        steps.next("model")
        model = _model(*plan["config"])
    return Probe(
        hvdcomp_probe=FORMAT,
        workers=hvd.size(),
        per_node=hvd.local_size(),
        host=_host(),
        collectives=collectives,
        cycle_s=cycle_s,
        tensor_s=tensor_s,
        busy_factor=busy_factor,
        memory_bandwidth=copied,
        slowest_pair=pair,
        rates={key: Codec.of(found) for key, found in rates.items()},
        model=model,
    )


# -- collectives


def _meet() -> None:
    """Wait for all."""
    hvd.allreduce(torch.zeros(1), name="hvdcomp.probe.meet")


def _repeated(action: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each repetition, the slowest rank's; all begin together."""
    own = []
    for _ in range(repeats):
        _meet()
        began = time.perf_counter()
        action()
        own.append(time.perf_counter() - began)
    return [
        float(s) for s in hvd.allgather(torch.tensor([own], dtype=torch.float64), name="hvdcomp.probe.times").amax(0)
    ]


def _agreed(value: float) -> float:
    """Rank 0's."""
    return float(hvd.broadcast(torch.tensor([value], dtype=torch.float64), 0, name="hvdcomp.probe.agreed")[0])


def _least(value: float) -> float:
    """The smallest of all ranks'."""
    return float(hvd.allgather(torch.tensor([value], dtype=torch.float64), name="hvdcomp.probe.least").min())


def _operation(kind: str, nbytes: int, process_set: Any, name: str) -> Callable[[], Any]:
    """Each time of other memory, as in training, where no cache holds all gradients."""
    dtype = {"allgather": torch.uint8, HALVES: torch.float16}.get(kind, torch.float32)
    kept = torch.ones(max(nbytes, min(ROTATED, 2 * MOST * nbytes)) // dtype.itemsize, dtype=dtype)
    parts = cycle(kept.split(nbytes // dtype.itemsize))
    if kind == "allgather":
        return lambda: hvd.allgather(next(parts), name=name, process_set=process_set)
    return lambda: hvd.allreduce_(next(parts), name=name, process_set=process_set)


def _times(kind: str, sizes: Sequence[int]) -> Times:
    """Times of each size, of as many as the budgets allow."""
    times: Times = {}
    expected_s = 0.0
    for nbytes in sizes:
        if expected_s > LONGEST_S and len(times) >= 2:
            break
        action = _operation(kind, nbytes, hvd.global_process_set, f"hvdcomp.probe.{kind}.{nbytes}")
        _repeated(action, 1)  # negotiates
        (once_s,) = _repeated(action, 1)
        repeats = int(_agreed(min(MOST, max(LEAST, SIZE_BUDGET_S / once_s))))
        times[nbytes] = [once_s, *_repeated(action, repeats - 1)]
        expected_s = _agreed(statistics.median(times[nbytes]) * sizes[1] / sizes[0])
    return times


def _cycle() -> tuple[float, float]:
    """Seconds that a single small allreduce waits for Horovod's cycle, and that it takes itself. Several of a cycle,
    kept from being fused by different factors, tell these apart."""
    spent_s = {}
    for count in (1, BURST):
        tensors = [torch.zeros(16) for _ in range(count)]

        def action(tensors: list[Tensor] = tensors) -> None:
            handles = [
                hvd.allreduce_async_(t, name=f"hvdcomp.probe.burst.{i}", op=hvd.Sum, prescale_factor=1 + i / BURST)
                for i, t in enumerate(tensors)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        _repeated(action, 2)
        spent_s[count] = statistics.median(_repeated(action, MOST))
    own_s = max(0.0, spent_s[BURST] - spent_s[1]) / (BURST - 1)
    return max(0.0, spent_s[1] - own_s), own_s


def _of_a_tensor() -> float:
    """Seconds that a tensor costs a worker beside its collective: a hook, Python, Horovod's queues."""
    alone, watched = ([nn.Parameter(torch.zeros(16)) for _ in range(TENSORS)] for _ in range(2))
    named = [(f"hvdcomp.probe.tensor.{number}", parameter) for number, parameter in enumerate(watched)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(watched, lr=0.0), named_parameters=named)

    def backward_s(parameters: list[nn.Parameter]) -> float:
        loss = torch.stack([parameter.sum() for parameter in parameters]).sum()
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    more_s = []
    for _ in range(MOST):
        _meet()
        more_s.append(backward_s(watched) - backward_s(alone))
        optimizer.synchronize()
    return max(0.0, _slowest(statistics.median(more_s))) / TENSORS


def _busy_factor(line: Collective) -> float:
    """How many times as long an allreduce takes while all workers compute."""
    times = zip(line.nbytes, line.seconds, strict=True)
    nbytes = max((size for size, seconds in times if seconds <= OVERLAPPED_S), default=line.nbytes[0])
    action = _operation("allreduce", nbytes, hvd.global_process_set, "hvdcomp.probe.alone")
    tensor = torch.ones(nbytes // 4)
    values = torch.ones(BUSY_NBYTES // 4)

    def busily() -> None:
        handle = hvd.allreduce_async_(tensor, name="hvdcomp.probe.busily")
        while not hvd.poll(handle):
            values.mul_(1.0)
        hvd.synchronize(handle)

    taken_s = [(*_repeated(action, 1), *_repeated(busily, 1)) for _ in range(1 + LEAST)][1:]  # the first negotiates
    alone_s, busily_s = (statistics.median(column) for column in zip(*taken_s, strict=True))
    return max(1.0, busily_s / alone_s)


def _slowest_pair(line: Collective, cycle_s: float) -> Pair | None:
    """The pair of workers with the least bandwidth, in rounds of disjoint pairs; None where process sets are off."""
    size = hvd.size()
    if size == 2:
        return Pair(workers=(0, 1), bandwidth=line.bandwidth.value)
    if os.environ[DYNAMIC] in ("", "0"):
        return None
    found = []
    for pairs in rounds_of_pairs(size)[:MOST_ROUNDS_OF_PAIRS]:
        sets = [hvd.add_process_set(list(pair)) for pair in pairs]
        seconds = 0.0
        for pair, process_set in zip(pairs, sets, strict=True):
            if hvd.rank() in pair:
                action = _operation("allreduce", PAIR_NBYTES, process_set, f"hvdcomp.probe.pair.{pair}")
                action()
                taken = []
                for _ in range(LEAST):
                    began = time.perf_counter()
                    action()
                    taken.append(time.perf_counter() - began)
                seconds = statistics.median(taken)
        everyone = hvd.allgather(torch.tensor([seconds], dtype=torch.float64), name="hvdcomp.probe.pairs").tolist()
        for pair, process_set in zip(pairs, sets, strict=True):
            slower_s = max(max(everyone[rank] for rank in pair) - cycle_s, 1e-9)
            found.append(Pair(workers=pair, bandwidth=pair_bandwidth(PAIR_NBYTES, slower_s)))
            hvd.remove_process_set(process_set)
    return min(found, key=lambda pair: pair.bandwidth)


def rounds_of_pairs(size: int) -> list[list[tuple[int, int]]]:
    """Every pair of workers once, in rounds in which each worker is in one pair at most (the circle method)."""
    circle = list(range(size + size % 2))
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < size])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


# -- a model


def _model(path: str, overrides: list[str]) -> Model:
    """What a configuration's step takes without an exchange, and by how much communication slows down backward."""
    from hvdcomp.training import parts
    from hvdcomp.training.data import batches

    config = parts.resolve(load(Path(path), overrides), hvd.size())
    torch.set_num_threads(config.threads or torch.get_num_threads())
    data, network = parts.build_data(config), parts.build_model(config)
    optimizer = parts.build_optimizer(config.optimizer, network)
    shapes = {name: list(p.shape) for name, p in network.named_parameters() if p.requires_grad}
    chosen = {"seed": config.seed, "epoch": 0, "start": 0, "worker": hvd.rank(), "workers": hvd.size()}
    batch = next(iter(batches(data.train, **chosen, batch_size=config.data.batch_size)))

    def step() -> tuple[float, float]:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = data.loss(network(batch.inputs), batch.targets)
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        optimizer.step()
        return end - middle, middle - began + time.perf_counter() - end

    step()
    _meet()
    alone = [step() for _ in range(MODEL_STEPS)]
    backward_s, rest_s = (_slowest(statistics.median(column)) for column in zip(*alone, strict=True))
    with _communicating(sum(4 * p.numel() for p in network.parameters())):
        disturbed_s = _slowest(statistics.median([step()[0] for _ in range(MODEL_STEPS)]))
    layout = Layout(
        parts.build_compressor(config), config.granularity, config.bucket_mb, config.exclude
    )  # fmt: skip
    buckets = layout.buckets(specs_of(shapes))
    return Model(
        name=config.model.name,
        batch_size=config.data.batch_size,
        shapes=shapes,
        backward_s=backward_s,
        rest_s=rest_s,
        gamma=max(1.0, disturbed_s / backward_s) if hvd.size() > 1 else 1.0,
        bucket_nbytes=[sum(spec.nbytes for spec in bucket.members) for bucket in buckets],
    )


def _slowest(value: float) -> float:
    return float(hvd.allgather(torch.tensor([value], dtype=torch.float64), name="hvdcomp.probe.slowest").max())


@contextmanager
def _communicating(nbytes: int) -> Iterator[None]:
    """As many allreduces of a model's size on their way as may pass meanwhile; they are waited for at the end."""
    if hvd.size() == 1:
        yield
        return
    handles = [
        hvd.allreduce_async_(torch.zeros(max(1, nbytes // 4)), name=f"hvdcomp.probe.load.{i}")
        for i in range(MODEL_STEPS)
    ]
    yield
    for handle in handles:
        hvd.synchronize(handle)


def _host() -> dict[str, str]:
    import horovod

    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "horovod": str(horovod.__version__),
        "controller": "mpi" if hvd.mpi_enabled() else "gloo",
        "threads": str(torch.get_num_threads()),
    }


def main() -> int:
    plan, probe_file = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]))
    os.environ.setdefault(DYNAMIC, "1")  # pairs are process sets
    hvd.init()
    probe = run(json.loads(plan))
    if hvd.rank() == 0:
        write_atomically(probe_file, (probe.model_dump_json(indent=1) + "\n").encode())
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="hvdcomp: %(message)s", stream=sys.stderr)
    sys.exit(run_guarded(main))
