"""Training: data shards, models, records, checkpoints; real runs that resume, fail and are interrupted."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import TensorDataset
from training_runs import CONFIG, blobs, command, environment, hvdcomp, rows, summary, train

from hvdcomp.config import ConfigError, LrScheduleConfig, parse
from hvdcomp.training import checkpoint
from hvdcomp.training.checkpoint import CheckpointError, find_latest, load_own, load_shared, write_atomically
from hvdcomp.training.data import as_data, batches, cut, digits, epoch_order
from hvdcomp.training.data import test_batches as batches_of_tests
from hvdcomp.training.gradients import load_gradients
from hvdcomp.training.lr import Position, lr_factor
from hvdcomp.training.metrics import PARTS, MetricsLog, Totals
from hvdcomp.training.models import MODELS, digest, parameter_count
from hvdcomp.training.parts import build_data, build_model
from hvdcomp.training.progress import figures
from hvdcomp.training.run_folder import RunFolder
from hvdcomp.training.verdict import sentence
from hvdcomp.training.worker import seed_everything

# -- data


@pytest.mark.parametrize("samples", [8, 9, 63, 64, 65, 100, 1437])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_every_sample_once_and_the_same_number_of_steps(samples: int, workers: int, batch_size: int) -> None:
    dataset = TensorDataset(torch.arange(samples), torch.arange(samples))
    shards = [
        list(batches(dataset, seed=3, epoch=1, start=0, worker=w, workers=workers, batch_size=batch_size))
        for w in range(workers)
    ]
    assert len({len(shard) for shard in shards}) == 1
    seen = [int(i) for shard in shards for batch in shard for i in batch.inputs]
    assert sorted(seen) == list(range(samples))
    least = min(2, batch_size) if samples >= 2 * workers else 1
    for step in zip(*shards, strict=True):
        assert min(batch.samples for batch in step) >= least
        everything = torch.cat([batch.inputs for batch in step]).double().mean()
        weighted = sum(batch.weight * batch.inputs.double().mean() for batch in step) / workers
        assert float(weighted) == pytest.approx(float(everything))
        assert len({batch.end for batch in step}) == 1


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_epoch_goes_on_where_it_was_left(workers: int) -> None:
    dataset = TensorDataset(torch.arange(103), torch.arange(103))

    def shard(start: int) -> list[tuple[list[int], float]]:
        whole = batches(dataset, seed=0, epoch=4, start=start, worker=0, workers=workers, batch_size=8)
        return [(batch.inputs.tolist(), batch.weight) for batch in whole]

    for steps in range(103 // (8 * workers)):
        assert shard(steps * 8 * workers) == shard(0)[steps:]


def test_another_world_goes_on_without_overlap_or_loss() -> None:
    before = [epoch_order(100, 0, 0)[lo:hi] for lo, hi in cut(100, 0, 4, 5)[:2]]
    after = [epoch_order(100, 0, 0)[lo:hi] for lo, hi in cut(100, 40, 3, 5)]
    assert sorted(torch.cat([*before, *after]).tolist()) == list(range(100))


def test_too_few_samples_for_the_workers() -> None:
    with pytest.raises(ValueError, match="3 training samples are too few for 4 workers: use at most 3"):
        cut(3, 0, 4, 1)


def test_orders_differ_between_epochs_and_seeds_and_leave_the_generators_alone() -> None:
    before = torch.get_rng_state()
    orders = [epoch_order(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    dataset = TensorDataset(torch.arange(9), torch.arange(9))
    list(batches(dataset, seed=0, epoch=0, start=0, worker=0, workers=1, batch_size=2))
    assert len({tuple(order) for order in orders}) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_digits_are_split_once_for_all_seeds() -> None:
    one, other = digits(), digits()
    assert (len(one.train), len(one.test)) == (1437, 360)  # type: ignore[arg-type]
    assert torch.equal(one.test[:][0], other.test[:][0])
    held_out = {tuple(image.flatten().tolist()) for image in one.test[:][0]}
    assert not held_out & {tuple(image.flatten().tolist()) for image in one.train[:][0]}
    assert min(torch.bincount(one.test[:][1])) >= 34  # the same share of every class
    assert not torch.equal(one.test[:][0], digits(split_seed=1).test[:][0])


def test_the_test_set_is_shared_out_whole() -> None:
    test = blobs(37)[0]
    shares = [batches_of_tests(test, worker=w, workers=3, batch_size=5) for w in range(3)]
    assert sum(len(targets) for share in shares for _, targets in share) == 37


def test_a_users_data() -> None:
    data = as_data(blobs(), "few")
    assert len(data.train) == 100  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"few must return \(train, test\)"):
        as_data([1, 2], "few")


# -- models, learning rate


@pytest.mark.parametrize(("name", "count"), [("cnn", 151_306), ("mlp", 26_122)])
def test_models(name: str, count: int) -> None:
    model = MODELS.find(name).factory()
    assert parameter_count(model) == count
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_digest_sees_every_bit() -> None:
    model = MODELS.find("mlp").factory(hidden=4)
    before = digest(model)
    bias = model[1].bias
    with torch.no_grad():
        bias.view(torch.int32)[0] += 1
        assert digest(model) != before
        bias.view(torch.int32)[0] -= 1
    assert digest(model) == before


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"name": "step", "milestones": [1, 3], "factor": 0.5}, [1, 0.5, 0.5, 0.25, 0.25]),
        ({"name": "cosine"}, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"name": "cosine", "warmup_steps": 2}, [0.5, 1, 1, 0.5, 0]),
        ({"warmup_epochs": 1.0}, [0.5, 1, 1, 1, 1]),
        ({"name": "step", "milestone_epochs": [1.0, 1.5]}, [1, 1, 0.1, 0.01, 0.01]),
        ({"scale_by_workers": True}, [3, 3, 3, 3, 3]),
        ({"scale_by_workers": True, "warmup_steps": 4}, [1.5, 2, 2.5, 3, 3]),
        ({"scale_by_workers": True, "warmup_epochs": 1.0, "name": "step", "milestones": [3]}, [2, 3, 3, 0.3, 0.3]),
        ({"scale_by_workers": True, "name": "cosine"}, [3, 2.560660, 1.5, 0.439340, 0]),
    ],
)
def test_learning_rates(config: dict[str, Any], expected: list[float]) -> None:
    """Of three workers, two steps an epoch."""
    at = [Position(step, 4, step / 2, (step + 1) / 2, workers=3) for step in range(5)]
    factors = [lr_factor(LrScheduleConfig(**config), position) for position in at]
    assert factors == pytest.approx(expected, abs=1e-6)


# -- records


def row(step: int = 1, **changed: Any) -> dict[str, Any]:
    times = dict.fromkeys(PARTS, 0.25) | {"encode_s": 0.2, "decode_s": 0.05, "exchange_s": 0.3, "iteration_s": 1.0}
    sizes = {"bytes_sent": 10, "bytes_dense": 80, "bytes_received": 10}
    what = {"step": step, "epoch": 0, "loss": 0.5, "lr": 0.1, "cf": 20.0, "decision": 1, "skipped": False}
    return what | {"levels": [10.0, 20.0], "gains": [0.8, 0.6]} | sizes | times | changed


def totals(*steps: dict[str, Any]) -> Totals:
    result = Totals()
    for step in steps:
        result.add(step, {"weight": (step["bytes_sent"] / 2, 40), "bias": (1, 40)})
    return result


def test_totals() -> None:
    sums = totals(row(), row(cf=1.0, bytes_sent=80), row(skipped=True, gains=None))
    assert (sums.steps, sums.skipped, sums.bytes_sent, sums.bytes_dense) == (3, 1, 100, 240)
    assert sums.cf_steps == {"20": 2, "1": 1}
    assert sums.cf_mean == pytest.approx(41 / 3)
    assert sums.times["compute_s"] == 0.75
    assert sums.layer_bytes == {"weight": [50, 120], "bias": [3, 120]}
    assert Totals(**json.loads(json.dumps(sums.state_dict()))) == sums


@pytest.mark.filterwarnings("default")  # tensorboard's own
def test_metrics_go_on_behind_a_step_and_stay_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, log_every=1)
    for step in (1, 2, 3):
        log.write(row(step, loss=float("nan")))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the disk was full
    again = MetricsLog(tmp_path, log_every=1, after_step=2)
    again.write(row(3))
    again.close()
    assert [(line["step"], line["loss"]) for line in rows(tmp_path)] == [(1, None), (2, None), (3, 0.5)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_figures_show_what_was_sent() -> None:
    text = figures(row(), totals(row()), "accuracy 0.9000")
    assert text == "loss 0.500  accuracy 0.9000  CF 20  gain 0.60  bytes saved 88%"
    assert "dense  gain 0.80" in figures(row(cf=1.0, decision=-1), totals(row()), None)


@pytest.mark.parametrize(
    ("workers", "steps", "dense_s", "says"),
    [
        (1, [row()], 0.1, "One worker sends nothing"),
        (2, [row(cf=1.0, bytes_sent=80)], 0.1, "Nothing was compressed; a dense exchange takes about 100 ms"),
        (2, [row()], 0.8, "Compression paid here: about 750 ms a step"),
        (2, [row(bytes_sent=100, bytes_dense=98)], 0.8, "102 % of the bytes were sent."),
        (2, [row()], 0.25, "did not pay here: about 750 ms a step to compress, exchange and wait, against 250 ms"),
        (2, [row(bytes_received=70, bytes_dense=1e6)], 0.25, "8 times fewer bytes were sent, which would pay on"),
        (9, [row(bytes_received=200)], 0.25, "no network would change that"),
    ],
)
def test_the_verdict(workers: int, steps: list[dict[str, Any]], dense_s: float, says: str) -> None:
    result = sentence(totals(*steps), workers, dense_s)
    if "fewer" in says:  # 8 (1e6 - 70) bits / 0.5 s
        assert "a network slower than about 16 Mbit/s" in result
    else:
        assert says in result


def test_the_verdict_on_a_modelled_network_says_so() -> None:
    compressed, dense = (sentence(totals(step), 2, 0.8, mbit=100) for step in (row(), row(cf=1.0, bytes_sent=80)))
    assert compressed.startswith("Compression paid on the modelled network of 100 Mbit/s: ")
    assert "measured" not in compressed
    assert dense.endswith("a dense exchange takes about 800 ms on the modelled network of 100 Mbit/s.")


# -- checkpoints


def everyone_succeeds(text: str) -> list[str]:
    return [text, ""]


def save(root: Path, step: int, **changed: Any) -> Path:
    content = {"shared": {"x": torch.full((2,), float(step))}, "own": {"worker": 0}}
    given = {"worker": 0, "workers": 1, "gather": lambda text: [text], **content} | changed
    return checkpoint.save(root, step, **given)


def latest_step(root: Path) -> int:
    latest = find_latest(root)
    assert latest is not None
    assert float(load_shared(latest)["x"][0]) == latest.step
    return latest.step


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step)
        assert latest_step(tmp_path) == step
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("which", range(6))
def test_a_disk_that_fills_up_at_any_write_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, which: int
) -> None:
    save(tmp_path, 1)
    calls = iter(range(100))
    real = os.fsync if call == "fsync" else Path.replace

    def failing(*arguments: Any) -> Any:
        if next(calls) == which:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, call, failing) if call == "fsync" else monkeypatch.setattr(Path, call, failing)
    try:
        save(tmp_path, 2)
    except CheckpointError as error:
        message = str(error)
    else:
        message = ""
    monkeypatch.undo()
    if message:
        assert "step 2 could not be written: OSError: [Errno 28] No space left" in message
        assert latest_step(tmp_path) in (1, 2)  # 2 where no more than the folder's own sync failed
    else:
        assert latest_step(tmp_path) == 2
    assert not list(tmp_path.rglob("*.part"))


def test_a_checkpoint_counts_only_with_every_ranks_part(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step 2 could not be written: OSError: rank 1's disk"):
        save(tmp_path, 2, workers=2, gather=lambda text: [text, "OSError: rank 1's disk is full"])
    assert latest_step(tmp_path) == 1
    assert not (tmp_path / "step-000002").exists()


def test_a_killed_save_is_swept_up(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000002" / "rank-0.pt").write_bytes(b"half")
    assert latest_step(tmp_path) == 1
    checkpoint.discard_incomplete(tmp_path)
    assert [folder.name for folder in tmp_path.glob("step-*")] == ["step-000001"]


def test_broken_checkpoints_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, workers=2, gather=everyone_succeeds)
    with pytest.raises(CheckpointError, match="lacks the file of rank 1"):
        find_latest(tmp_path)
    save(tmp_path, 1, workers=2, worker=1, shared=None, gather=everyone_succeeds)
    latest = find_latest(tmp_path)
    assert latest is not None
    (folder / "rank-1.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"rank-1\.pt cannot be read"):
        load_own(latest, 1)
    (tmp_path / "latest").write_text("nonsense")
    with pytest.raises(CheckpointError, match="latest cannot be read"):
        find_latest(tmp_path)


def test_an_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_generators_are_restored_through_a_file(tmp_path: Path) -> None:
    device = torch.device("cpu")
    seed_everything(5, worker=1)
    np.random.standard_normal()  # leaves a second number in store
    save(tmp_path, 1, own=checkpoint.rng_state(device))
    expected = (random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
    latest = find_latest(tmp_path)
    assert latest is not None
    seed_everything(6, worker=0)
    checkpoint.restore_rng(load_own(latest, 0), device)
    assert (random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()) == expected


# -- run folders


@pytest.fixture
def config() -> Any:
    return parse({"compression": "topk", "steps": 3})


def test_an_earlier_run_is_moved_aside(tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run"
    for number in range(3):
        with closing(RunFolder(path)) as folder:
            folder.start(config)
        (path / "summary.json").write_text(str(number))
    assert [(tmp_path / name / "summary.json").read_text() for name in ("run.1", "run.2", "run")] == ["0", "1", "2"]
    assert f"the earlier run in {path} is now in {path}.2" in caplog.text


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, config: Any) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no run of hvdcomp: give another run_dir"):
        RunFolder(tmp_path).start(config)
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_dir_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    done = hvdcomp("train", str(file), f"run_dir={file}/run")
    assert (done.code, "Traceback" in done.err) == (1, False)
    assert f"run_dir: {file}/run cannot be used (Not a directory): give another" in done.err


def test_two_jobs_do_not_share_a_folder(tmp_path: Path, config: Any) -> None:
    with closing(RunFolder(tmp_path / "run")) as first:
        first.start(config)
        save(first.checkpoints, 1)
        for action in ("start", "resume"):
            with pytest.raises(ConfigError, match="another job is writing to"):
                getattr(RunFolder(tmp_path / "run"), action)(config)
    with closing(RunFolder(tmp_path / "run")) as second:
        second.resume(config)


def test_resuming_needs_a_checkpoint_and_the_same_configuration(tmp_path: Path, config: Any) -> None:
    with closing(RunFolder(tmp_path / "run")) as folder:
        with pytest.raises(ConfigError, match="nothing to resume"):
            folder.resume(config)
        folder.start(config)
        save(folder.checkpoints, 1)
        folder.resume(parse({"compression": "topk", "steps": 9, "evaluate_every": 4}))
        with pytest.raises(ConfigError, match="made with seed: 0, not 1"):
            folder.resume(parse({"compression": "topk", "steps": 3, "seed": 1}))


# -- real runs


def write(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Finished:
    """A run of ten steps, with checkpoints of steps 5 and 10."""

    config: Path
    folder: Path
    workers: list[str]

    def copy_at_step_5(self, folder: Path) -> Path:
        """The run as it was when its first checkpoint was written, and killed some steps later."""
        shutil.copytree(self.folder, folder)
        (folder / "summary.json").unlink()
        marker = {"folder": "step-000005", "step": 5, "workers": 2 if self.workers else 1}
        (folder / "checkpoints" / "latest").write_text(json.dumps(marker))
        return folder


def finished(folder: Path, workers: list[str]) -> Finished:
    config = write(folder, CONFIG + "lr_schedule: {name: step, milestones: [3, 8]}\n")
    train(config, *workers, f"run_dir={folder / 'whole'}")
    return Finished(config, folder / "whole", workers)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(tmp_path_factory.mktemp("alone"), [])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(tmp_path_factory.mktemp("pair"), ["-np", "2"])


def comparable(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in ("step", "epoch", "loss", "lr", "cf", "bytes_sent")) for line in rows(folder)]


@pytest.mark.ranks
@pytest.mark.parametrize("world", ["alone", "pair"])
def test_a_resumed_run_equals_an_unbroken_one_bitwise(
    world: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole: Finished = request.getfixturevalue(world)
    broken = whole.copy_at_step_5(tmp_path / "broken")
    train(whole.config, *whole.workers, f"run_dir={broken}", "--resume")
    assert summary(broken)["parameters_sha256"] == summary(whole.folder)["parameters_sha256"]
    assert comparable(broken) == comparable(whole.folder)
    for name in ("steps", "bytes_sent", "cf_steps", "accuracy"):
        assert summary(broken)[name] == summary(whole.folder)[name]
    for rank in range(summary(broken)["workers"]):
        one, other = own_tensors(whole.folder, rank), own_tensors(broken, rank)
        assert {name.split(".")[1] for name in one} == {"buffers", "rng", "compressor"}
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def own_tensors(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """The tensors that belong to a rank, by their path: batch norm's buffers, residuals, generators."""
    latest = find_latest(folder / "checkpoints")
    assert latest is not None
    return dict(tensors(load_own(latest, rank)))


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, f"{path}.{key}")


