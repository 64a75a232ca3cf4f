"""What `plan` and `whatif` are asked about, from their options: a workload, a cluster, and what methods cost on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdcomp.bench.exchange import bits_per_s, shapes_of
from hvdcomp.config import ConfigError, RunConfig, load
from hvdcomp.costmodel import paper, probe
from hvdcomp.costmodel.cluster import Cluster
from hvdcomp.costmodel.collectives import Network
from hvdcomp.costmodel.devices import DEVICES
from hvdcomp.costmodel.model import Workload
from hvdcomp.costmodel.rates import Rates

LATENCY_S = 2e-5
"""Of a message, where nothing is said: tens of microseconds are usual in a data centre."""


@dataclass(frozen=True)
class Spread:
    """How far off inputs may be: standard deviations of their logarithms."""

    bandwidth: float = 0.1
    latency: float = 0.5
    codec: float = 0.2
    compute: float = 0.05
    model: float = 0.05
    """What the model itself is off by."""


@dataclass(frozen=True)
class Options:
    """What a user may say; None is left to the probe, or to a default.

    Attributes:
        model: a known one's name; with ``config`` its own is taken.
        bandwidth, inside: such as "10gbit", of a worker's link and of the workers of a node.
        latency, compute, rest: seconds.
    """

    config: Path | None = None
    overrides: Sequence[str] = ()
    model: str | None = None
    probe: Path | None = None
    bandwidth: str | None = None
    latency: float | None = None
    workers: int | None = None
    compute: float | None = None
    rest: float | None = None
    gamma: float | None = None
    device: str | None = None
    per_node: int | None = None
    inside: str | None = None


@dataclass(frozen=True)
class Question:
    """A step that somebody wants to be shorter.

    Attributes:
        notes: what was assumed or converted, a sentence each.
    """

    name: str
    workload: Workload
    cluster: Cluster
    rates: Mapping[str, Rates]
    spread: Spread
    notes: list[str] = field(default_factory=list)
    config: RunConfig | None = None


def ask(options: Options) -> Question:
    """The question that options describe.

    Raises:
        ConfigError: one is not allowed, or one is missing.
    """
    if (options.config is None) == (options.model is None):
        raise ConfigError("give a training configuration, or --model with the name of a network, one of the two")
    measured = None if options.probe is None else probe.load(options.probe)
    try:
        return _asked(options, measured)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _asked(options: Options, measured: probe.Probe | None) -> Question:
    notes: list[str] = []
    if options.device is not None and options.device not in DEVICES:
        raise ConfigError(f"there are no figures of device {options.device!r}; known: {', '.join(DEVICES)}")
    config = None if options.config is None else load(options.config, options.overrides)
    name, workload = _workload(options, config, measured, notes)
    cluster = _cluster(options, measured, notes)
    if measured is not None and options.device is None:
        return Question(name, workload, cluster, measured.codec_rates(), _spread(measured), notes, config)
    device = DEVICES[options.device or "v100"]
    notes.append(f"what methods cost: {device.source}")
    cluster = replace(cluster, tensor_s=device.tensor_s, memory_bandwidth=device.memory_bandwidth, busy_factor=1.0)
    return Question(name, workload, cluster, device.rates, Spread(), notes, config)


def _workload(
    options: Options, config: RunConfig | None, measured: probe.Probe | None, notes: list[str]
) -> tuple[str, Workload]:
    name = str(options.model) if config is None else config.model.name
    shapes: Mapping[str, Sequence[int]] = shapes_of(str(options.model) if config is None else str(options.config))
    known = measured.model if measured is not None else None
    compute_s, rest_s = options.compute, options.rest
    if compute_s is None and known is not None:
        if {k: list(v) for k, v in shapes.items()} != known.shapes:
            raise ConfigError(
                f"the probe measured the steps of {known.name}, not of {name}: give --compute, or probe again"
            )
        compute_s, rest_s = known.backward_s, known.rest_s if rest_s is None else rest_s
        if config is not None and config.data.batch_size != known.batch_size:
            raise ConfigError(
                f"the probe measured steps of {known.batch_size} samples, the configuration has "
                f"{config.data.batch_size}: probe again with it"
            )
    if compute_s is None and name == "resnet50" and options.device in (None, "v100") and measured is None:
        compute_s = paper.BACKWARD_S
        notes.append(f"backward pass: {1e3 * compute_s:.0f} ms, batch 64 on one V100 (Agarwal et al. 2022, table 2)")
    if compute_s is None:
        raise ConfigError(
            "how long a backward pass takes is not known: give --compute SECONDS, or --probe of a probe of the "
            "configuration (hvdcomp probe CONFIG -np N)"
        )
    layout: dict[str, Any] = {}
    if config is not None:
        exclude = None if config.exclude is None else tuple(config.exclude)
        layout = {"granularity": config.granularity, "bucket_mb": config.bucket_mb, "exclude": exclude}
    return name, Workload(shapes, compute_s, rest_s or 0.0, **layout)


def _cluster(options: Options, measured: probe.Probe | None, notes: list[str]) -> Cluster:
    if measured is None:
        if options.bandwidth is None or options.workers is None:
            raise ConfigError("the network is not known: give --bandwidth and --workers, or --probe")
        if options.latency is None:
            notes.append(f"latency: {1e6 * LATENCY_S:.0f} us a message, which is usual in a data centre")
        network = Network(_bandwidth(options.bandwidth), LATENCY_S if options.latency is None else options.latency)
        cluster = Cluster(options.workers, network)
    else:
        workers = options.workers or measured.workers
        converted = measured.conversion(workers)
        if converted is not None:
            notes.append(converted)
        if options.bandwidth is None and options.latency is None:
            cluster = measured.cluster(workers)
        else:
            cluster = measured.cluster(workers, _given_network(options, measured))
            notes.append("the network is the one that was given, not the probe's")
    changed: dict[str, Any] = {}
    if options.gamma is not None:
        changed["gamma"] = options.gamma
    if options.per_node is not None:
        changed["per_node"] = options.per_node
    if options.inside is not None:
        changed["inside"] = Network(_bandwidth(options.inside), cluster.network.latency)
    return replace(cluster, **changed)


def _given_network(options: Options, measured: probe.Probe) -> Network:
    """What was said of it, the rest as it was probed; by one worker a latency was not."""
    bandwidth = measured.network().bandwidth if options.bandwidth is None else _bandwidth(options.bandwidth)
    if options.latency is not None:
        return Network(bandwidth, options.latency)
    return Network(bandwidth, measured.network().latency if measured.collectives else LATENCY_S)


def _bandwidth(text: str) -> float:
    found = bits_per_s(text)
    if found is None:
        raise ConfigError("a bandwidth must be a number here, such as 10gbit: without a limit nothing is to be gained")
    return found


def _spread(measured: probe.Probe) -> Spread:
    """Of what was measured: the fits' intervals are about two deviations to each side."""
    lines = measured.collectives.values()
    least = 0.02
    return Spread(
        bandwidth=max([least, *(line.bandwidth.spread / 2 for line in lines)]),
        latency=max([least, *(min(1.0, line.latency.spread / 2) for line in lines)]),
        codec=0.1,
        compute=0.03,
    )
