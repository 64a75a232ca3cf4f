"""The training loop, from a resolved configuration to a summary."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdcomp.config import ConfigError, RunConfig
from hvdcomp.training import checkpoint, parts
from hvdcomp.training.batch_size import BatchSizes
from hvdcomp.training.checkpoint import Latest
from hvdcomp.training.data import IGNORED, Batch, batches, test_batches
from hvdcomp.training.environment import environment
from hvdcomp.training.gradients import GradientRecorder, recorded_steps
from hvdcomp.training.lr import Position, lr_factor
from hvdcomp.training.metrics import MetricsLog, Totals
from hvdcomp.training.modelled import ModelledClock, step_times
from hvdcomp.training.models import digest, evaluating, parameter_count
from hvdcomp.training.progress import Display, make_console, make_display, show_summary
from hvdcomp.training.run_folder import RunFolder
from hvdcomp.training.step import Step, autocast, make_scaler, to_device
from hvdcomp.training.telemetry import Telemetry
from hvdcomp.training.verdict import dense_exchange_s, sentence
from hvdcomp.training.worker import Worker, seed_everything

log = logging.getLogger(__name__)


class Trainer:
    """One worker's part in training a model as a configuration says.

    Every method is called by all workers in the same order; files are written by worker 0, but for checkpoints, of
    which each worker writes its own part.

    Args:
        config: resolved (`hvdcomp.training.parts.resolve`).
        worker: from `hvdcomp.training.worker.start`.
        resume: go on from the latest checkpoint in the run's folder.
        on_world_change: what to do with the residuals when the number of workers is another than the checkpoint's:
            "error", or "mean" or "drop" as in `load_compressor_state_dict`.

    Raises:
        ConfigError: the run's folder is not fit, or its checkpoint does not fit the configuration; on every worker.
    """

    def __init__(self, config: RunConfig, worker: Worker, resume: bool = False, on_world_change: str = "error") -> None:
        self.config, self.worker = config, worker
        self.folder = RunFolder(Path(str(config.run_dir)).expanduser())
        self.data = parts.build_data(config)
        self.samples = len(self.data.train)  # type: ignore[arg-type]
        self.clock = self._make_clock()
        self.model = parts.build_model(config).to(worker.device)
        self.scaler = make_scaler(config, worker.device)
        self.optimizer = self._wrap(parts.build_optimizer(config.optimizer, self.model))
        if isinstance(self.clock, ModelledClock):
            self.clock.watch(self.optimizer)
        self.stepper = Step(
            config, worker.device, self.model, self.optimizer, parts.training_loss(self.data, config), self.scaler
        )
        self.batch_sizes = BatchSizes(config, worker.count)
        self.telemetry = Telemetry(self.optimizer)
        self.totals = Totals()
        self.step, self.epoch, self.seen = 0, 0, 0
        """Steps done; the epoch under way; samples of it that all workers together have seen."""
        self.expected_s = self._expected_s()
        self.saved_step: int | None = None
        self.last_loss = float("nan")
        seed_everything(config.seed, worker.index)
        latest = self._open_folder(resume)
        if latest is not None:
            self._restore(latest, on_world_change)
        self._broadcast_parameters()
        self.recorder = self._make_recorder()
        self._began = self.clock()

    # -- the run

    def run(self) -> dict[str, Any]:
        """Train to the end. Returns the summary, the same that summary.json holds (on worker 0; elsewhere a part)."""
        console = make_console()
        display = make_display(self.worker.index, self.total_steps, self.step, console)
        with closing(self.folder), closing(display), closing(self._open_log()) as metrics:
            self._describe()
            began = time.perf_counter() - self.totals.seconds
            result = self._train(metrics, display, began)
            self.totals.seconds = time.perf_counter() - began
            self.save()
            summary = self._summary(result)
            if self.worker.index == 0:
                checkpoint.write_atomically(self.folder.summary, (json.dumps(summary, indent=2) + "\n").encode())
        if self.worker.index == 0:
            show_summary(summary, console)
        self.telemetry.check_replicas()
        return summary

    @property
    def total_steps(self) -> int:
        """Steps that the run has when it is done, if steps go on to have as many batches as now."""
        if self.config.steps is not None:
            return self.config.steps
        if self.epoch >= self.config.epochs:
            return self.step
        per_epoch, rest = (
            parts.steps_of_epoch(self.data, self.config, self.worker.count, at, self.batch_sizes.passes)
            for at in (0, self.seen)
        )
        return self.step + rest + per_epoch * (self.config.epochs - self.epoch - 1)

    def _train(self, metrics: Any, display: Display, began: float) -> dict[str, float]:
        result: dict[str, float] = {}
        self._began = self.clock()
        for group, total in self._groups():
            row = self._timed_step(group, total)
            with self._untimed():
                self.totals.add(row, self.telemetry.layer_bytes())
                last = self.step == total
                if last or _due(self.step, self.config.evaluate_every):
                    result = self.evaluate()
                    row |= {**result, "layer_bytes": self.totals.layer_bytes}
                metrics.write(row)
                display.update(row, self.totals, total)
                self.totals.seconds = time.perf_counter() - began
                self._safeguard()
        return result or self.evaluate()

    def _groups(self) -> Iterator[tuple[list[Batch], int]]:
        """The batches of each step until the run is done, and how many steps it will have.

        The position is kept up to date for checkpoints. The last step of an epoch takes what is left.
        """
        while self.step < (total := self.total_steps):
            shard = batches(
                self.data.train,
                seed=self.config.seed,
                epoch=self.epoch,
                start=self.seen,
                worker=self.worker.index,
                workers=self.worker.count,
                batch_size=self.config.data.batch_size,
                readers=self.config.data.readers,
            )
            while group := list(islice(shard, self.batch_sizes.passes)):
                self.seen = group[-1].end
                yield group, total
                if self.step >= total:
                    return
            end = float(self.epoch + 1)
            lr, next_lr = (
                self._lr(Position(step, total, epoch, end, self.worker.count))
                for step, epoch in ((self.step - 1, float(self.epoch)), (self.step, end))
            )
            self.batch_sizes.end_epoch(lr, next_lr)
            self.epoch, self.seen = self.epoch + 1, 0

    def _timed_step(self, batches: Sequence[Batch], total: int) -> dict[str, Any]:
        """One step, and its line of metrics.jsonl; the loss is this worker's own, of its part of the batch.

        The iteration began where the last one ended, and so with loading the batch.
        """
        at = self._position(batches, total)
        lr, next_lr = (self.batch_sizes.factor * self._lr(position) for position in (at, at.following()))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        samples = sum(batch.samples for batch in batches)
        self.totals.samples += samples
        with self.recorder.watching(self.step + 1):
            self.last_loss = self.stepper.backward(batches)
        self.telemetry.tell(samples, self.last_loss, next_lr)
        self.stepper.update()
        self.batch_sizes.add(self.model.named_parameters(), len(batches))
        self.step += 1
        began, self._began = self._began, self.clock()
        record = self.telemetry.step_record(self._began - began)
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.last_loss,
            "lr": lr,
            "batches": len(batches),
            **record,
        }

    def _lr(self, at: Position) -> float:
        return self.config.optimizer.lr * lr_factor(self.config.lr_schedule, at)

    def _position(self, batches: Sequence[Batch], total: int) -> Position:
        before = batches[0].end - batches[0].total
        epoch, epoch_after = (self.epoch + seen / self.samples for seen in (before, self.seen))
        return Position(self.step, total, epoch, epoch_after, self.worker.count)

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """What happens inside is no part of an iteration's time, neither the metrics' nor the schedule's."""
        began = self.clock()
        with self.telemetry.untimed():
            yield
        self._began += self.clock() - began

    def _safeguard(self) -> None:
        self.recorder.save(self.step)
        if _due(self.step, self.config.check_replicas_every):
            self.telemetry.check_replicas()
        if _due(self.step, self.config.checkpoint_every):
            self.save()

    # -- evaluation

    def evaluate(self) -> dict[str, float]:
        """Accuracy, top-5 accuracy and mean loss on the test set, each worker taking its share of it; collective.

        Of a text also the perplexity, and its accuracy is the share of words that were thought the likeliest.
        Where the model has batch norm, each worker uses the running statistics of its own batches.
        """
        import horovod.torch as hvd

        sums = torch.zeros(4, dtype=torch.float64)
        with evaluating(self.model), autocast(self.config, self.worker.device):
            for inputs, targets in self._test_batches():
                outputs = self.model(inputs)
                count = (targets != IGNORED).sum().item()
                hits = outputs.topk(min(5, outputs.shape[-1])).indices == targets[..., None]
                first, any_of_five = hits[..., 0].sum().item(), hits.sum().item()
                sums += torch.tensor([count, count * float(self.data.loss(outputs, targets)), first, any_of_five])
        count, loss, first, any_of_five = hvd.allreduce(sums, op=hvd.Sum, name="hvdcomp.evaluation").tolist()
        result = {"accuracy": first / count, "top5_accuracy": any_of_five / count, "test_loss": loss / count}
        return result | ({"perplexity": _exp(loss / count)} if self.data.metric == "perplexity" else {})

    def _test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.config.data.batch_size
        for pair in test_batches(
            self.data.test, worker=self.worker.index, workers=self.worker.count, batch_size=4 * size
        ):
            inputs, targets = (to_device(part, self.worker.device) for part in pair)
            yield inputs, targets

    # -- checkpoints

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one; collective. Raises CheckpointError on every worker."""
        if self.saved_step == self.step:
            return
        shared = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "batch_sizes": self.batch_sizes.state_dict(),
            "totals": self.totals.state_dict(),
            "position": {"step": self.step, "epoch": self.epoch, "seen": self.seen},
            "loss": self.last_loss,
        }
        checkpoint.save(
            self.folder.checkpoints,
            self.step,
            worker=self.worker.index,
            workers=self.worker.count,
            shared=shared if self.worker.index == 0 else None,
            own={
                "buffers": _buffers(self.model),
                "rng": checkpoint.rng_state(self.worker.device),
                "compressor": self.telemetry.state(),
            },
            gather=_gather,
        )
        self.saved_step = self.step

    def _restore(self, latest: Latest, on_world_change: str) -> None:
        if latest.workers != self.worker.count and on_world_change == "error":
            raise ConfigError(
                f"the checkpoint of step {latest.step} is of {latest.workers} workers, now there are "
                f"{self.worker.count}: start {latest.workers}, or say what becomes of their residuals: "
                "--on-world-change mean (each worker gets their mean) or drop"
            )
        shared = checkpoint.load_shared(latest)
        owns = [checkpoint.load_own(latest, w) for w in self._needed_parts(latest)]
        own = owns[self.worker.index % len(owns)] if len(owns) > 1 else owns[0]
        self.model.load_state_dict(shared["model"])
        self.model.load_state_dict(own["buffers"], strict=False)
        self.optimizer.load_state_dict(shared["optimizer"])
        self.scaler.load_state_dict(shared["scaler"])
        self.batch_sizes.load_state_dict(shared["batch_sizes"])
        self.telemetry.restore([part["compressor"] for part in owns], on_world_change)
        self.totals = Totals(**shared["totals"])
        self.last_loss = shared["loss"]
        self.step, self.epoch, self.seen = (shared["position"][name] for name in ("step", "epoch", "seen"))
        self.saved_step = self.step
        if latest.workers == self.worker.count:
            checkpoint.restore_rng(own["rng"], self.worker.device)
        else:
            seed_everything(self.config.seed + self.step, self.worker.index)
        if self.worker.index == 0:
            log.warning("going on from %s", latest.folder)

    def _needed_parts(self, latest: Latest) -> list[int]:
        """This worker's own part; of another world's all."""
        return [self.worker.index] if latest.workers == self.worker.count else list(range(latest.workers))

    # -- set-up and end

    def _expected_s(self) -> float | None:
        """What a probe says of a step, None without one."""
        if self.config.probe is None:
            return None
        from hvdcomp.costmodel.expectation import expected_step_s

        shapes = {name: list(p.shape) for name, p in self.model.named_parameters() if p.requires_grad}
        return expected_step_s(self.config, shapes, self.worker.count)

    def _make_clock(self) -> Callable[[], float]:
        network = self.config.network
        if network.bandwidth_mbit is None:
            return time.perf_counter
        return ModelledClock(network, self.worker.count, self.config.bucket_mb)

    def _wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        import hvdcomp

        config = self.config
        schedule = parts.build_schedule(config)
        schedule.clock = self.clock
        return hvdcomp.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=parts.build_compressor(config),
            schedule=schedule,
            granularity=config.granularity,
            bucket_mb=config.bucket_mb,
            exclude=config.exclude,
            never_slower=config.never_slower,
            grad_scaler=self.scaler if self.scaler.is_enabled() else None,
            hierarchical=config.hierarchical,
        )

    def _make_recorder(self) -> GradientRecorder:
        count = self.config.record_gradients if self.worker.index == 0 else 0
        return GradientRecorder(self.model, self.folder.path, recorded_steps(self.total_steps, count), self._untimed)

    def _open_folder(self, resume: bool) -> Latest | None:
        """Worker 0 opens the run's folder, and tells all whether it could."""
        fault = ""
        if self.worker.index == 0:
            try:
                (self.folder.resume if resume else self.folder.start)(self.config)
            except (ConfigError, checkpoint.CheckpointError) as error:
                fault = str(error)
            except OSError as error:
                fault = f"run_dir: {self.folder.path} cannot be used ({error.strerror}): give another"
        faults = _gather(fault)
        if any(faults):
            raise ConfigError(faults[0])
        return checkpoint.find_latest(self.folder.checkpoints) if resume else None

    def _open_log(self) -> Any:
        if self.worker.index != 0:
            return _NoLog()
        return MetricsLog(self.folder.path, self.config.log_every, after_step=self.step)

    def _broadcast_parameters(self) -> None:
        """Worker 0's weights everywhere. A fresh optimizer has no state, a restored one is restored on every worker."""
        import horovod.torch as hvd

        hvd.broadcast_parameters(dict(self.model.named_parameters()), root_rank=0)

    def _dense_exchange_s(self) -> float:
        """Seconds of a dense exchange, measured or modelled."""
        numel, network = parameter_count(self.model), self.config.network
        if network.bandwidth_mbit is None:
            return dense_exchange_s(numel, self.worker.device)
        dense = {"messages": 0, "elements": {}, "bytes_dense": 4 * numel}
        return step_times(dense, network, self.worker.count, self.config.bucket_mb).wait_s

    def _describe(self) -> None:
        """job.json, for those who look at a run that is not over."""
        if self.worker.index == 0:
            job = {"workers": self.worker.count, "controller": self.worker.controller, "steps": self.total_steps}
            job["environment"] = environment(self.worker.device)
            checkpoint.write_atomically(self.folder.job, (json.dumps(job, indent=2) + "\n").encode())

    def _summary(self, result: dict[str, float]) -> dict[str, Any]:
        dense_s = self._dense_exchange_s()
        digests = _gather(digest(self.model))
        totals, times = self.totals, self.totals.times
        return {
            **result,
            "data_sha256": self.data.sha256,
            "test_samples": len(self.data.test),  # type: ignore[arg-type]
            "loss": self.last_loss,
            "cf_mean": totals.cf_mean,
            "cf_steps": totals.cf_steps,
            "bytes_sent": totals.bytes_sent,
            "bytes_dense": totals.bytes_dense,
            "bytes_received": totals.bytes_received,
            "steps": totals.steps,
            "skipped": totals.skipped,
            "epochs": self.epoch + self.seen / self.samples,
            "seconds": totals.seconds,
            **times,
            "dense_exchange_s": dense_s,
            "expected_step_s": self.expected_s,
            "paid": sentence(totals, self.worker.count, dense_s, self.config.network.bandwidth_mbit),
            "workers": self.worker.count,
            "controller": self.worker.controller,
            "seed": self.config.seed,
            "parameter_count": parameter_count(self.model),
            "residual_nbytes": self.telemetry.residual_nbytes,
            "parameters_sha256": digests[0],
            "parameters_equal": len(set(digests)) == 1,
            "run_dir": str(self.folder.path),
        }


class _NoLog:
    def write(self, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _gather(text: str) -> list[str]:
    """Every worker's text, on every worker."""
    import horovod.torch as hvd

    return list(hvd.allgather_object(text, name="hvdcomp.texts"))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """What `state_dict` holds besides the parameters: batch norm's running statistics, for one; local to a worker."""
    parameters = dict(model.named_parameters())
    return {name: value for name, value in model.state_dict().items() if name not in parameters}
