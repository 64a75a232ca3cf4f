"""The configuration of a training run, and of a comparison of several: a YAML file, `key=value` overrides, and one
validated schema for both.

What a name in it stands for (a model, a compressor, ...) and which parameters that takes is checked by
`hvdcomp.training.parts.resolve`; this module knows only the file's form.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the field, what was given and what is allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """`compression: none` is short for `compression: {name: none}`."""
        return {"name": value} if isinstance(value, str) and "name" in cls.model_fields else value


_Schema = TypeVar("_Schema", bound=_Section)


class _Choice(_Section):
    """A thing chosen by name; all other keys are its parameters."""

    model_config = ConfigDict(extra="allow")

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelChoice(_Choice):
    name: str = Field(
        "cnn",
        description="a model of `hvdcomp list models`, timm:NAME or torchvision:NAME where those are installed, or "
        "package.module:factory of a function that returns one",
    )


class DataChoice(_Choice):
    name: str = Field(
        "digits",
        description="a data set of `hvdcomp list datasets`, or package.module:factory of a function "
        "returning (train, test) or a hvdcomp.training.data.Data",
    )
    batch_size: int = Field(32, ge=1, description="samples per worker and step")
    readers: int = Field(0, ge=0, description="threads that read samples ahead, for image files; 0: none")


class CompressionChoice(_Choice):
    name: str = Field(
        "none", description="a method of `hvdcomp list compressors`; auto: top-k or Ok-Topk at CF 100, never_slower"
    )


class ScheduleChoice(_Choice):
    name: str = Field("static", description="a schedule of `hvdcomp list schedules`")


class OptimizerConfig(_Section):
    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="torch's optimizer of that name")
    lr: float = Field(0.1, gt=0, description="learning rate; see lr_schedule.scale_by_workers")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd; 0 is none")
    nesterov: bool = Field(False, description="Nesterov's form of the momentum, for sgd")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty (adamw: decoupled); 0 is none")
    clip_norm: float | None = Field(
        None, gt=0, description="the mean gradient's norm is cut down to it, after the exchange; null: it is not"
    )

    @model_validator(mode="after")
    def _possible(self) -> OptimizerConfig:
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd, {self.name} has its own; leave them out")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0, for example momentum: 0.9")
        return self


class LrScheduleConfig(_Section):
    name: Literal["constant", "step", "cosine"] = Field(
        "constant", description="step: times `factor` at each milestone; cosine: down to 0 at the end of the run"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear rise from 0 to lr at the start")
    warmup_epochs: float = Field(0.0, ge=0, description="the same in passes over the training data")
    scale_by_workers: bool = Field(
        False, description="the warm-up rises from lr to lr * workers, and all that follows is that much higher"
    )
    milestones: list[int] = Field([], description="steps (counted from 0) at which `step` multiplies the rate")
    milestone_epochs: list[float] = Field([], description="the same in passes over the training data")
    factor: float = Field(0.1, gt=0, lt=1, description="what `step` multiplies the rate by at each milestone")

    @model_validator(mode="after")
    def _possible(self) -> LrScheduleConfig:
        milestones = [*self.milestones, *self.milestone_epochs]
        if (self.name == "step") != bool(milestones):
            raise ValueError(f"milestones belong to `step`, which needs some; given: {self.name}, {milestones}")
        if self.warmup_epochs and (self.warmup_steps or self.name == "cosine"):
            raise ValueError(
                f"warmup_epochs goes with neither warmup_steps nor cosine; given: {self.name}, {self.warmup_steps}; "
                "give warmup_steps alone"
            )
        return self


class BatchScheduleConfig(_Section):
    name: Literal["fixed", "accordion", "smith"] = Field(
        "fixed",
        description="accordion: the small batch in critical regimes, else the large one, at a rate as much higher; "
        "smith: multiplied by what lr_schedule divides the rate by, which stays, up to the large batch",
    )
    low: int = Field(512, ge=1, description="small batch, the first one: samples of all workers in a step")
    high: int = Field(4096, ge=1, description="large batch, of accordion a multiple of low")
    eta: float = Field(0.5, ge=0, le=1, description="accordion: relative change of a gradient's norm that is critical")
    interval: int = Field(10, ge=1, description="accordion: epochs between two looks")
    lr_drop: float = Field(0.75, ge=0, lt=1, description="accordion: a rate that falls to this share is critical")
    shrinks: bool = Field(False, description="accordion: go back to the small batch in a critical regime")


class NetworkConfig(_Section):
    bandwidth_mbit: float | None = Field(
        None, gt=0, description="of every worker's link, Mbit/s; null: the real network, and times are measured"
    )
    latency_us: float = Field(50.0, ge=0, description="of one message")
    compute_ms: float = Field(10.0, gt=0, description="forward and backward pass of a step")


class RunConfig(_Section):
    """Everything that a run depends on besides the number of workers. Times are in steps unless said otherwise."""

    model: ModelChoice = Field(ModelChoice(), description="the network")
    data: DataChoice = Field(DataChoice(), description="what it learns")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="the optimizer that Horovod wraps")
    lr_schedule: LrScheduleConfig = Field(LrScheduleConfig(), description="how the learning rate changes")
    compression: CompressionChoice = Field(CompressionChoice(), description="how gradients travel")
    schedule: ScheduleChoice = Field(ScheduleChoice(), description="who chooses the compression factor")
    granularity: Literal["tensor", "bucket", "model"] = Field("tensor", description="what a compressor sees at once")
    bucket_mb: float = Field(25.0, gt=0, description="gradients that travel together, MiB")
    exclude: list[str] | None = Field(
        None,
        description='name patterns of parameters that stay dense; "1d": all of fewer than two dimensions; "<1024": all '
        "of fewer elements; null: what the method's paper does",
    )
    never_slower: bool = Field(
        False, description="exchange dense for as long as that is measured to be faster; compression: auto has it on"
    )
    hierarchical: bool | None = Field(
        False, description="dense inside a node, compressed between nodes; null: where nodes have several workers each"
    )
    network: NetworkConfig = Field(
        NetworkConfig(), description="a modelled network, whose times take the place of measured ones"
    )
    probe: str | None = Field(
        None, description="a file of `hvdcomp probe` of this configuration: the summary says how well it foretold steps"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of each target that is spread over all classes in training"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="of forward and backward passes (automatic mixed precision); fp16 with a scaled loss"
    )
    accumulate: int = Field(
        1, ge=1, description="batches of data.batch_size whose gradients are summed up before each exchange and step"
    )
    batch_schedule: BatchScheduleConfig = Field(
        BatchScheduleConfig(), description="who chooses the batch of a step, in multiples of data.batch_size"
    )
    epochs: int = Field(10, ge=1, description="length of the run in passes over the training data")
    steps: int | None = Field(None, ge=1, description="length of the run in steps; overrides `epochs`; null: not given")
    seed: int = Field(0, ge=0, lt=2**32, description="of initial weights, batch order and dropout")
    threads: int | None = Field(None, ge=1, description="CPU threads per worker; null: OMP_NUM_THREADS, else 1")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is a GPU, else CPU")
    run_dir: str | None = Field(None, description="folder of the run's files; null: runs/<name of the configuration>")
    evaluate_every: int = Field(100, ge=0, description="steps between evaluations; 0: only at the end")
    checkpoint_every: int = Field(100, ge=0, description="steps between checkpoints; 0: only at the end")
    check_replicas_every: int = Field(
        0, ge=0, description="steps between checks that all ranks hold equal parameters; 0: only at the end"
    )
    log_every: int = Field(10, ge=1, description="steps between points in TensorBoard; metrics.jsonl has every step")
    record_gradients: int = Field(
        0,
        ge=0,
        description="rank 0's raw gradients of so many steps, spread evenly over the run, are kept in "
        "run_dir/gradients",
    )

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        if self.record_gradients and self.precision == "fp16":
            raise ValueError("record_gradients goes with fp32 and bf16: in fp16 the gradients are of a scaled loss")
        if self.batch_schedule.name != "fixed" and (self.accumulate > 1 or self.schedule.name != "static"):
            raise ValueError(
                f"batch_schedule: {self.batch_schedule.name} chooses how many batches a step has: leave out accumulate "
                f"(given {self.accumulate}) and schedule (given {self.schedule.name})"
            )
        return self

    def to_yaml(self) -> str:
        """The file that loads to this configuration again."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


