"""The dashboard behind a key: one page is open, a link works once, viewers only read, changes need the page's token."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from itsdangerous import TimestampSigner

from offbook.server.http.auth import COOKIE, CSRF_HEADER, SESSION_SECONDS, Guard
from offbook.server.records.database import open_records
from offbook.server.records.store import Store
from offbook_dashboard.source import DashboardSource
from offbook_dashboard.viewer import build_viewer

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


async def test_only_the_sign_in_page_is_open_and_leads_back(browser: httpx.AsyncClient) -> None:
    answer = await browser.get("/runs/x?at=2")
    assert answer.status_code == 303 and answer.headers["location"] == "/sign-in?next=%2Fruns%2Fx%3Fat%3D2"
    page = await browser.get(answer.headers["location"])
    assert page.status_code == 200 and 'value="/runs/x?at=2"' in page.text
    assert (await browser.get("/pages/static/app.css")).status_code == 200
    assert (await browser.get("/pages/data/runs/x")).status_code == 401
    assert (await browser.get("/api/models")).status_code == 401


async def test_the_key_opens_a_session_whose_cookie_scripts_cannot_read(browser: httpx.AsyncClient) -> None:
    wrong = await browser.post("/sign-in", data={"key": "nope"})
    assert wrong.status_code == 401 and "The key is wrong" in wrong.text and not browser.cookies
    answer = await browser.post("/sign-in", data={"key": KEY, "next": "//evil.example/x"})
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    assert re.search(r"HttpOnly; Max-Age=\d+; Path=/; SameSite=strict", answer.headers["set-cookie"])
    assert (await browser.get("/")).status_code == 200


async def test_a_one_time_link_works_once(browser: httpx.AsyncClient, guard: Guard) -> None:
    assert guard.sessions is not None
    link = guard.sessions.one_time_link()
    page = await browser.get(link)
    assert page.status_code == 200 and COOKIE not in browser.cookies  # looking at it does not use it up
    token = link.partition("once=")[2]
    assert (await browser.post("/sign-in", data={"once": token})).status_code == 303
    assert (await browser.get("/")).status_code == 200
    browser.cookies.clear()
    again = await browser.post("/sign-in", data={"once": token})
    assert again.status_code == 401 and "was used" in again.text


async def test_a_cookie_that_was_changed_or_is_of_another_key_opens_nothing(browser: httpx.AsyncClient) -> None:
    await browser.post("/sign-in", data={"key": KEY})
    cookie = browser.cookies[COOKIE]
    nonce, moment, signature = cookie.split(".")
    later = f"{nonce}.{'b' if moment[0] == 'a' else 'a'}{moment[1:]}.{signature}"
    changed = f"{nonce}.{moment}.{'b' if signature[0] == 'a' else 'a'}{signature[1:]}"
    for forged in (later, changed, f"x{cookie}", "a.b.c", "", "é"):
        assert isinstance(Guard(KEY).decide("/", {"cookie": f"{COOKIE}={forged}"}, "GET"), tuple)
    assert isinstance(Guard("another-key").decide("/", {"cookie": f"{COOKIE}={cookie}"}, "GET"), tuple)
    assert not isinstance(Guard(KEY).decide("/", {"cookie": f"{COOKIE}={cookie}"}, "GET"), tuple)


async def test_a_session_ends_after_a_week(browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await browser.post("/sign-in", data={"key": KEY})
    age = SESSION_SECONDS
    monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda _: int(time.time()) + age)
    assert (await browser.get("/")).status_code == 200
    age += 2
    assert (await browser.get("/")).status_code == 303


async def test_what_changes_something_wants_the_token_of_a_page(browser: httpx.AsyncClient, guard: Guard) -> None:
    await browser.post("/sign-in", data={"key": KEY})
    cookie = {"cookie": f"{COOKIE}={browser.cookies[COOKIE]}"}
    refused = guard.decide("/api/train", cookie, "POST")
    assert isinstance(refused, tuple) and refused[1] == "csrf_token_missing"
    token = re.search(r'<meta name="csrf" content="([^"]+)">', (await browser.get("/")).text)
    assert token is not None
    assert not isinstance(guard.decide("/api/train", cookie | {CSRF_HEADER: token[1]}, "POST"), tuple)
    assert not isinstance(guard.decide("/api/train", {"authorization": f"Bearer {KEY}"}, "POST"), tuple)


def test_on_loopback_without_a_key_a_page_still_needs_its_token() -> None:
    local, host = Guard(None), {"host": "localhost:8000"}
    refused = local.decide("/pages/again", host, "POST")
    assert isinstance(refused, tuple) and refused[1] == "csrf_token_missing"
    assert not isinstance(local.decide("/v1/chat/completions", host, "POST"), tuple)


async def test_a_read_only_key_reads_pages_and_records_and_nothing_else(
    browser: httpx.AsyncClient, guard: Guard
) -> None:
    await browser.post("/sign-in", data={"key": LOOKER})
    page = await browser.get("/")
    assert page.status_code == 200 and "read only" in page.text
    bearer = {"authorization": f"Bearer {LOOKER}"}
    assert not isinstance(guard.decide("/api/trajectories", bearer, "GET"), tuple)
    for path in ("/v1/chat/completions", "/api/train", "/api/trajectories", "/pages/again"):
        refused = guard.decide(path, bearer, "POST")
        assert isinstance(refused, tuple) and refused[:2] == (403, "read_only_key")


async def test_signing_out_needs_the_token_too(browser: httpx.AsyncClient) -> None:
    await browser.post("/sign-in", data={"key": KEY})
    assert (await browser.post("/sign-out", data={"csrf": "x"})).status_code == 403
    token = re.search(r'name="csrf" value="([^"]+)"', (await browser.get("/")).text)
    assert token is not None
    cookie = browser.cookies[COOKIE]
    assert (await browser.post("/sign-out", data={"csrf": token[1]})).status_code == 303
    assert (await browser.get("/", headers={"cookie": f"{COOKIE}={cookie}"})).status_code == 303
    assert (await browser.get("/")).status_code == 303


async def test_a_session_that_was_signed_out_stays_so_also_after_a_restart(tmp_path: Path) -> None:
    def header(cookie: str) -> dict[str, str]:
        return {"cookie": f"{COOKIE}={cookie}"}

    guard = Guard(KEY, signed_out=tmp_path / "signed_out")
    assert guard.sessions is not None
    cookie, other = guard.sessions.open_by_key(KEY), guard.sessions.open_by_key(KEY)
    assert cookie is not None and other is not None
    guard.sessions.close(header(cookie)["cookie"])
    for later in (guard, Guard(KEY, signed_out=tmp_path / "signed_out")):
        assert isinstance(later.decide("/", header(cookie), "GET"), tuple)
        assert not isinstance(later.decide("/", header(other), "GET"), tuple)
    assert (tmp_path / "signed_out").stat().st_mode & 0o777 == 0o600


async def test_keys_cannot_be_tried_without_end_and_the_servers_link_still_signs_in(
    browser: httpx.AsyncClient, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guard.sessions is not None
    statuses = [(await browser.post("/sign-in", data={"key": f"guess {n}"})).status_code for n in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    limited = await browser.post("/sign-in", data={"key": KEY})
    assert limited.status_code == 429 and 0 < int(limited.headers["retry-after"]) <= 60
    token = guard.sessions.one_time_link().partition("once=")[2]
    assert (await browser.post("/sign-in", data={"once": token})).status_code == 303
    now = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert (await browser.post("/sign-in", data={"key": KEY})).status_code == 303
