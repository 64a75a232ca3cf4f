"""Runs the command `hvdcomp` as a user would, and reads what a run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 280.0

CONFIG = """
model: {name: 'training_runs:noisy_net'}
data: {name: 'training_runs:blobs', batch_size: 8, samples: 59}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
compression: {name: topk, cf: 20}
steps: 10
evaluate_every: 5
checkpoint_every: 5
"""
"""A small run: a static schedule, dropout, batch norm, and epochs of less than ten steps on two ranks."""

_CLEARED = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "HVDCOMP_")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def environment(**changed: str) -> dict[str, str]:
    """This process's environment without what a launcher would leave in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_CLEARED)}
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
    return kept | stall | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"} | changed


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hvdcomp", *arguments]


def hvdcomp(*arguments: str, cwd: Path = ROOT, **changed: str) -> Outcome:
    """Run `hvdcomp ARGUMENTS` to its end; `changed` environment variables."""
    to_run, variables = command(*arguments), environment(**changed)
    done = subprocess.run(to_run, cwd=cwd, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def train(config: Path, *arguments: str, **changed: str) -> Outcome:
    """`hvdcomp train`, which must succeed."""
    done = hvdcomp("train", str(config), *arguments, **changed)
    assert done.code == 0, done.out + done.err
    return done


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class NoisyNet(nn.Module):
    """Batch norm (buffers that belong to a rank) and dropout (a generator that does)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Faulty(NoisyNet):
    """Ends its process, or raises, at a training step of one rank."""

    def __init__(self, at_step: int, rank: int, how: str) -> None:
        super().__init__(16)
        self.at_step, self.rank, self.how, self.steps = at_step, rank, how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))
        if self.training and self.steps == self.at_step and rank == self.rank:
            if self.how == "kill":
                os.kill(os.getpid(), 9)
            raise RuntimeError("a fault of the user's model")
        return super().forward(x)


def noisy_net(hidden: int = 32) -> nn.Module:
    return NoisyNet(hidden)


class SlowBackward(nn.Module):
    """Leaves an exchange of the later layers' gradients time to end before backward does."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(0.05))
        return x


def slow_backward_net() -> nn.Module:
    """Nothing random, and nothing that a rank has of its own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), SlowBackward(), nn.Linear(32, 10))


def faulty(at_step: int = 8, rank: int = 1, how: str = "kill") -> nn.Module:
    return Faulty(at_step, rank, how)


def slow_disk() -> nn.Module:
    """A net in a process whose files take half a second to reach the disk."""
    real = os.fsync

    def slow(handle: int) -> None:
        time.sleep(0.5)
        real(handle)

    os.fsync = slow
    return NoisyNet(16)


def not_a_model() -> str:
    return "text"


def broken() -> nn.Module:
    raise KeyError("inside")


def blobs(samples: int = 100) -> tuple[TensorDataset, TensorDataset]:
    """A user's own data factory, a plain pair: ten noisy patterns of 8x8 (scikit-learn takes a second to import)."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 8, 8, generator=generator)

    def draw(count: int) -> TensorDataset:
        classes = torch.arange(count) % 10
        return TensorDataset(patterns[classes] + 0.3 * torch.randn(count, 1, 8, 8, generator=generator), classes)

    return draw(samples), draw(50)
