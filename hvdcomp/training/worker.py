"""This process as one worker of a job: threads, Horovod, device, seeds, and how it ends."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch

from hvdcomp.config import ConfigError, RunConfig
from hvdcomp.errors import DataError, ReplicaError
from hvdcomp.horovod_api import DYNAMIC
from hvdcomp.training.checkpoint import CheckpointError

log = logging.getLogger(__name__)

_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class LaunchError(RuntimeError):
    """The processes of a job do not form the world that their launcher meant."""


@dataclass(frozen=True)
class Worker:
    """Where this process stands in its job."""

    index: int
    count: int
    device: torch.device
    controller: str
    """Horovod's: "mpi" or "gloo"."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether mpirun, horovodrun or srun started this process as one of several (or of one)."""
    in_slurm_step = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environment
    return in_slurm_step or any(name in environment for name in ("HOROVOD_RANK", *_MPI_RANKS))


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank by the launcher's word, before Horovod is asked; 0 without a launcher."""
    names = ("HOROVOD_RANK", *_MPI_RANKS, "SLURM_PROCID")
    return next((int(environment[name]) for name in names if name in environment), 0)


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks by the launcher's word; 1 without a launcher."""
    return next((int(environment[name]) for name in _SIZES if name in environment), 1)


def start(config: RunConfig) -> Worker:
    """Start Horovod. Raises LaunchError when it does not see the ranks that the launcher started."""
    torch.set_num_threads(config.threads or int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]))
    if _under_mpi(os.environ):
        if os.environ.get("HOROVOD_CONTROLLER") == "gloo" and launched_size() > 1:  # each rank would be a world of one
            raise LaunchError("HOROVOD_CONTROLLER=gloo is for horovodrun --gloo: unset it under mpirun and srun")
        _import_mpi4py()
    import horovod.torch as hvd

    if not is_launched() and hvd.gloo_built():  # alone: no need to start an MPI
        os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    if config.hierarchical is not False:
        os.environ.setdefault(DYNAMIC, "1")
    hvd.init()
    if launched_size() != hvd.size():
        raise LaunchError(
            f"the launcher started {launched_size()} processes, but Horovod sees a world of {hvd.size()}; take the "
            "mpirun of the MPI that Horovod was built with, or horovodrun; with SLURM: srun --mpi=pmix"
        )
    controller = "mpi" if hvd.mpi_enabled() else "gloo"
    return Worker(hvd.rank(), hvd.size(), _device(config, hvd.local_rank()), controller)


def _import_mpi4py() -> None:
    """Before Horovod, which would start and end MPI by itself, and without threads."""
    try:
        import mpi4py.MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        log.warning("mpi4py cannot be used, so decisions travel by Horovod's slower operations: %s", error)


def _under_mpi(environment: Mapping[str, str]) -> bool:
    return "HOROVOD_RANK" not in environment and any(name in environment for name in _MPI_RANKS)


def _device(config: RunConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("device: cuda was asked for, but torch sees no GPU here; take device=cpu or device=auto")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    return device


def seed_everything(seed: int, worker: int) -> None:
    """Seed the global generators, each worker's apart (dropout); weights and batch order come from elsewhere."""
    words = np.random.SeedSequence([seed, worker]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def quiet(worker: int) -> None:
    """Ranks other than 0 say only what goes wrong."""
    if worker != 0:
        warnings.simplefilter("ignore")
        logging.getLogger().setLevel(logging.ERROR)


def run_guarded(action: Callable[[], int]) -> int:
    """Run this worker's whole work; end the job, not just this rank, when it fails.

    Returns the exit code, or does not return: a worker whose peers still wait for it must not stay in MPI's or
    Horovod's orderly shut-down, which would wait for them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise_interrupt)
    try:
        return action()
    except KeyboardInterrupt:
        return _end(130, "interrupted", everywhere=True)
    except Exception as error:
        if isinstance(error, EXPECTED):
            return _end(1, str(error), everywhere=True)
        if "Horovod has been shut down" in str(error):
            return _end(1, "stops, since another worker has ended", everywhere=False)
        is_told = isinstance(error, DataError) or (isinstance(error, OSError) and error.errno in DISK_FULL)
        if not is_told:
            log.error("rank %d:", launched_rank(), exc_info=error)
        return _end(1, f"failed: {type(error).__name__}: {error}", everywhere=False)


EXPECTED = (LaunchError, ConfigError, CheckpointError, ReplicaError)
"""Errors that every rank raises alike and that need no traceback."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""These need no traceback either."""


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(code: int, message: str, everywhere: bool) -> int:
    """Say why, once; then end the job if there are other ranks."""
    rank = launched_rank()
    if everywhere and rank != 0:
        time.sleep(2)  # rank 0 speaks for all
    else:
        log.error("%s", message if everywhere else f"rank {rank} {message}")
    if launched_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        _abort(code)
    return code


def _abort(code: int) -> None:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)
