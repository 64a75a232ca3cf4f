"""Compression that loses nothing equals plain Horovod."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", checks_of("parity"))
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_free_methods_equal_plain_horovod(check: str, ranks: int) -> None:
    job("parity", ranks).verify(check)
