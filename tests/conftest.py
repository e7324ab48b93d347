"""What all tests share: a skip that continuous integration does not accept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

import understudy as us


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


@pytest.fixture(scope="session")
def local_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[us.LocalBackend]:
    """One server with the tiny policy for all tests that need a real one; give each test its own model name."""
    backend = us.LocalBackend(tmp_path_factory.mktemp("understudy"), threads=1)
    yield backend
    backend.close()
