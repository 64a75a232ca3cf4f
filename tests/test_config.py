"""Configuration files: what is refused, and with which words; what resolves to what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from test_data_files import write_cifar10, write_cifar100
from training_runs import ROOT

from hvdcomp.config import ConfigError, RunConfig, fields, load, load_comparison, parse
from hvdcomp.training.comparison import plan
from hvdcomp.training.parts import resolve

CONFIG = """
model: {name: mlp, hidden: 32, layers: 1}
data: {name: digits, batch_size: 16}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
compression: {name: topk, cf: 20}
steps: 10
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def split(overrides: str) -> list[str]:
    return re.split(r" (?=[\w.]+=)", overrides)


FAULTS = [
    ("compresion=none", "'compresion'", "did you mean 'compression'", "allowed: model, data,"),
    ("optimizer.momentom=0.9", "'optimizer.momentom'", "did you mean 'momentum'", "allowed: name, lr,"),
    ("optimizer.learning_rate=1", "'optimizer.learning_rate'", "did you mean 'optimizer.lr'", "given 1"),
    ("lr=1", "'lr'", "did you mean 'optimizer.lr'", "given 1"),
    ("optimizer.lr=-1", "optimizer.lr", "greater than 0", "given -1"),
    ("optimizer.lr=fast", "optimizer.lr", "number", "given 'fast'"),
    ("optimizer.lr=.nan", "optimizer.lr", "finite", "given nan"),
    ("optimizer.momentum=1", "optimizer.momentum", "less than 1", "given 1"),
    ("optimizer=sgdd", "optimizer.name", "did you mean 'sgd'", "sgd, adam, adamw"),
    ("optimizer=[1]", "optimizer", "section with the keys name, lr", "given [1]"),
    ("granularity=tensors", "granularity", "did you mean 'tensor'", "tensor, bucket, model"),
    ("data.batch_size=1.5", "data.batch_size", "integer", "samples per worker and step"),
    ("data.batch_size='32'", "data.batch_size", "integer", "given '32'"),
    ("seed=true", "seed", "integer", "given True"),
    ("seed.x=1", "seed", "integer", "given {'x': 1}"),
    ("steps.x=1", "steps.x=1", "steps is a value (10)", "not a section"),
    ("exclude=1d", "exclude", "list", "given '1d'"),
    ("exclude=[3]", "exclude.0", "string", "given 3"),
    ("epochs=0", "epochs", "greater than or equal to 1", "passes over the training data"),
    ("schedule=null", "schedule", "section", "given None"),
    ("optimizer.nesterov=true optimizer.momentum=0", "optimizer", "nesterov needs a momentum", "momentum: 0.9"),
    ("optimizer=adam optimizer.momentum=.5", "optimizer", "belong to sgd", "adam has its own"),
    ("lr_schedule=step", "lr_schedule", "milestones belong to `step`", "given: step, []"),
    ("lr_schedule.milestones=[3]", "lr_schedule", "milestones belong to `step`", "given: constant, [3]"),
    ("lr_schedule.warmup_epochs=1 lr_schedule.warmup_steps=3", "lr_schedule", "goes with neither", "constant, 3"),
    ("lr_schedule=cosine lr_schedule.warmup_epochs=1", "lr_schedule", "goes with neither", "give warmup_steps alone"),
    ("steps", "'steps'", "key=value", "optimizer.lr=0.05"),
    ("=3", "'=3'", "key=value", ""),
    ("optimizer..lr=3", "'optimizer..lr=3'", "key=value", ""),
    ("steps=[1", "steps=[1", "not valid YAML", ""),
]


