"""What was measured on a cluster, as a file: `probe.json`, written by `hvdcomp probe`, read by `hvdcomp plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvdcomp.config import ConfigError
from hvdcomp.costmodel.cluster import Cluster, Curve, fit, network_of
from hvdcomp.costmodel.collectives import Network, collective_s
from hvdcomp.costmodel.model import Workload
from hvdcomp.costmodel.rates import Cost, Rates

FORMAT = 2
"""Of the file; a change that older readers would misread counts it up."""
_RESAMPLINGS = 500


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Measured(_Part):
    """A fitted figure and its 95 % interval."""

    value: float = Field(ge=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)

    @property
    def spread(self) -> float:
        """Half the interval over the value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


class Collective(_Part):
    """A kind of collective: medians of its times by size (Horovod's cycle left out), and the line through them.

    ``bandwidth`` is in bits/s, ``latency`` in seconds of one message.
    """

    nbytes: list[int] = Field(min_length=2)
    seconds: list[float] = Field(min_length=2)
    bandwidth: Measured
    latency: Measured


class Pair(_Part):
    """Two workers, and the bits/s of an allreduce between them alone."""

    workers: tuple[int, int]
    bandwidth: float = Field(gt=0)


class Codec(_Part):
    """What a method costs: seconds of each tensor, element and byte of payload."""

    encode: tuple[float, float, float]
    decode: tuple[float, float, float]

    @classmethod
    def of(cls, rates: Rates) -> Codec:
        return cls(**{
            name: (cost.unit_s, cost.element_s, cost.byte_s)
            for name, cost in (("encode", rates.encode), ("decode", rates.decode))
        })  # fmt: skip

    def rates(self) -> Rates:
        return Rates(Cost(*self.encode), Cost(*self.decode))


class Model(_Part):
    """A configuration's model: what a worker computes in a step, seconds."""

    name: str
    batch_size: int
    shapes: dict[str, list[int]]
    backward_s: float = Field(ge=0)
    rest_s: float = Field(ge=0)
    gamma: float = Field(ge=1)
    bucket_nbytes: list[int]

    def workload(self) -> Workload:
        return Workload(self.shapes, self.backward_s, self.rest_s)


class Probe(_Part):
    """The file.

    Attributes:
        hvdcomp_probe: :data:`FORMAT`.
        hosts: facts about the first worker's machine.
        cycle_s: what a single small operation takes beyond its collective: Horovod's cycle.
        tensor_s: a worker's work for each tensor beside its collective: a hook, Python, Horovod's queues.
        busy_factor: how many times as long an allreduce takes while its workers compute.
        memory_bandwidth: of a copy, bytes/s.
        slowest_pair: None where pairs were not measured.
        rates: by :func:`hvdcomp.costmodel.rates.key_of`.
    """

    hvdcomp_probe: int
    workers: int = Field(ge=1)
    per_node: int = Field(ge=1)
    host: dict[str, str]
    collectives: dict[str, Collective]
    cycle_s: float = Field(ge=0)
    tensor_s: float = Field(ge=0)
    busy_factor: float = Field(ge=1)
    memory_bandwidth: float = Field(gt=0)
    slowest_pair: Pair | None
    rates: dict[str, Codec]
    model: Model | None

    def network(self) -> Network:
        """The line through allreduces. Raises ConfigError for a world of one, which has none."""
        if "allreduce" not in self.collectives:
            raise ConfigError(
                "the probe is of one worker, which has no network: give --bandwidth and --workers, or probe with -np 2"
            )
        line = self.collectives["allreduce"]
        return Network(line.bandwidth.value, line.latency.value)

    def cluster(self, workers: int | None = None, network: Network | None = None) -> Cluster:
        """The cluster that was probed, or one of another number of workers by the formulas.

        Where that number fills no whole nodes of the probed size, each worker counts as a node.

        Args:
            network: in place of the one that was probed, whose times say nothing of it; one worker has probed none.
        """
        chosen, alone = workers or self.workers, not self.collectives
        times = {kind: Curve(self.workers, tuple(c.nbytes), tuple(c.seconds)) for kind, c in self.collectives.items()}
        probed = Cluster(
            chosen,
            network or self.network(),
            times,
            gamma=self.model.gamma if self.model is not None and not alone else Cluster.gamma,
            busy_factor=self.busy_factor,
            cycle_s=Cluster.cycle_s if alone else self.cycle_s,
            tensor_s=Cluster.tensor_s if alone else self.tensor_s,
            memory_bandwidth=self.memory_bandwidth,
            per_node=self.per_node if chosen % self.per_node == 0 else 1,
        )
        return probed if network is None else probed.on(network)

    def codec_rates(self) -> dict[str, Rates]:
        return {key: codec.rates() for key, codec in self.rates.items()}

    def conversion(self, workers: int) -> str | None:
        """What is to be said where another number of workers is asked about."""
        if workers == self.workers:
            return None
        return (
            f"measured with {self.workers} workers, converted to {workers}: times of collectives by the formulas of "
            "rings, everything else as it was"
        )


def load(path: Path) -> Probe:
    """Read a probe. Raises ConfigError where the file is none that this version can read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}: `hvdcomp probe -np N -o {path}` writes one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no probe, or broken ({error}): measure again with `hvdcomp probe`") from None
    found = values.get("hvdcomp_probe") if isinstance(values, dict) else None
    if found is None:
        raise ConfigError(f"{path} is no probe: it has no field hvdcomp_probe; `hvdcomp probe` writes one")
    if found != FORMAT:
        raise ConfigError(
            f"{path} is a probe of format {found!r}, this version of hvdcomp reads format {FORMAT}: measure again with "
            "`hvdcomp probe`"
        )
    try:
        return Probe.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{path} is a broken probe: {where}: {fault['msg']}; measure again") from None


def fitted(kind: str, workers: int, times: Mapping[int, Sequence[float]], cycle_s: float, least_s: float) -> Collective:
    """A collective from its times by size.

    Args:
        times: seconds of each repetition, the slowest worker's, by bytes; Horovod's cycle included.
        cycle_s, least_s: what is taken off for the cycle, and what a small operation takes at least.
    """
    sizes = sorted(times)
    own = {size: np.maximum(np.asarray(times[size]) - cycle_s, max(least_s, 1e-6)) for size in sizes}
    medians = [float(np.median(own[size])) for size in sizes]
    draw = np.random.default_rng(0)
    drawn = [_network(kind, workers, sizes, medians)]
    for _ in range(_RESAMPLINGS):
        resampled = [float(np.median(draw.choice(own[size], len(own[size])))) for size in sizes]
        drawn.append(_network(kind, workers, sizes, resampled))
    bandwidths, latencies = (np.array([getattr(n, name) for n in drawn]) for name in ("bandwidth", "latency"))
    return Collective(
        nbytes=sizes, seconds=medians, bandwidth=_interval(bandwidths), latency=_interval(latencies)
    )  # fmt: skip


def pair_bandwidth(nbytes: int, seconds: float) -> float:
    """bits/s of an allreduce between two workers."""
    return collective_s("allreduce", nbytes, 2, Network(1.0)) / seconds


def _network(kind: str, workers: int, sizes: Sequence[int], seconds: Sequence[float]) -> Network:
    return network_of(kind, workers, *fit(sizes, seconds))


def _interval(values: Any) -> Measured:
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Measured(value=float(values[0]), low=float(low), high=float(high))
