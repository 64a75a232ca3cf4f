"""A modelled network: what each step would have taken on links of a given speed, the same on every machine.

The arithmetic of a run is real; only its clock is not. A step takes its computation, what the methods cost, and its
collectives by the cost model; so runs over several networks can be compared on one busy machine, and a run whose
decisions do not depend on time can be priced afterwards for any network, from its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdcomp.config import NetworkConfig
from hvdcomp.costmodel import Network
from hvdcomp.costmodel.paper import dense_step_s
from hvdcomp.exchange import StepRecord

CODEC_NS = {
    "fp16": 0.70,
    "bf16": 1.29,
    "topk": 1.01,
    "dgc": 1.62,
    "redsync": 1.49,
    "mstopk": 1.09,
    "gaussiank": 0.86,
    "threshold": 3.88,
    "sidcoe": 1.05,
    "sidcogp": 1.13,
    "sidcop": 1.03,
    "randomk": 0.99,
    "artopk": 0.83,
    "oktopk": 1.24,
    "powersgd": 1.84,
    "gradiveq": 4.59,
    "signsgd": 1.77,
    "signum": 1.99,
    "efsignsgd": 1.84,
    "onebit": 1.83,
    "qsgd": 2.05,
    "terngrad": 2.28,
    "natural": 3.55,
    "int8": 4.04,
    "atomo": 1577.0,
}
"""Nanoseconds to encode and decode an element, by `hvdcomp bench kernels` on one CPU thread (docs/compressors.md)."""


@dataclass(frozen=True)
class Times:
    """What a step takes, in seconds."""

    compute_s: float
    compress_s: float
    wait_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.compress_s + self.wait_s


def step_times(step: StepRecord | Mapping[str, Any], network: NetworkConfig, workers: int, bucket_mb: float) -> Times:
    """The times of one step.

    A step that compresses nothing overlaps with the backward pass, all buckets but the last. Any other begins its
    exchange when the backward pass is over. A schedule that evaluates two levels pays for one.

    Args:
        step: its record, or its line of metrics.jsonl.
        network: with a bandwidth.
        bucket_mb: MiB of gradients that travel together.

    Raises:
        ValueError: the network has no bandwidth, or the line is of a version that did not say what is needed.
    """
    values = step if isinstance(step, Mapping) else vars(step)
    if network.bandwidth_mbit is None:
        raise ValueError("network.bandwidth_mbit is null: a step without a network cannot be modelled")
    if values.get("messages") is None:
        raise ValueError(f"step {values['step']} does not say its messages: stock Horovod or an older hvdcomp wrote it")
    link = Network(1e6 * network.bandwidth_mbit, 1e-6 * network.latency_us)
    compute_s = 1e-3 * network.compute_ms
    if not values["elements"]:
        dense_s = dense_step_s(values["bytes_dense"], workers, link, compute_s, bucket_mb * 2**20)
        return Times(compute_s, 0.0, dense_s - compute_s)
    compress_s = 1e-9 * sum(CODEC_NS.get(method, 0.0) * numel for method, numel in values["elements"].items())
    return Times(compute_s, compress_s, link.latency * values["messages"] + link.transfer_s(values["bytes_received"]))


class ModelledClock:
    """Seconds on the modelled network; a step has passed when the optimizer's record is another than before.

    That record's times become the modelled ones, too.
    """

    def __init__(self, network: NetworkConfig, workers: int, bucket_mb: float) -> None:
        self._network, self._workers, self._bucket_mb = network, workers, bucket_mb
        self._now = 0.0
        self._seen: StepRecord | None = None
        self._optimizer: Any = None

    def watch(self, optimizer: Any) -> None:
        """Run by the steps of this optimizer."""
        self._optimizer = optimizer

    def __call__(self) -> float:
        record = None if self._optimizer is None else self._optimizer.last_step
        if record is not None and record is not self._seen:
            self._seen = record
            times = step_times(record, self._network, self._workers, self._bucket_mb)
            record.encode_s, record.decode_s, record.decide_s = times.compress_s, 0.0, 0.0
            record.wait_s = record.exchange_s = times.wait_s
            self._now += times.total_s
        return self._now
