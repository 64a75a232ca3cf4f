"""Raw gradients that a run keeps for measurements: one worker's own, as they were before any exchange.

gradients/step-000120.pt           {parameter's name: float32 tensor}
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdcomp.config import ConfigError
from hvdcomp.training.checkpoint import write_atomically

FOLDER = "gradients"
"""Within the run's folder."""


def recorded_steps(total: int, count: int) -> frozenset[int]:
    """``count`` of the steps 1 to ``total``, each in the middle of its share of them; all where there are no more."""
    return frozenset(-(-(2 * i + 1) * total // (2 * count)) for i in range(count))


class GradientRecorder:
    """Copies the gradients of some steps while backward makes them, and writes them when the step is over.

    A copy is taken before a gradient reaches ``p.grad``: stock Horovod reduces that in place while backward goes on.

    Args:
        model: whose parameters are recorded.
        run_dir: the run's folder.
        steps: which are recorded, counted from 1.
        untimed: makes a context in which no iteration's time passes.
    """

    def __init__(
        self,
        model: nn.Module,
        run_dir: Path,
        steps: Collection[int],
        untimed: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._folder, self._steps, self._untimed = model, run_dir / FOLDER, steps, untimed
        self._copies: dict[str, Tensor] = {}

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around the backward passes of a step, whose gradients are summed."""
        with ExitStack() as stack:
            if step in self._steps:
                for name, parameter in self._model.named_parameters():
                    if parameter.requires_grad:
                        stack.callback(parameter.register_hook(self._copier(name)).remove)
            yield

    def save(self, step: int) -> None:
        """Write what was copied since the last call, if anything was. Raises OSError when it cannot be written."""
        if self._copies:
            buffer = io.BytesIO()
            torch.save({name: self._copies[name] for name in sorted(self._copies)}, buffer)
            write_atomically(self._folder / f"step-{step:06d}.pt", buffer.getbuffer())
            self._copies = {}

    def _copier(self, name: str) -> Callable[[Tensor], None]:
        def copy(gradient: Tensor) -> None:
            with self._untimed():
                dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
                copied = dense.to("cpu", torch.float32, copy=True).contiguous()
                self._copies[name] = copied.add_(self._copies[name]) if name in self._copies else copied

        return copy


def load_gradients(run_dir: Path | str) -> dict[int, dict[str, Tensor]]:
    """What a run recorded: step -> parameter's name -> float32 tensor, in the order of the steps, names sorted.

    Files are mapped into memory, so that what is not used is not read.

    Raises ConfigError when there is nothing, or a file cannot be read.
    """
    files = sorted((Path(run_dir) / FOLDER).glob("step-*.pt"))
    if not files:
        raise ConfigError(
            f"{run_dir} holds no recorded gradients; make some with `hvdcomp train CONFIG run_dir={run_dir} "
            "record_gradients=10`"
        )
    return {int(path.stem.removeprefix("step-")): _read(path) for path in files}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
