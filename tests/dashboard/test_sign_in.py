"""The dashboard behind a key: a browser asks for it as a password, viewers only read, and no other site changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook.server.http.auth import Guard
from offbook.server.records.database import open_records
from offbook.server.records.store import Store
from offbook_dashboard.source import DashboardSource
from offbook_dashboard.viewer import build_viewer

from .viewing import viewing

KEY, LOOKER = "the-servers-own-key", "only-looking"


@pytest.fixture
def guard() -> Guard:
    return Guard(KEY, (LOOKER,))


@pytest.fixture
async def browser(tmp_path: Path, guard: Guard) -> AsyncIterator[httpx.AsyncClient]:
    store = await Store.open(tmp_path / "records.db")
    await store.close()
    records = open_records(tmp_path)
    app = build_viewer(DashboardSource(records, tmp_path), guard)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://dash.example") as client:
        yield client
    records.close()


@pytest.mark.parametrize("path", ["/", "/runs/x?at=2", "/pages/static/app.css", "/pages/data/runs/x", "/api/models"])
async def test_without_the_key_nothing_is_shown_and_a_browser_asks_for_it(
    browser: httpx.AsyncClient, path: str
) -> None:
    for auth in (None, ("anyone", "nope"), ("anyone", "")):
        answer = await browser.get(path, auth=auth)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic realm=")
        assert KEY not in answer.text


@pytest.mark.parametrize("key", [KEY, LOOKER])
@pytest.mark.parametrize("user", ["", "anyone"])
async def test_the_key_is_the_password_of_any_user(browser: httpx.AsyncClient, user: str, key: str) -> None:
    page = await browser.get("/", auth=(user, key))
    assert page.status_code == 200 and "set-cookie" not in page.headers
    assert (await browser.get("/pages/static/app.css", auth=(user, key))).status_code == 200


async def test_another_sites_page_cannot_use_the_password_that_a_browser_keeps(browser: httpx.AsyncClient) -> None:
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        answer = await browser.post("/api/train", auth=("anyone", KEY), json={}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    form = await browser.post("/api/train", auth=("anyone", KEY), data={"a": "b"})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "content_type_not_json")


def test_a_read_only_key_reads_pages_and_records_and_nothing_else(guard: Guard) -> None:
    bearer = {"authorization": f"Bearer {LOOKER}"}
    assert not isinstance(guard.decide("/api/trajectories", bearer, "GET"), tuple)
    for path in ("/v1/chat/completions", "/api/train", "/api/trajectories", "/pages/again"):
        refused = guard.decide(path, bearer, "POST")
        assert isinstance(refused, tuple) and refused[:2] == (403, "read_only_key")


@pytest.mark.slow("a browser")
def test_a_browser_with_the_password_loads_the_page_its_styles_and_its_scripts(chromium: Any, tmp_path: Path) -> None:
    async def records() -> None:
        await (await Store.open(tmp_path / "records.db")).close()

    with ThreadPoolExecutor(1) as apart:  # Playwright's loop runs in this thread
        apart.submit(lambda: asyncio.run(records())).result()
    with viewing(tmp_path, KEY) as url:
        with pytest.raises(Exception, match="ERR_INVALID_AUTH_CREDENTIALS"):  # nobody answers its dialog
            chromium.new_context().new_page().goto(url)
        context = chromium.new_context(http_credentials={"username": "anyone", "password": KEY})
        page = context.new_page()
        statuses: list[int] = []
        page.on("response", lambda response: statuses.append(response.status))
        assert page.goto(url, wait_until="networkidle").status == 200
        assert page.title().startswith("Runs") and len(statuses) >= 4 and set(statuses[1:]) <= {200, 401}
        assert page.evaluate("getComputedStyle(document.body).margin") == "0px"
        assert context.cookies() == []
