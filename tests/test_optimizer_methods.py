"""Every method under the distributed optimizer, on real ranks."""

from __future__ import annotations

import pytest
from ranks import checks_of, job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", checks_of("methods"))
@pytest.mark.parametrize("ranks", [2, 3])
def test_methods(check: str, ranks: int) -> None:
    job("methods", ranks).verify(check)
