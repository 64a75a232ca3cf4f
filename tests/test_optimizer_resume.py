"""Compressor states: resuming, other worlds, process sets."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", checks_of("resume"))
def test_resume(check: str) -> None:
    job("resume").verify(check)


@pytest.mark.parametrize("check", checks_of("worlds"))
def test_worlds_of_other_sizes_and_process_sets(check: str) -> None:
    job("worlds", 4).verify(check)
