"""What goes wrong on one rank ends alike on all ranks, without a hang."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", checks_of("faults"))
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_faults(check: str, launcher: str) -> None:
    job("faults", 2, launcher).verify(check)
