"""From names in a configuration to objects, and the check that they exist and fit, before any process is started."""

from __future__ import annotations

import functools
import logging
import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hvdcomp import compressors, schedules
from hvdcomp.buckets import Layout
from hvdcomp.checks import check_count
from hvdcomp.compressors import Compressor
from hvdcomp.config import ConfigError, OptimizerConfig, RunConfig
from hvdcomp.plugin import AUTO, as_schedule, automatic, layout_of
from hvdcomp.schedules import Assigning, Auto, Schedule, Warmup
from hvdcomp.training.batch_size import BatchSizes
from hvdcomp.training.data import Data, as_data, epoch_spans, test_batches
from hvdcomp.training.datasets import DATASETS
from hvdcomp.training.models import MODELS
from hvdcomp.training.registry import Entry, Registry

log = logging.getLogger(__name__)


def resolve(config: RunConfig, workers: int = 1) -> RunConfig:
    """The configuration with every default spelled out.

    Makes the model, the data, the compressor and the schedule once, and passes one sample through.

    Raises ConfigError, naming the field, when one of them cannot be made or they do not fit each other.
    """
    config = _without_idle_schedule(_with_defaults(config, workers))
    compressor, schedule = build_compressor(config), build_schedule(config)
    layout = _make_layout(schedule, compressor, config)
    chooses = schedule.adaptive or schedule.cf_at(0) is not None
    if chooses and not isinstance(schedule, Assigning) and not compressor.takes_factors:
        able = ", ".join(name for name, cls in compressors.available().items() if cls.takes_factors)
        raise ConfigError(
            f"schedule: {config.schedule.name} chooses compression factors, {config.compression.name} has none; "
            f"take one of {able}, or schedule: static"
        )
    _make("schedule", lambda: as_schedule(schedule, compressor), {})
    if config.never_slower and any(method.keeps_gradients for method in layout.methods):
        raise ConfigError(
            f"never_slower: {config.compression.name} keeps momentum, which a dense step would not keep up to date; "
            "leave never_slower out, or take a method without momentum of its own"
        )
    _make("batch_schedule", lambda: BatchSizes(config, workers), {})
    _check_fit(config.model_dump_json(include={"model", "data", "label_smoothing"}), workers)
    return config


def _make_layout(schedule: Schedule, compressor: Compressor, config: RunConfig) -> Layout:
    try:
        return layout_of(schedule, compressor, config.granularity, config.bucket_mb, config.exclude)
    except ValueError as error:
        raise ConfigError(f"{'schedule' if isinstance(schedule, Assigning) else 'granularity'}: {error}") from error


