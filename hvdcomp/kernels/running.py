"""How compiled loops run: on which tensors, in which threads, into which memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_T = TypeVar("_T")

_ALONE = 65536
"""Elements up to which one thread is faster than several."""
_BLOCK = 64
_SEGMENT = 2**18
"""Elements, a multiple of what the loops add up at a time."""


def on_cpu(tensor: Tensor) -> bool:
    """Whether the compiled loops over integers take a tensor."""
    return tensor.device.type == "cpu"


def is_compiled(values: Tensor) -> bool:
    """Whether a tensor is what the compiled loops take: contiguous float32 on the CPU."""
    return on_cpu(values) and values.dtype == torch.float32 and values.is_contiguous()


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new 1-D tensor; on the CPU in numpy's memory, whose huge pages are touched in a fifth of the time."""
    if device.type != "cpu" or not numel:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)


def ranges(numel: int, step: int = _BLOCK) -> list[tuple[int, int]]:
    """A range for each of PyTorch's threads, whole multiples of ``step`` each but the last."""
    threads = torch.get_num_threads() if numel > _ALONE else 1
    size = -(-numel // threads // step) * step or step
    return [(start, min(start + size, numel)) for start in range(0, numel, size)] or [(0, 0)]


def segments(numel: int) -> list[tuple[int, int]]:
    """Ranges that do not depend on the number of threads, for sums that must not either."""
    return [(start, min(start + _SEGMENT, numel)) for start in range(0, numel, _SEGMENT)] or [(0, 0)]


def in_threads(run: Callable[[int, int], _T], bounds: list[tuple[int, int]]) -> list[_T]:
    """What ``run`` returns for each range, in their order."""
    threads = min(len(bounds), torch.get_num_threads())
    if threads == 1:
        return [run(*both) for both in bounds]
    return list(_pool(threads).map(lambda both: run(*both), bounds))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="hvdcomp-kernel")
