"""One rank: runs the checks of a topic and writes down what became of each."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks.launch import FOLDER, checks_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topic")
    parser.add_argument("checks", nargs="*")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(120)
    warnings.filterwarnings("ignore", "pkg_resources|Deprecated call to `pkg_resources")
    topic = importlib.import_module(f"ranks.check_{arguments.topic}")

    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    _wait_asleep()
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    if getattr(topic, "INITIALISE", True):
        # All at the start: hvd.add_process_set() now and then loses a set that ranks use at once.
        hvd.init(process_sets=getattr(topic, "PROCESS_SETS", []))
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "pkg_resources|Deprecated call to `pkg_resources")
    for number, name in enumerate(arguments.checks or checks_of(arguments.topic)):
        _renumber(number)
        _run(name, getattr(topic, name), rank, folder)


def _wait_asleep() -> None:
    """Horovod waits in a loop of yields, which starves the threads that are waited for where ranks outnumber cores."""
    from horovod.torch.mpi_ops import mpi_lib

    wait = mpi_lib.horovod_torch_wait_and_clear

    def asleep(handle: int) -> None:
        while not mpi_lib.horovod_torch_poll(handle):
            time.sleep(2e-4)
        wait(handle)

    mpi_lib.horovod_torch_wait_and_clear = asleep


def _renumber(number: int) -> None:
    """Optimizers' numbers agree again, even if the last check failed on one rank before it made one."""
    from hvdcomp import optimizer, plugin

    for module in (optimizer, plugin):
        module._numbers.clear()
        module._numbers[0] = itertools.count(1000 * number)


def _run(name: str, check: Callable[[], Any], rank: int, folder: Path | None) -> None:
    _write(folder, rank, name, "started", "")
    began = time.perf_counter()
    try:
        value = check()
    except BaseException:
        _write(folder, rank, name, "failed", traceback.format_exc())
    else:
        _write(folder, rank, name, "ok", "", value)
    if folder is None:
        print(f"rank {rank} {name}: {time.perf_counter() - began:.2f} s", flush=True)


def _write(folder: Path | None, rank: int, name: str, status: str, trace: str, value: Any = None) -> None:
    record = {"check": name, "status": status, "traceback": trace, "value": value}
    if folder is None:
        if status == "failed":
            print(f"rank {rank} {name} FAILED\n{trace}", flush=True)
        return
    with contextlib.closing((folder / f"{rank}.jsonl").open("a")) as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
