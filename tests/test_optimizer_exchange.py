"""What travels between ranks, and through Horovod's own optimizer."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", checks_of("exchange"))
def test_exchange(check: str) -> None:
    job("exchange", HOROVOD_TIMELINE="{folder}/timeline.json").verify(check)