@pytest.mark.ranks
def test_another_number_of_workers_is_a_stated_choice(pair: Finished, tmp_path: Path) -> None:
    folder = pair.copy_at_step_5(tmp_path / "run")
    refused = hvdcomp("train", str(pair.config), f"run_dir={folder}", "--resume")
    assert refused.code == 1
    assert "the checkpoint of step 5 is of 2 workers, now there are 1" in refused.err
    assert "Traceback" not in refused.err
    train(pair.config, f"run_dir={folder}", "--resume", "--on-world-change", "mean")
    assert [line["step"] for line in rows(folder)] == list(range(1, 11))


@pytest.mark.ranks
def test_a_run_on_two_ranks_learns_and_leaves_its_records(tmp_path: Path) -> None:
    text = CONFIG.replace("{name: 'training_runs:noisy_net'}", "mlp")
    text = text.replace("{name: 'training_runs:blobs', batch_size: 8, samples: 59}", "digits")
    config, folder = write(tmp_path, text), tmp_path / "run"
    adaptive = ["schedule=gravac", "schedule.epsilon=0.2", "schedule.window=10", "steps=100", "evaluate_every=50"]
    done = train(config, "-np", "2", f"run_dir={folder}", "check_replicas_every=50", *adaptive)
    result, lines = summary(folder), rows(folder)
    assert result["accuracy"] > 0.85
    assert result["parameters_equal"] is True
    assert (result["steps"], result["workers"], result["controller"], result["seed"]) == (100, 2, "mpi", 0)
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert [line["step"] for line in lines if "accuracy" in line] == [50, 100]
    assert lines[-1]["accuracy"] == result["accuracy"]
    assert sum(line["bytes_sent"] for line in lines) == result["bytes_sent"] < result["bytes_dense"] / 4
    sent, dense = map(sum, zip(*lines[-1]["layer_bytes"].values(), strict=True))
    assert dense == result["bytes_dense"]
    assert 0.8 * result["bytes_sent"] < sent < result["bytes_sent"]  # headers are no layer's
    assert sum(result["cf_steps"].values()) == 100
    assert len(result["cf_steps"]) > 1
    for line in lines:
        assert line["iteration_s"] == pytest.approx(sum(line[part] for part in PARTS))
        assert line["compress_s"] == pytest.approx(line["encode_s"] + line["decode_s"])
        assert line["levels"][max(0, line["decision"])] == line["cf"] or line["cf"] == 1
    assert list((folder / "tensorboard").iterdir())
    job = json.loads((folder / "job.json").read_text())
    assert (job["workers"], job["steps"], job["environment"]["torch"]) == (2, 100, torch.__version__)
    assert (folder / "config.yaml").read_text().startswith("model:\n  name: mlp\n")
    assert f"accuracy {result['accuracy']:.4f}" in done.out
    assert result["paid"] in done.out
    assert "replicas equal" in done.out
    assert done.err == ""


