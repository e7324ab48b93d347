"""The page of a route's takeover in Chromium: nothing on the console, nothing too wide, nothing that axe finds serious."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook.server.records.store import Store
from tests.server.pages.browsing import LOOKS, faults, opened, overflow
from tests.server.pages.recorded_takeover import save_takeover
from tests.server.pages.viewing import viewing

pytestmark = pytest.mark.slow("a browser")


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a dashboard with a takeover and no rollout."""
    folder: Path = tmp_path_factory.mktemp("takeover")

    async def record() -> None:
        store = await Store.open(f"sqlite:///{folder / 'records.db'}")
        await save_takeover(store)
        await store.close()

    asyncio.run(record())
    with viewing(folder) as url:
        yield url


@pytest.mark.parametrize(("scheme", "size"), LOOKS)
@pytest.mark.parametrize("path", ["/", "/takeovers/order-desk"])
def test_the_takeover_is_accessible_fits_and_says_nothing_on_its_console(
    route: str, chromium: Any, axe: str, path: str, scheme: str, size: str
) -> None:
    with opened(chromium, route + path, scheme=scheme, size=size) as (page, said):
        assert faults(page, axe) == []
        assert overflow(page) == 0
        assert said == []
