"""Values worked by hand, of every method, on 1 to 8 simulated workers; real ranks have them in check_methods."""

from __future__ import annotations

import pytest
from hand_values import VALUES, Value

from hvdcomp.compressors import available
from hvdcomp.simulation import World


def test_every_method_has_a_value() -> None:
    assert {value.compressor.name for value in VALUES} == set(available())


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value.compressor))
def test_values_worked_by_hand(value: Value, workers: int) -> None:
    world = World(workers, value.compressor)
    for _ in range(value.steps):
        means = world.step([{"w": value.gradient(worker)} for worker in range(workers)])
    for worker in range(workers):
        value.check(worker, workers, means[worker]["w"], world.residual(worker, "w"))
