"""Settings that a schedule assigns, on real ranks over MPI and over Gloo."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", checks_of("assignment"))
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_assignment(check: str, launcher: str) -> None:
    job("assignment", 2, launcher).verify(check)
