"""Before Horovod is initialised, and where it is not as the launcher meant."""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch

import hvdcomp
from ranks.tools import parameters, raised, wrap

INITIALISE = False


def check_horovod_is_not_initialised() -> None:
    params = parameters()
    for make in (
        lambda: wrap(params, "topk"),
        lambda: wrap(params, "none"),
        lambda: hvdcomp.TopK(cf=3).bind(params.items()),
    ):
        assert "hvd.init()" in raised(ValueError, make)


def check_gloo_under_mpirun() -> None:
    """HOROVOD_CONTROLLER=gloo there: each process is alone and none would notice."""
    assert int(os.environ["OMPI_COMM_WORLD_SIZE"]) == 2
    hvd.init()
    assert hvd.size() == 1
    message = raised(RuntimeError, lambda: wrap(parameters(), "topk"))
    assert "mpirun started 2 processes" in message
    assert "HOROVOD_CONTROLLER" in message
    assert "gloo" in message
    hvd.shutdown()
    assert "hvd.init()" in raised(ValueError, lambda: wrap(parameters(), "topk"))


def check_after_shutdown_and_init() -> None:
    """Handles restart at 0 then: nothing of an old optimizer may be waited for."""
    for _round in range(2):
        hvd.init()
        params = parameters()
        optimizer = wrap(params, "topk")
        for _step in range(2):
            optimizer.zero_grad()
            torch.stack([p.sum() for p in params.values()]).sum().backward()
            optimizer.step()
        assert params["layer.2.bias"][0] < 0
        hvd.shutdown()
