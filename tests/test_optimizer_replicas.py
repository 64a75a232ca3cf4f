"""Real ranks equal the simulation and each other, over MPI and Gloo, with 1 to 4 ranks."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks

ALL = tuple(checks_of("replicas"))
SIMULATED = tuple(check for check in ALL if "simulated" in check)
METHODS = tuple(check for check in ALL if check.count("_") == 4)
WORLDS = [
    ("none", 1, METHODS),
    ("mpirun", 1, METHODS),
    ("mpirun", 2, ALL),
    ("mpirun", 3, SIMULATED),
    ("mpirun", 4, SIMULATED),
    ("horovodrun", 2, ALL),
    ("horovodrun", 4, METHODS),
]


@pytest.mark.parametrize(
    ("launcher", "ranks", "checks", "check"),
    [
        pytest.param(launcher, ranks, checks, check, id=f"{launcher}-{ranks}-{check}")
        for launcher, ranks, checks in WORLDS
        for check in checks
    ],
)
def test_ranks_equal_the_simulation_and_each_other(
    launcher: str, ranks: int, checks: tuple[str, ...], check: str
) -> None:
    job("replicas", ranks, launcher, checks).verify(check)
