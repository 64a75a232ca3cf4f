"""Checkpoints that survive a crash or a full disk: one file a rank, complete or not there at all.

checkpoints/latest                 names the newest complete checkpoint, written last
checkpoints/step-000120/rank-0.pt  {"shared": ..., "own": ...}
checkpoints/step-000120/rank-1.pt  {"own": ...}
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

KEEP = 2
"""Complete checkpoints that are kept."""

Gather = Callable[[str], list[str]]
"""A string of every rank, on every rank: the barrier between writing the files and naming them."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the previous one is intact."""


@dataclass(frozen=True)
class Latest:
    """The newest complete checkpoint."""

    folder: Path
    step: int
    workers: int


def save(
    root: Path,
    step: int,
    *,
    worker: int,
    workers: int,
    shared: Mapping[str, Any] | None,
    own: Mapping[str, Any],
    gather: Gather,
) -> Path:
    """Write this rank's part of a checkpoint; on rank 0 name it the latest once every rank has written its part.

    Args:
        root: the folder of all checkpoints.
        shared: what is alike on all ranks (rank 0 only).
        own: what belongs to this rank.
        gather: collective.

    Raises CheckpointError on every rank when any rank could not write (a full disk, say).
    """
    folder = root / f"step-{step:06d}"
    content = {"own": own} if shared is None else {"own": own, "shared": shared}
    faults = [fault for fault in gather(_attempt(lambda: _write_part(folder, worker, content))) if fault]
    if not faults:
        naming = _attempt(lambda: _name_latest(root, folder, step, workers)) if worker == 0 else ""
        faults = [fault for fault in gather(naming) if fault]
    if faults:
        if worker == 0:
            discard_incomplete(root)
        raise CheckpointError(f"the checkpoint of step {step} could not be written: {faults[0]}")
    return folder


def find_latest(root: Path) -> Latest | None:
    """The newest complete checkpoint below `root`, None where there is none. Raises CheckpointError when broken."""
    marker = root / "latest"
    try:
        named = json.loads(marker.read_text(encoding="utf-8"))
        latest = Latest(root / named["folder"], named["step"], named["workers"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{marker} cannot be read ({error}): write into it the folder to resume from") from error
    missing = [w for w in range(latest.workers) if not _part(latest.folder, w).exists()]
    if missing:
        raise CheckpointError(f"{latest.folder} lacks the file of rank {missing[0]}; does every rank see this folder?")
    return latest


def discard_incomplete(root: Path) -> None:
    """Remove what a failed save, or a crash within one, has left behind the newest complete checkpoint."""
    latest = find_latest(root)
    for folder in root.glob("step-*"):
        if latest is None or _step_of(folder) > latest.step:
            shutil.rmtree(folder, ignore_errors=True)


def load_shared(latest: Latest) -> dict[str, Any]:
    """What is alike on all ranks."""
    return _read_part(latest.folder, 0)["shared"]


def load_own(latest: Latest, worker: int) -> dict[str, Any]:
    """What belonged to one rank."""
    return _read_part(latest.folder, worker)["own"]


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of the global generators of Python, NumPy and torch."""
    version, keys, position = random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]
    name, numbers, at, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": [version, keys, position],
        "numpy": [name, [int(n) for n in numbers], int(at), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the global generators to what `rng_state` saw."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write all of it or nothing: to a temporary name in the same folder, to the disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _part(folder: Path, worker: int) -> Path:
    return folder / f"rank-{worker}.pt"


def _write_part(folder: Path, worker: int, content: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()  # torch.save to a full disk raises a RuntimeError that names no cause
    torch.save(content, buffer)
    write_atomically(_part(folder, worker), buffer.getbuffer())


def _read_part(folder: Path, worker: int) -> dict[str, Any]:
    path = _part(folder, worker)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _name_latest(root: Path, folder: Path, step: int, workers: int) -> None:
    marker = {"folder": folder.name, "step": step, "workers": workers}
    write_atomically(root / "latest", json.dumps(marker).encode())
    _remove_others(root, step)


def _remove_others(root: Path, step: int) -> None:
    """Keep the newest `KEEP` up to `step`; later ones are left-overs of a run that was taken back to here."""
    folders = sorted(root.glob("step-*"), key=_step_of)
    kept = [folder for folder in folders if _step_of(folder) <= step][-KEEP:]
    for folder in set(folders) - set(kept):
        shutil.rmtree(folder, ignore_errors=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _attempt(action: Callable[[], None]) -> str:
    """What went wrong in words, nothing if nothing did: for telling the other ranks."""
    try:
        action()
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
