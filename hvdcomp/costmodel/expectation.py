"""What a run's steps were expected to take, by a probe: for the run's own summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdcomp.config import ConfigError, RunConfig
from hvdcomp.costmodel import probe
from hvdcomp.costmodel.model import Method, Workload, predict
from hvdcomp.costmodel.rates import UnknownRates


def expected_step_s(config: RunConfig, shapes: Mapping[str, Sequence[int]], workers: int) -> float:
    """Seconds of a step of this run; of an adaptive or switching run, of the compression that it names.

    Args:
        config: resolved, with a probe.
        shapes: of the model's trained tensors.

    Raises:
        ConfigError: the probe is none of this model and batch size, or does not know what the method costs.
    """
    path = Path(str(config.probe)).expanduser()
    measured = probe.load(path)
    model = measured.model
    if model is None:
        raise ConfigError(f"probe: {path} measured no model: `hvdcomp probe CONFIG -np {workers} -o {path}` does")
    if model.shapes != {name: list(shape) for name, shape in shapes.items()}:
        raise ConfigError(f"probe: {path} measured the steps of {model.name} with other tensors than this model's")
    if model.batch_size != config.data.batch_size:
        raise ConfigError(
            f"probe: {path} measured steps of {model.batch_size} samples, this run has {config.data.batch_size}"
        )
    exclude = None if config.exclude is None else tuple(config.exclude)
    workload = Workload(
        model.shapes, model.backward_s, model.rest_s, config.granularity, config.bucket_mb, exclude
    )  # fmt: skip
    method = Method.of(config.compression.name, config.compression.params)
    try:
        return predict(workload, measured.cluster(workers), method, measured.codec_rates()).step_s
    except UnknownRates as error:
        raise ConfigError(f"probe: {path}: {error}") from error
