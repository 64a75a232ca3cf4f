"""What several test modules share: in-process worlds, without MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from hvdcomp import compressors
from hvdcomp.compressors import Compressor

settings.register_profile("quick", deadline=None, max_examples=20, derandomize=True, database=None)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

EVERY_METHOD = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "topk": {"cf": 4},
    "dgc": {"cf": 4, "momentum": 0.0},
    "redsync": {"cf": 4},
    "mstopk": {"cf": 4},
    "gaussiank": {"cf": 4},
    "sidcoe": {"cf": 4},
    "sidcogp": {"cf": 4},
    "sidcop": {"cf": 4},
    "threshold": {"threshold": 1.0, "max_density": 0.25},
    "randomk": {"cf": 4},
    "artopk": {"cf": 4},
    "oktopk": {"cf": 4},
    "powersgd": {"rank": 1, "small_matrix_rule": False},
    "gradiveq": {"slice_size": 4, "components": 2, "training_steps": 1, "quantised_steps": 7},
}
"""Each compressor's name, with parameters under which small tensors are compressed too."""


def every_method(**changed: Any) -> list[Compressor]:
    """One compressor of each method; ``changed`` where a method has such parameters."""
    made = []
    for name, parameters in EVERY_METHOD.items():
        known = compressors.available()[name].parameters()
        made.append(compressors.create(name, **parameters | {k: v for k, v in changed.items() if k in known}))
    return made


@pytest.fixture(params=every_method(), ids=lambda compressor: compressor.name)
def method(request: pytest.FixtureRequest) -> Compressor:
    return request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def random_grads() -> Callable[..., list[dict[str, Tensor]]]:
    """Gradients of a number of workers: a matrix, a convolution, a bias, a scalar and an empty tensor."""

    def make(workers: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Mapping[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"bias": (7,), "conv": (4, 3, 3, 3), "empty": (0, 5), "scalar": (), "weight": (7, 12)}
        return [
            {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
            for _ in range(workers)
        ]

    return make
