"""What all tests share: a skip that continuous integration does not accept."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def require() -> Callable[[bool, str], None]:
    """`require(available, "command that enables it")`: skips, or fails under UNDERSTUDY_TEST_REQUIRE=1."""

    def check(available: bool, command: str) -> None:
        if available:
            return
        if os.environ.get("UNDERSTUDY_TEST_REQUIRE"):
            pytest.fail(f"not available, and UNDERSTUDY_TEST_REQUIRE is set: {command}")
        pytest.skip(f"enable with: {command}")

    return check
