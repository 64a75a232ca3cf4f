"""A worker's training step: batches summed up, precision, clipping, label smoothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training_runs import rows, summary, train

from hvdcomp.config import ConfigError, load, parse
from hvdcomp.training.data import Batch, Data, batches
from hvdcomp.training.parts import resolve, steps_of_epoch, training_loss
from hvdcomp.training.step import Step, make_scaler

CPU = torch.device("cpu")


class Alone(torch.optim.SGD):
    """A distributed optimizer of one worker, which writes down how it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.backward_passes_per_step, self.calls, self.before = 1, [], float("nan")
        self._model = [*model.parameters()]

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self.calls.append(f"passes {passes}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.before = norm(self._model)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self.calls.append("skip")
        yield

    def step(self, closure: Any = None) -> None:
        self.calls.append("step")
        super().step(closure)


def norm(parameters: Sequence[Tensor]) -> float:
    return float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())


def blobs(samples: int = 11) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def groups(batch_size: int, worker: int = 0, workers: int = 1) -> list[Batch]:
    return list(batches(blobs(), seed=0, epoch=0, start=0, worker=worker, workers=workers, batch_size=batch_size))


def stepped(group: Sequence[Batch], **changed: Any) -> tuple[nn.Module, Alone, float]:
    """A linear model after one step."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer, config = Alone(model), parse(changed)
    loss = training_loss(Data(blobs(), blobs()), config)
    step = Step(config, CPU, model, optimizer, loss, make_scaler(config, CPU))
    mean = step.backward(group)
    step.update()
    return model, optimizer, mean


def test_batches_of_any_size_are_summed_up_to_one_step_of_all_their_samples() -> None:
    (whole,), parts = groups(11), groups(3)
    assert [batch.samples for batch in parts] == [3, 3, 3, 2]
    once, _, loss = stepped([whole])
    model, optimizer, same = stepped(parts)
    assert same == pytest.approx(loss)
    torch.testing.assert_close(model.weight, once.weight)
    torch.testing.assert_close(model.weight.grad, once.weight.grad)
    assert optimizer.calls == ["passes 4", "step"]


def test_the_mean_over_workers_is_that_over_all_samples_of_a_step() -> None:
    once, _, _ = stepped(groups(11))
    found = [stepped(groups(2, worker, workers=2))[0].weight.grad for worker in (0, 1)]
    torch.testing.assert_close((found[0] + found[1]) / 2, once.weight.grad)


def test_the_exchanged_gradient_is_clipped() -> None:
    model, optimizer, _ = stepped(groups(11), optimizer={"clip_norm": 0.01})
    assert optimizer.before > 0.1
    assert norm([*model.parameters()]) == pytest.approx(0.01, rel=1e-4)
    assert optimizer.calls == ["synchronize", "skip", "step"]


def test_half_precision_is_computed_in_but_not_kept() -> None:
    exact, _, loss = stepped(groups(11))
    for precision in ("bf16", "fp16"):
        model, optimizer, rough = stepped(groups(11), precision=precision)
        assert model.weight.dtype == torch.float32
        assert not torch.equal(model.weight, exact.weight)
        torch.testing.assert_close(model.weight, exact.weight, rtol=0.02, atol=0.002)
        assert rough == pytest.approx(loss, rel=0.02)
        if precision == "fp16":  # the loss is scaled, and its gradient is not any more when it is applied
            assert optimizer.before > 1000 * norm([*model.parameters()])


def test_labels_are_smoothed_in_training() -> None:
    (batch,) = groups(11)
    model, _, loss = stepped([batch], label_smoothing=0.3)
    torch.manual_seed(0)
    logs = nn.Linear(6, 3)(batch.inputs).log_softmax(-1).detach()
    right = logs[torch.arange(11), batch.targets].mean()
    assert loss == pytest.approx(float(-0.7 * right - 0.3 * logs.mean()))
    assert model.weight.grad is not None


def plain_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, targets)


def rough_data() -> Data:
    return Data(blobs(), blobs(), plain_loss)


def test_a_loss_that_knows_no_label_smoothing_is_told_before_the_run() -> None:
    config = {"model": {"name": "mlp", "inputs": 6, "classes": 3}, "data": {"name": "test_step:rough_data"}}
    resolve(parse(config))
    with pytest.raises(ConfigError, match=r"do not fit: TypeError: .*label_smoothing"):
        resolve(parse(config | {"label_smoothing": 0.1}))


def test_steps_of_an_epoch() -> None:
    config = parse({"data": {"name": "digits", "batch_size": 2}, "accumulate": 2})
    data = Data(blobs(12), blobs())  # three batches of 4 samples of two workers
    assert [steps_of_epoch(data, config, 2, start) for start in (0, 4, 8)] == [2, 1, 1]


def test_recorded_gradients_would_be_scaled() -> None:
    with pytest.raises(ConfigError, match="record_gradients goes with fp32 and bf16"):
        parse({"precision": "fp16", "record_gradients": 3})


def write(folder: Path) -> Path:
    config = folder / "run.yaml"
    config.write_text(
        "model: {name: mlp, hidden: 16}\ndata: {name: 'training_runs:blobs', samples: 70, batch_size: 8}\n"
        "optimizer: {lr: 0.1, momentum: 0.9, clip_norm: 1.0}\ncompression: {name: topk, cf: 2}\n"
        "label_smoothing: 0.1\nsteps: 10\nevaluate_every: 5\n"
    )
    return config


@pytest.mark.ranks
def test_accumulated_batches_on_two_ranks_train_as_large_ones(tmp_path: Path) -> None:
    """Of five batches an epoch, so that its last step has fewer than the others."""
    config, large, small = write(tmp_path), tmp_path / "large", tmp_path / "small"
    train(config, "-np", "2", f"run_dir={large}", "data.batch_size=16")
    train(config, "-np", "2", f"run_dir={small}", "accumulate=2")
    assert [line["batches"] for line in rows(small)] == [2, 2, 1] * 3 + [2]
    for one, other in zip(rows(large), rows(small), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.01)
        assert (one["epoch"], one["bytes_sent"]) == (other["epoch"], other["bytes_sent"])
    assert summary(large)["test_loss"] == pytest.approx(summary(small)["test_loss"], rel=0.01)


@pytest.mark.ranks
def test_a_run_in_half_precision_resumes(tmp_path: Path) -> None:
    config, run = write(tmp_path), tmp_path / "run"
    train(config, f"run_dir={run}", "precision=fp16", "accumulate=2", "steps=5", "checkpoint_every=3")
    first = [line["loss"] for line in rows(run)]
    train(config, f"run_dir={run}", "precision=fp16", "accumulate=2", "--resume")
    losses = [line["loss"] for line in rows(run)]
    assert losses[:5] == first
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert summary(run)["top5_accuracy"] > summary(run)["accuracy"]
    assert load(run / "config.yaml").precision == "fp16"