OF_EACH_RUN = ("seed", "run_dir")
"""Fields of a run that its comparison sets."""

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


class ComparisonConfig(_Section):
    """Configurations that differ from a common one, each to be trained with several seeds."""

    base: RunConfig = Field(RunConfig(), description="what all variants have in common, as in a file for `train`")
    variants: dict[str, dict[str, Any]] = Field(
        min_length=1, description="name: what differs from `base`, in the form of `base`; {} is `base` itself"
    )
    baseline: str = Field("dense", description="the variant that the others are compared with")
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        [0, 1, 2], min_length=1, description="every variant is trained once with each"
    )
    workers: int = Field(2, ge=1, description="of each run")
    networks: list[Annotated[float, Field(gt=0)]] = Field(
        [], description="Mbit/s of modelled networks on which times are compared; network.compute_ms goes with them"
    )
    tolerance: float = Field(
        0.005, gt=0, lt=1, description="a run has arrived when it is so near to the baseline, as a share of its score"
    )
    run_dir: str | None = Field(None, description="folder of all runs; null: runs/<name of the file>")

    @field_validator("base")
    @classmethod
    def _leaves_to_the_comparison(cls, base: RunConfig) -> RunConfig:
        _check_left_out("base", base.model_fields_set)
        return base

    @field_validator("variants")
    @classmethod
    def _names_folders(cls, variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, changed in variants.items():
            if not _FOLDER_NAME.fullmatch(name):
                raise ValueError(f"a name may hold letters, digits, '.', '_' and '-' (it names a folder), got {name!r}")
            _check_left_out(name, changed)
        return variants

    @field_validator("baseline")
    @classmethod
    def _is_a_variant(cls, baseline: str, info: ValidationInfo) -> str:
        variants = info.data.get("variants", {baseline: {}})
        if baseline not in variants:
            hint = did_you_mean(baseline, variants)
            raise ValueError(f"must be one of the variants ({', '.join(variants)}), got {baseline!r}{hint}")
        return baseline

    @field_validator("seeds")
    @classmethod
    def _differ(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"each must be given once, got {seeds}")
        return seeds

    def variant(self, name: str) -> RunConfig:
        """`base` with what the variant changes. Raises ConfigError for what it holds."""
        values = self.base.model_dump()
        for key, changed in self.variants[name].items():
            if isinstance(changed, Mapping) and _kind(RunConfig, key):
                for part in sorted(changed, key="name".__ne__):  # another name drops the parameters of the one before
                    _set(values, [key, part], changed[part], f"variants.{name}")
            else:
                _set(values, [key], changed, f"variants.{name}")
        return parse(values, f"variants.{name}")


def _check_left_out(where: str, keys: Iterable[str]) -> None:
    for key in OF_EACH_RUN:
        if key in keys:
            raise ValueError(f"{key} of {where}: leave it out, the comparison sets it for each run (seeds, run_dir)")


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `dotted.key=value` overrides, validate.

    Raises ConfigError when the file cannot be read, or for what it or an override holds.
    """
    return _load(path, overrides, RunConfig)


def load_comparison(path: Path | str, overrides: Sequence[str] = ()) -> ComparisonConfig:
    """The same for a comparison's file; its variants are validated too. Raises ConfigError."""
    comparison = _load(path, overrides, ComparisonConfig)
    for name in comparison.variants:
        try:
            comparison.variant(name)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return comparison


def _load(path: Path | str, overrides: Sequence[str], schema: type[_Schema]) -> _Schema:
    path = Path(path)
    values = _read(path)
    if schema is RunConfig and {"base", "variants"} <= set(values):
        raise ConfigError(f"{path} is a comparison, not a run: `hvdcomp compare {path}` trains its variants")
    for override in overrides:
        _apply(values, override)
    values.setdefault("run_dir", f"runs/{path.stem}")
    if values["run_dir"] is None:
        values["run_dir"] = f"runs/{path.stem}"
    return _parse(values, str(path), schema)


def parse(values: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Validate a tree of values. Raises ConfigError with one line per fault, headed by `source`."""
    return _parse(values, source, RunConfig)


def _parse(values: Mapping[str, Any], source: str, schema: type[_Schema]) -> _Schema:
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        faults = [_explain(fault, schema) for fault in error.errors()]
    if len(faults) == 1:
        raise ConfigError(f"{source}: {faults[0]}")
    raise ConfigError("\n  ".join([f"{source}: {len(faults)} faults", *faults]))


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """ " (did you mean 'lr'?)", or nothing where no allowed name is near."""
    nearest = difflib.get_close_matches(str(given), list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[tuple[str, str, Any, str]]:
    """(dotted key, type, default, meaning) of every field, sections unfolded."""
    rows: list[tuple[str, str, Any, str]] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += fields(kind, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, _type_name(kind), field.default, field.description or ""))
    return rows


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (1e-3 is a number, not a string), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"line {node.start_mark.line + 1}: key {key!r} is given twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str, what: str) -> Any:
    """The value that a text stands for. Raises ConfigError, headed by `what`, where it is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{what} is not valid YAML: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [str(path.with_name(p.name)) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(f"there is no file {path}{did_you_mean(str(path), siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    values = read_yaml(text, str(path))
    if not isinstance(values or {}, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, it holds {_brief(values)}")
    return values or {}


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{override!r} is no override: write key=value, for example optimizer.lr=0.05")
    _set(values, parts, read_yaml(text, override), override)


def _set(values: dict[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    """Set a nested value; a section that is given as its name alone is opened first."""
    *path, last = parts
    for part in path:
        values[part] = _opened(values.get(part), part, override)
        values = values[part]
    if last == "name" and values.get(last) != value and path:
        _drop_params(values, path[-1])
    values[last] = value


def _opened(section: Any, key: str, override: str) -> dict[str, Any]:
    if section is None or isinstance(section, Mapping):
        return dict(section or {})
    if isinstance(section, str):
        return {"name": section}
    raise ConfigError(f"{override}: {key} is a value ({_brief(section)}), not a section")


def _drop_params(values: dict[str, Any], section: str) -> None:
    """Another name has parameters of its own."""
    kind = _kind(RunConfig, section)
    if kind is not None and issubclass(kind, _Choice):
        for stale in set(values) - set(kind.model_fields):
            del values[stale]


def _explain(fault: ErrorDetails, schema: type[BaseModel]) -> str:
    """One fault in one line: the field, what was given, what is allowed."""
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        allowed = list(_section_at(fault["loc"][:-1], schema).model_fields)
        hint = _nearest_key(str(fault["loc"][-1]), allowed, schema)
        return f"unknown key {path!r}, given {_brief(fault['input'])}{hint}; allowed: {', '.join(allowed)}"
    if fault["type"] == "missing":
        return f"{path} is missing{_meaning(fault['loc'], schema)}"
    if fault["type"] == "value_error":
        return f"{path}: {fault['ctx']['error']}"
    if fault["type"] == "model_type":
        allowed = list(_section_at(fault["loc"], schema).model_fields)
        return f"{path} must be a section with the keys {', '.join(allowed)}; given {_brief(fault['input'])}"
    if fault["type"] == "literal_error":
        allowed = fault["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        hint = did_you_mean(str(fault["input"]), allowed)
        return f"{path} must be one of {', '.join(allowed)}; given {_brief(fault['input'])}{hint}"
    wanted = fault["msg"].removeprefix("Input should be ")
    return f"{path} must be {wanted}; given {_brief(fault['input'])}{_meaning(fault['loc'], schema)}"


def _nearest_key(given: str, allowed: Sequence[str], schema: type[BaseModel]) -> str:
    """The nearest key of this section, else the one elsewhere that has this name, or that speaks of it."""
    known = {key: meaning for key, _, _, meaning in fields(schema)}
    elsewhere = [key for key in known if key.endswith(f".{given}")]
    described = [key for key, meaning in known.items() if given.replace("_", " ").lower() in meaning]
    return did_you_mean(given, allowed) or next((f" (did you mean {k!r}?)" for k in elsewhere + described), "")


def _section_at(location: Sequence[int | str], schema: type[BaseModel]) -> type[BaseModel]:
    section = schema
    for part in location:
        kind = _kind(section, str(part))
        if kind is None:
            break
        section = kind
    return section


def _kind(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section that a key stands for; None where it stands for a value, or for nothing."""
    field = section.model_fields.get(key)
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _meaning(location: Sequence[int | str], schema: type[BaseModel]) -> str:
    """ " (samples per worker and step)": the field's description, if the location names one."""
    names = [part for part in location if isinstance(part, str)]
    field = _section_at(names[:-1], schema).model_fields.get(names[-1]) if names else None
    return f" ({field.description})" if field and field.description else ""


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _type_name(kind: Any) -> str:
    if getattr(kind, "__origin__", None) is Literal:
        return " | ".join(kind.__args__)
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return text.replace("None", "null")
