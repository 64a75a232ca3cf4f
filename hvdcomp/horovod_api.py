"""Horovod's PyTorch module, imported when it is first needed, with errors that say what to do."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
"""Horovod's environment variable that lets process sets be made after ``hvd.init()``."""


def horovod() -> Any:
    """The module ``horovod.torch``.

    Raises:
        ImportError: Horovod is not installed, or was built without PyTorch.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ImportError(
            f"hvdcomp needs Horovod built for this PyTorch, which pip alone cannot do ({error}): run launch/setup.sh, "
            "which builds it, or see Horovod's installation guide (HOROVOD_WITH_PYTORCH=1)"
        ) from error
    return hvd


def initialised_horovod() -> Any:
    """:func:`horovod`, after a check that ``hvd.init()`` was called and found the workers that the launcher started.

    Raises:
        ValueError: ``hvd.init()`` was not called.
        RuntimeError: the launcher started several processes, but Horovod sees one.
    """
    hvd = horovod()
    if not hvd.is_initialized():
        raise ValueError("Horovod is not initialised: call hvd.init() before making the optimizer")
    started = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
    if hvd.size() == 1 and started > 1:
        raise RuntimeError(
            f"mpirun started {started} processes, but Horovod sees a world of 1: HOROVOD_CONTROLLER is "
            f"{os.environ.get('HOROVOD_CONTROLLER', 'not set')!r}; unset it (gloo needs horovodrun), or use a Horovod "
            "that was built with MPI"
        )
    return hvd


def process_set_of(hvd: Any, ranks: Sequence[int]) -> Any:
    """Horovod's process set of these ranks, None where there is none; not collective."""
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    chosen = hvd.ProcessSet(list(ranks))
    chosen.process_set_id = next((number for number, members in known.items() if members == chosen.ranks), None)
    return chosen if chosen.process_set_id is not None else None


def label_of(numbers: defaultdict[int, Iterator[int]], prefix: str, process_set: Any) -> str:
    """The prefix of an optimizer's operations, alike on all members of its process set, whoever else made some."""
    identity = process_set.process_set_id or 0
    return f"{prefix}.{f'set{identity}.' if identity else ''}{next(numbers[identity])}"