def build_model(config: RunConfig) -> nn.Module:
    """The network, its weights drawn from the run's seed."""
    entry = _find(MODELS, "model", config.model.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = _make("model", entry.factory, config.model.params)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {entry.name} must return a torch.nn.Module, it returned {model!r:.100}")
    return model


def build_data(config: RunConfig) -> Data:
    entry = _find(DATASETS, "data", config.data.name)
    return _make("data", lambda **params: as_data(entry.factory(**params), entry.name), config.data.params)


def build_compressor(config: RunConfig) -> Compressor:
    choice = config.compression
    return _make("compression", lambda **params: compressors.create(choice.name, **params), choice.params)


def build_schedule(config: RunConfig) -> Schedule:
    choice = config.schedule
    return _make("schedule", lambda **params: schedules.create(choice.name, **params), choice.params)


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer, before Horovod wraps it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    adaptive = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return adaptive(parameters, lr=config.lr, weight_decay=config.weight_decay)


def training_loss(data: Data, config: RunConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The data set's loss, with label smoothing where it is configured (TypeError of a loss that knows none)."""
    smoothing = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    return functools.partial(data.loss, **smoothing)


def steps_of_epoch(data: Data, config: RunConfig, workers: int, start: int = 0, passes: int | None = None) -> int:
    """Steps from `start` samples on (of all workers) to the epoch's end. Raises ValueError for too many workers.

    Args:
        passes: batches of each worker in a step; None: as configured.
    """
    spans = epoch_spans(data.train, start, workers, config.data.batch_size)
    return math.ceil(len(spans) / (passes or config.accumulate))


def _with_defaults(config: RunConfig, workers: int) -> RunConfig:
    model = _resolved_params(MODELS, "model", config.model.name, config.model.params)
    data = _resolved_params(DATASETS, "data", config.data.name, config.data.params)
    own = {"name": config.data.name, "batch_size": config.data.batch_size, "readers": config.data.readers}
    if config.compression.name == AUTO and not config.compression.params:
        chosen = _described(automatic(workers))
        switch = config.schedule.name != Auto.name  # which looks at dense steps itself
        config = RunConfig.model_validate(config.model_dump() | {"compression": chosen, "never_slower": switch})
    config = RunConfig.model_validate(
        config.model_dump()
        | {"model": {"name": config.model.name, **model}, "data": {**own, **data}}
        | {"compression": _described(build_compressor(config))}
    )
    config = _with_steps_per_epoch(_with_steps_each(config, workers), workers)
    return RunConfig.model_validate(config.model_dump() | {"schedule": build_schedule(config).describe()})


def _with_steps_each(config: RunConfig, workers: int) -> RunConfig:
    """A warm-up's `epochs_each` as `steps_each`; one epoch where the configuration says neither, as in the paper."""
    given = {"epochs_each": None, "steps_each": None} | config.schedule.params
    epochs = given.pop("epochs_each")
    if config.schedule.name != Warmup.name or (epochs is None and given["steps_each"] is not None):
        return config
    if given["steps_each"] is not None:
        raise ConfigError(f"schedule: give steps_each or epochs_each, not both, got {given['steps_each']} and {epochs}")
    hint = "epochs for which each factor holds"
    epochs = _make("schedule", lambda: check_count("epochs_each", 1 if epochs is None else epochs, hint=hint), {})
    data = build_data(config)
    per_epoch = _make("data", lambda: steps_of_epoch(data, config, workers), {})
    given["steps_each"] = epochs * per_epoch
    return RunConfig.model_validate(config.model_dump() | {"schedule": {"name": Warmup.name, **given}})


def _with_steps_per_epoch(config: RunConfig, workers: int) -> RunConfig:
    """The length of an epoch for a schedule that wants to know it, where the configuration does not say it."""
    wanted = schedules.REGISTRY.get(config.schedule.name, Schedule).parameter_docs
    if "steps_per_epoch" not in wanted or config.schedule.params.get("steps_per_epoch") is not None:
        return config
    data = build_data(config)
    chosen = config.schedule.model_dump() | {
        "steps_per_epoch": _make("data", lambda: steps_of_epoch(data, config, workers), {})
    }
    return RunConfig.model_validate(config.model_dump() | {"schedule": chosen})


def _described(compressor: Compressor) -> dict[str, Any]:
    """Its name and parameters."""
    return {"name": compressor.name, **{name: getattr(compressor, name) for name in compressor.parameters()}}


def _without_idle_schedule(config: RunConfig) -> RunConfig:
    """`compression=none` alone must do: the schedule of the file then has nothing to choose."""
    assigns = issubclass(schedules.REGISTRY.get(config.schedule.name, Schedule), Assigning)  # methods of its own
    if config.compression.name != "none" or config.schedule.name == "static" or assigns:
        return config
    log.warning("compression is none, so schedule %s has nothing to choose and is left out", config.schedule.name)
    return RunConfig.model_validate(config.model_dump() | {"schedule": "static"})


@functools.lru_cache(maxsize=16)
def _check_fit(made_of: str, workers: int) -> None:
    """Pass a sample through; once for all configurations that differ elsewhere, as those of a comparison do."""
    config = RunConfig.model_validate_json(made_of)
    model, data = build_model(config), build_data(config)
    try:
        steps_of_epoch(data, config, workers)
        inputs, targets = next(test_batches(data.test, worker=0, workers=1, batch_size=1))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = model.eval()(inputs)
            training_loss(data, config)(outputs, targets)
    except Exception as error:
        raise ConfigError(
            f"model {config.model.name} and data {config.data.name} do not fit: {_located(error)}"
        ) from error


def _find(registry: Registry[Any], field: str, name: str) -> Entry[Any]:
    try:
        return registry.find(name)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error


def _resolved_params(registry: Registry[Any], field: str, name: str, params: dict[str, Any]) -> dict[str, Any]:
    entry = _find(registry, field, name)
    try:
        return entry.resolve(params)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error


def _make(field: str, factory: Callable[..., Any], params: dict[str, Any]) -> Any:
    """Call a factory; whatever it raises becomes a ConfigError that names the field and the parameters."""
    try:
        return factory(**params)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{field}: {error}") from error
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in params.items()) or "no parameters"
        raise ConfigError(f"{field} cannot be made with {given}: {_located(error)}") from error


def _located(error: Exception) -> str:
    """The error and where it was raised: a user's own factory has no other trace."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
