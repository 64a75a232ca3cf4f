"""A drop-in for ``hvd.DistributedOptimizer``: what scripts do with it goes on working."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", checks_of("usage"))
def test_usage(check: str) -> None:
    job("usage").verify(check)
