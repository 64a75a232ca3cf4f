"""The folder that holds a run's files; an earlier run there is moved aside, never overwritten."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import IO

from hvdcomp.config import ConfigError, RunConfig, parse
from hvdcomp.training.checkpoint import discard_incomplete, find_latest, write_atomically

log = logging.getLogger(__name__)

FREE_TO_CHANGE = frozenset(
    {
        "epochs",
        "steps",
        "run_dir",
        "device",
        "evaluate_every",
        "checkpoint_every",
        "check_replicas_every",
        "log_every",
        "record_gradients",
        "probe",
    }
)
"""Fields that may differ when a run is resumed."""


class RunFolder:
    """Paths in a run's folder, and the lock that keeps a second job out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def job(self) -> Path:
        """What it runs on, and how many steps it will have."""
        return self.path / "job.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def start(self, config: RunConfig) -> None:
        """Make the folder for a new run. Raises ConfigError when it is in use, or holds something else."""
        if self.path.exists() and any(self.path.iterdir()):
            self._move_aside()
        self._acquire()
        write_atomically(self.config, config.to_yaml().encode())

    def resume(self, config: RunConfig) -> None:
        """Open the folder of a run that goes on.

        Raises ConfigError when there is nothing to resume, or the run was made with another configuration.
        """
        if find_latest(self.checkpoints) is None:
            raise ConfigError(f"nothing to resume: {self.path} holds no checkpoint; leave out --resume to start a run")
        self._check_same(config)
        self._acquire()
        discard_incomplete(self.checkpoints)
        write_atomically(self.config, config.to_yaml().encode())

    def close(self) -> None:
        """Let another job in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire(self) -> None:
        self.close()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"another job is writing to {self.path}: end it, or give another run_dir") from None
        except OSError as error:  # a file system without locks
            log.debug("no lock on %s: %s", self.path, error)
        self._lock = lock

    def _move_aside(self) -> None:
        if not self.config.exists():
            raise ConfigError(f"{self.path} is not empty and holds no run of hvdcomp: give another run_dir")
        self._acquire()
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        os.rename(self.path, aside)
        done = "" if (aside / "summary.json").exists() else f", unfinished (go on with: run_dir={aside} --resume)"
        log.warning("the earlier run in %s is now in %s%s", self.path, aside, done)

    def _check_same(self, config: RunConfig) -> None:
        import yaml

        before = parse(yaml.safe_load(self.config.read_text(encoding="utf-8")), str(self.config)).model_dump()
        now = config.model_dump()
        changed = [name for name in now if name not in FREE_TO_CHANGE and now[name] != before[name]]
        if changed:
            name = changed[0]
            raise ConfigError(
                f"{self.path} was made with {name}: {before[name]}, not {now[name]}; resume it with "
                f"`hvdcomp train {self.config} --resume`, or start a new run in another run_dir"
            )