@pytest.mark.parametrize(("overrides", "names", "says", "also"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_of_form_names_the_field_and_what_is_allowed(
    config_file: Path, overrides: str, names: str, says: str, also: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file, split(overrides))
    assert names in str(caught.value)
    assert says in str(caught.value)
    assert also in str(caught.value)


MISFITS = [
    ("compression=topkk", "compression", "topk"),
    ("compression.cff=3", "compression", "did you mean 'cf'"),
    ("compression.cf=0.5", "compression", "cf must be >= 1"),
    ("compression={cf: 3}", "compression", "unknown parameter of compression 'none' 'cf'"),
    ("schedule=gravacs", "schedule", "gravac"),
    ("schedule=gravac schedule.epsilom=.2", "schedule", "epsilon"),
    ("schedule=gravac schedule.epsilon=2", "schedule", "epsilon must be"),
    ("schedule=gravac compression=qsgd", "schedule", "qsgd has none; take one of topk"),
    ("schedule=gravac compression={name: redsync, quantise: true}", "schedule", "does not fit an adaptive schedule"),
    ("schedule=gravac compression=fp16", "schedule", "fp16 has none"),
    ("never_slower=true compression=signum", "never_slower", "signum keeps momentum"),
    ("schedule=warmup compression=qsgd", "schedule", "warmup chooses compression factors, qsgd has none"),
    ("schedule=warmup schedule.epochs_each=0", "schedule", "epochs_each must be a whole number >= 1, got 0"),
    ("schedule=warmup schedule.epochs_each=2 schedule.steps_each=9", "schedule", "not both, got 9 and 2"),
    ("schedule=warmup schedule.cfs=[16,4]", "schedule", "cfs[1] must be >= 16, got 4"),
    ("schedule=warmup schedule.epochs=2", "schedule", "did you mean 'steps_each'"),
    ("schedule=gravac schedule.epochs_each=2", "schedule", "unknown parameter of schedule 'gravac' 'epochs_each'"),
    ("model=resnet", "model", "unknown model 'resnet'"),
    ("model=mpl", "model", "did you mean 'mlp'"),
    ("model.widht=3", "model", "mlp has no parameter 'widht'"),
    ("model.hidden=many", "model", "hidden must be of type int, given 'many'"),
    ("model.hidden=true", "model", "hidden must be of type int, given True"),
    ("model=nowhere:net", "model", "nowhere cannot be imported"),
    ("model=training_runs:noisy_nett", "model", "did you mean 'noisy_net'"),
    ("model=training_runs:ROOT", "model", "must be a function"),
    ("model=training_runs:not_a_model", "model", "must return a torch.nn.Module"),
    ("model=training_runs:broken", "model", "KeyError: 'inside' ("),
    ("model.inputs=65", "model mlp and data digits do not fit", "mat1 and mat2"),
    ("data=digts", "data", "did you mean 'digits'"),
    ("data.test_fraction=2.0", "data", "test_size"),
    ("data=training_runs:not_a_model", "data", "must return (train, test)"),
    ("data=training_runs:blobs data.samples=1", "do not fit", "1 training samples are too few for 2 workers"),
]


@pytest.mark.parametrize(("overrides", "names", "says"), MISFITS, ids=[misfit[0] for misfit in MISFITS])
def test_a_misfit_is_found_before_any_process_starts(config_file: Path, overrides: str, names: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load(config_file, split(overrides)), workers=2)
    assert names in str(caught.value)
    assert says in str(caught.value)


ACCEPTED = [
    ("compression=none", "compression", {"name": "none"}),
    ("compression.name=none", "compression", {"name": "none"}),
    ("compression.cf=30", "compression", {"name": "topk", "cf": 30, "error_feedback": True}),
    ("compression.name=topk", "compression", {"name": "topk", "cf": 20, "error_feedback": True}),
    ("optimizer.lr=1e-3", "optimizer", {"lr": 0.001, "momentum": 0.9}),
    ("optimizer=adam", "optimizer", {"name": "adam", "lr": 0.1, "momentum": 0.0}),
    ("data.name=training_runs:blobs", "data", {"batch_size": 16, "samples": 100}),
    ("data=training_runs:blobs", "data", {"batch_size": 32, "samples": 100}),
    ("model=cnn model.dropout=0", "model", {"name": "cnn", "dropout": 0, "channels": 32}),
    ("schedule=gravac schedule.window=7", "schedule", {"window": 7, "epsilon": 0.7, "policy": "exponential"}),
    ("schedule={name: warmup, steps_each: 9}", "schedule", {"steps_each": 9, "cfs": [4, 16, 64, 250, 1000]}),
    ("schedule=warmup data=training_runs:blobs", "schedule", {"steps_each": 4, "cf": None}),  # 100 samples by 32
    ("schedule={name: warmup, epochs_each: 3} data=training_runs:blobs", "schedule", {"steps_each": 12}),
    ("lr_schedule={name: step, milestones: [5, 8]}", "lr_schedule", {"milestones": [5, 8], "factor": 0.1}),
]


@pytest.mark.parametrize(("overrides", "section", "expected"), ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_overrides(config_file: Path, overrides: str, section: str, expected: dict[str, Any]) -> None:
    resolved = resolve(load(config_file, split(overrides))).model_dump()[section]
    assert resolved | expected == resolved


def test_no_compression_needs_no_other_schedule(config_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolved = resolve(load(config_file, ["schedule=gravac", "compression=none"]))
    assert resolved.schedule.name == "static"
    assert "gravac has nothing to choose" in caplog.text


@pytest.mark.parametrize(
    "overrides", [[], ["schedule=gravac"], ["schedule=warmup"], ["exclude=['*.bias']", "optimizer.lr=1e-5"]]
)
def test_the_resolved_file_loads_again_to_the_same(config_file: Path, tmp_path: Path, overrides: list[str]) -> None:
    resolved = resolve(load(config_file, overrides))
    again = tmp_path / "again.yaml"
    again.write_text(resolved.to_yaml())
    assert resolve(load(again)) == resolved
    assert load(again).to_yaml() == resolved.to_yaml()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimizer: {lr: 1, lr: 2}", "'lr' is given twice"),
        ("[1, 2]", "must hold `key: value` lines"),
        ("a: [", "not valid YAML"),
        ("optimizer: {lr: 0}\nepoch: 3", "2 faults"),
    ],
)
def test_faulty_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(path)


def test_a_missing_file_names_the_nearest(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*rum\.yaml \(did you mean '.*run\.yaml'"):
        load(config_file.with_name("rum.yaml"))


def test_an_empty_file_is_a_run_of_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load(path) == parse({"run_dir": "runs/empty"})


def test_every_field_is_documented() -> None:
    documented = {key: meaning for key, _, _, meaning in fields()}
    assert all(documented.values())
    assert {key.split(".")[0] for key in documented} == set(RunConfig.model_fields)


CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with little data in the form of each data set that users bring."""
    root = tmp_path_factory.mktemp("data")
    write_cifar10(root, "binary", samples=20)
    write_cifar100(root, "binary", samples=100)
    for part in ("train", "val"):
        (root / part / "n01").mkdir(parents=True)
        for number in range(100 if part == "train" else 1):
            Image.new("RGB", (8, 8)).save(root / part / "n01" / f"{number}.png")
    for pattern in ("ptb.{}.txt", "wiki.{}.tokens"):
        for part in ("train", "test"):
            (root / pattern.format(part)).write_text("one two three\n" * 1000)
    return root


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_configuration_resolves(path: Path, small_data: Path) -> None:
    if "\nvariants:" not in path.read_text():
        resolve(load(path), workers=4)
        return
    comparison = load_comparison(path)
    if comparison.base.data.name in ("cifar10", "cifar100", "imagenet", "ptb", "wikitext2"):
        comparison = load_comparison(path, [f"base.data.root={small_data}"])
    plan(comparison, comparison.workers)


def test_run_folders_of_configurations_differ() -> None:
    folders = [yaml.safe_load(path.read_text()).get("run_dir", path.stem) for path in CONFIGS]
    assert len(set(folders)) == len(folders)


def test_every_experiment_has_a_twin_on_embedded_data() -> None:
    """One for each of GraVAC's and SIDCo's networks and of Accordion's tables, and one for all times."""
    twins = {
        str(path.relative_to(ROOT / "configs")).removesuffix(".twin.yaml") for path in CONFIGS if ".twin" in path.name
    }
    for path in CONFIGS:
        if path.parent.name in ("gravac", "accordion"):
            assert f"{path.parent.name}/{re.split(r'-(?!lstm)|[.]', path.name)[0]}" in twins, path
    assert {"sidco/sidco", "utility/utility"} <= twins
    for twin in twins:
        base = load_comparison(ROOT / "configs" / f"{twin}.twin.yaml").base
        assert base.data.name in ("digits", "pydoc")


def test_auto_is_resolved_for_the_number_of_workers(config_file: Path) -> None:
    config = load(config_file, ["compression=auto", "schedule=static"])
    resolved = {workers: resolve(config, workers) for workers in (2, 4)}
    assert [resolved[workers].compression.name for workers in (2, 4)] == ["topk", "oktopk"]
    assert all(one.never_slower for one in resolved.values())
    assert not resolve(load(config_file, ["compression=topk", "schedule=static"])).never_slower


def test_a_comparison_is_no_run() -> None:
    with pytest.raises(ConfigError, match=r"compare-digits.yaml is a comparison, not a run: `hvdcomp compare "):
        load(ROOT / "configs" / "compare-digits.yaml")