# -- recorded gradients


@pytest.mark.ranks
@pytest.mark.parametrize("how", [{"compression": "topk"}, {"compression": "none"}, {"HVDCOMP_DISABLE": "1"}], ids=str)
def test_recorded_gradients_are_rank_0s_own(tmp_path: Path, how: dict[str, str]) -> None:
    """An exchange that was under way while backward went on has left no trace in them."""
    config = write(tmp_path, CONFIG.replace("training_runs:noisy_net'", "training_runs:slow_backward_net'"))
    overrides = [f"{name}={value}" for name, value in how.items() if name.islower()]
    variables = {name: value for name, value in how.items() if name.isupper()}
    every = ["record_gradients=10", "bucket_mb=1e-4"]
    train(config, "-np", "2", f"run_dir={tmp_path / 'run'}", *every, *overrides, **variables)
    found = load_gradients(tmp_path / "run")
    assert list(found) == list(range(1, 11))
    settings = parse(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    own, mean = first_gradients(settings)
    assert list(found[1]) == sorted(own)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, own[name])
        assert not torch.allclose(gradient, mean[name])


def first_gradients(settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Worker 0's at the first of its steps, and the mean over the two workers."""
    model, data = build_model(settings), build_data(settings)
    found = []
    for worker in (0, 1):
        how = {"seed": settings.seed, "epoch": 0, "start": 0, "batch_size": settings.data.batch_size}
        batch = next(batches(data.train, worker=worker, workers=2, **how))
        model.zero_grad()
        (batch.weight * data.loss(model(batch.inputs), batch.targets)).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return found[0], {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}


@pytest.mark.ranks
def test_a_resumed_run_keeps_what_was_recorded_and_goes_on(tmp_path: Path) -> None:
    config, folder = write(tmp_path), tmp_path / "run"
    train(config, f"run_dir={folder}", "steps=4", "record_gradients=2")
    first = load_gradients(folder)
    assert list(first) == [1, 3]
    train(config, f"run_dir={folder}", "steps=8", "record_gradients=4", "--resume")
    found = load_gradients(folder)
    assert list(found) == [1, 3, 5, 7]
    assert all(torch.equal(found[step][name], first[step][name]) for step in first for name in first[step])


@pytest.mark.ranks
def test_recording_takes_none_of_an_iterations_time(tmp_path: Path) -> None:
    config = write(tmp_path, CONFIG.replace("training_runs:noisy_net", "training_runs:slow_disk"))
    train(config, f"run_dir={tmp_path / 'run'}", "steps=4", "record_gradients=4", "checkpoint_every=0")
    assert list(load_gradients(tmp_path / "run")) == [1, 2, 3, 4]
    assert max(line["iteration_s"] for line in rows(tmp_path / "run")[1:]) < 1  # the file and its folder: two syncs


@pytest.mark.ranks
def test_a_run_with_warm_up_and_its_resumption(tmp_path: Path) -> None:
    """An epoch is 4 steps; the list goes on where the first job ended."""
    config, folder = write(tmp_path), tmp_path / "run"
    warm = ["schedule={name: warmup, epochs_each: 1, cfs: [1, 4, 16]}", "compression=dgc", f"run_dir={folder}"]
    train(config, "-np", "2", *warm, "steps=6")
    train(config, "-np", "2", "--resume", *warm, "steps=14")
    assert [row["cf"] for row in rows(folder)] == [1] * 4 + [4] * 4 + [16] * 6
    assert summary(folder)["cf_steps"] == {"1": 4, "4": 4, "16": 6}
    assert "steps_each: 4\n" in (folder / "config.yaml").read_text()


@pytest.mark.ranks
def test_a_run_over_gloo(tmp_path: Path) -> None:
    train(write(tmp_path), "-np", "2", "--launcher", "horovodrun", f"run_dir={tmp_path / 'run'}", "steps=4")
    result = summary(tmp_path / "run")
    assert (result["controller"], result["workers"], result["parameters_equal"]) == ("gloo", 2, True)
    assert result["bytes_sent"] < result["bytes_dense"]


@pytest.mark.ranks
def test_a_run_with_the_stock_optimizer(tmp_path: Path) -> None:
    train(write(tmp_path), f"run_dir={tmp_path / 'run'}", HVDCOMP_DISABLE="1")
    result = summary(tmp_path / "run")
    assert result["bytes_sent"] == result["bytes_dense"] == 10 * 4 * result["parameter_count"]
    assert rows(tmp_path / "run")[-1]["compress_s"] is None


# -- runs that end badly


def left_over(mark: Path) -> list[str]:
    """Processes that know of this run, after a moment to end."""
    for _ in range(100):
        found = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
        alive = [line for line in found.splitlines() if str(mark) in line and not line.startswith("Z")]
        if not alive:
            return []
        time.sleep(0.1)
    return alive


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "rank", "how", "says"),
    [
        ("mpirun", 1, "raise", "rank 1 failed: RuntimeError: a fault of the user's model"),
        ("horovodrun", 0, "kill", "rank 1 stops, since another worker has ended"),
    ],
)
def test_a_fault_of_one_rank_ends_the_job(tmp_path: Path, launcher: str, rank: int, how: str, says: str) -> None:
    fault = f"training_runs:faulty', at_step: 8, rank: {rank}, how: {how}"
    config = write(tmp_path, CONFIG.replace("training_runs:noisy_net'", fault))
    adaptive = ["--launcher", launcher, "schedule=gravac"]  # over MPI the other rank then waits inside MPI
    done = hvdcomp("train", str(config), "-np", "2", *adaptive, f"run_dir={tmp_path / 'run'}")
    assert done.code not in (0, 2)
    assert says in done.err + done.out
    assert "the checkpoint of step 5 is intact, --resume goes on from it" in done.err
    assert latest_of(tmp_path / "run") == 5
    assert left_over(tmp_path) == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [([], signal.SIGINT, 130), (["-np", "2"], signal.SIGINT, 130), (["-np", "2"], signal.SIGKILL, -9)],
    ids=["alone", "two ranks", "launcher killed outright"],
)
def test_an_interrupted_job_leaves_no_process_and_its_checkpoint(
    tmp_path: Path, how: list[str], number: int, code: int
) -> None:
    folder = tmp_path / "run"
    arguments = command("train", str(write(tmp_path)), *how, f"run_dir={folder}", "steps=1000000")
    job = subprocess.Popen(arguments, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "checkpoints" / "latest").exists():
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(number)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == code
    assert left_over(tmp_path) == []
    assert latest_of(folder) % 5 == 0
    if number == signal.SIGINT:
        assert "was interrupted" in errors
        assert "is intact, --resume goes on from it" in errors


@pytest.mark.ranks
def test_a_full_disk_ends_the_job_with_a_message(alone: Finished, tmp_path: Path) -> None:
    folder = alone.copy_at_step_5(tmp_path / "run")
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash"]  # files of up to 8 KiB
    arguments = command("train", str(alone.config), f"run_dir={folder}", "--resume")
    done = subprocess.run([*limited, *arguments], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the checkpoint of step 10 could not be written: OSError: [Errno 27] File too large" in done.stderr
    assert "the checkpoint of step 5 is intact" in done.stderr
    assert "Traceback" not in done.stderr
    assert latest_of(folder) == 5


def latest_of(folder: Path) -> int:
    """The step of the newest checkpoint, every part of which can be read."""
    latest = find_latest(folder / "checkpoints")
    assert latest is not None
    assert load_shared(latest)["position"]["step"] == latest.step
    for worker in range(latest.workers):
        load_own(latest, worker)
    return latest.step
