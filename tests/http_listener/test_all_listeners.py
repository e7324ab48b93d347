"""Every HTTP listener of the package rejects the same strangers in the same way: a new one joins the table here."""

from __future__ import annotations

import ast
import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn

from offbook.http_listener import access_checks, config
from offbook.http_listener.config import ConnectionLimits
from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.server.records.database import open_records
from offbook.server.records.store import Store
from offbook_dashboard.source import DashboardSource
from offbook_dashboard.viewer import build_viewer
from offbook_mcp.commands.serve import ToolEndpoint
from offbook_mcp.training.agent_loop import LoopOptions
from tests.fakes.gateway import gateway_over
from tests.fakes.scripted_sampler import scripted_sampler
from tests.paths import ROOT

UNUSED: Any = None
"""Stands for what no rejected request reaches."""
LISTENERS = {
    "src/offbook/server/serving.py": ("server", "server with a key"),
    "integrations/offbook_dashboard/viewer.py": ("ui", "ui with a key"),
    "integrations/offbook_mcp/commands/serve.py": ("mcp serve", "mcp serve with a key"),
}
"""Files that start a listener, and the listeners below that each one starts."""
ELSEWHERE = {"integrations/offbook_compare/gateway.py"}
"""Files of wings that start one: attacked by the tests of the wing."""
NAMES = [name for names in LISTENERS.values() for name in names]
CHAT = "/v1/chat/completions"
FAKES = {"src/offbook/testing/asgi.py", "src/offbook/testing/llm_endpoint.py"}
"""Scripted servers of the test kit. They hold nothing of anybody's."""
BEHIND = {"src/offbook/engine/inference/embedded.py"}
"""The embedded engine listens on a Unix socket in a folder of the server's account, behind the server's checks."""


def calls_of(path: Path) -> set[str]:
    """The names that a file calls or derives classes from; none where no word of it can start a listener."""
    code = path.read_text("utf-8")
    if not any(
        word in code
        for word in ("uvicorn", "start_server", "start_unix_server", "run_app", "Server", "listener_config")
    ):
        return set()
    tree = ast.parse(code)
    used = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    used += [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return {ast.unparse(name) for name in used}


def test_every_listener_is_configured_in_one_place_and_attacked_below() -> None:
    others = {"uvicorn.Config", "uvicorn.run", "asyncio.start_server", "asyncio.start_unix_server", "web.run_app"}
    configured, own = set[str](), set[str]()
    for root in ("src", "integrations"):
        for path in sorted((ROOT / root).rglob("*.py")):
            used, name = calls_of(path), str(path.relative_to(ROOT))
            if "listener_config" in used:
                configured.add(name)
            if used & others or any(each.endswith(("HTTPServer", "TCPServer")) for each in used):
                own.add(name)
    assert configured - ELSEWHERE == set(LISTENERS)
    assert own == {"src/offbook/http_listener/config.py"} | FAKES | BEHIND


@asynccontextmanager
async def application(name: str, key: str | None, folder: Path) -> AsyncIterator[Any]:
    if name.startswith("server"):
        async with scripted_sampler() as scripted, gateway_over(scripted, folder) as gateway:
            yield app.build(gateway.services, Guard(key))
    elif name.startswith("ui"):
        await (await Store.open(folder / "records.db")).close()
        records = open_records(folder)
        yield build_viewer(DashboardSource(records, folder), Guard(key))
        records.close()
    else:
        yield ToolEndpoint(UNUSED, UNUSED, LoopOptions(), 1_000, UNUSED).application(key)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for a request's head and body."""
    limits = ConnectionLimits(head_seconds=0.5, body_seconds=0.5, linger_seconds=0.2, connections=32, unadmitted=8)
    monkeypatch.setattr(config, "connection_limits", lambda: limits)
    monkeypatch.setattr(access_checks, "DISCARD_SECONDS", 0.1)


@pytest.fixture(params=NAMES)
async def listener(
    request: pytest.FixtureRequest, tmp_path: Path, short_limits: None
) -> AsyncIterator[tuple[int, str | None]]:
    """The port of a listener, and its key."""
    name = cast(str, request.param)
    key = "the-key" if name.endswith("with a key") else None
    async with application(name, key, tmp_path) as served:
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(config.listener_config(served))
        server.config.timeout_graceful_shutdown = 1
        task = asyncio.create_task(server.serve([listening]))
        yield listening.getsockname()[1], key
        server.should_exit = True
        await task


async def sent(port: int, *lines: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and whole answer to a POST with these header lines; the connection stays open for writing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([f"POST {CHAT} HTTP/1.1", *lines, "", ""]).encode() + body)
    async with asyncio.timeout(5):
        answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return int(answer.split()[1]), answer


HERE, LENGTH = "host: localhost", "content-length: 2"
JSON = "content-type: application/json"
PAGE = ("origin: https://evil.example", "sec-fetch-site: cross-site")


@pytest.mark.parametrize(
    "lines",
    [
        (HERE, LENGTH, "content-type: text/plain;charset=UTF-8", *PAGE),
        (HERE, LENGTH, "content-type: application/x-www-form-urlencoded", *PAGE),
        (HERE, LENGTH, "content-type: application/x-www-form-urlencoded"),
        (HERE, LENGTH, "content-type: text/plain"),
        (HERE, LENGTH, JSON, "origin: null"),
        (HERE, LENGTH, JSON, "sec-fetch-site: same-site"),
    ],
    ids=["no-cors", "form", "form of an old browser", "text", "sandboxed", "same site"],
)
async def test_a_web_page_runs_nothing(listener: tuple[int, str | None], lines: tuple[str, ...]) -> None:
    port, key = listener
    credentials = () if key is None else (f"authorization: Bearer {key}",)  # as a browser keeps Basic credentials
    assert (await sent(port, *lines, *credentials, body=b"{}"))[0] in (403, 415)


async def test_without_a_key_another_host_and_with_one_a_stranger_is_rejected_before_the_body(
    listener: tuple[int, str | None],
) -> None:
    port, key = listener
    status, _ = await sent(port, "host: evil.example", JSON, "content-length: 30000000")
    assert status == (403 if key is None else 401)


async def test_a_client_that_disconnects_within_its_body_is_at_most_one_line_of_the_log(
    listener: tuple[int, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    port, key = listener
    lines = [HERE, LENGTH, JSON, *([f"authorization: Bearer {key}"] if key else [])]
    caplog.set_level(logging.WARNING, "uvicorn")
    caplog.set_level(logging.INFO)
    caplog.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([f"POST {CHAT} HTTP/1.1", *lines, "", "{"]).encode())
    writer.transport.abort()
    await sent(port, *lines, body=b"{}")  # is answered after the other has ended
    assert len(caplog.text.splitlines()) <= 1, caplog.text


async def test_sizes_are_bounded(listener: tuple[int, str | None]) -> None:
    port, key = listener
    credentials = (f"authorization: Bearer {key}",) if key is not None else ()
    assert (await sent(port, HERE, JSON, *credentials, f"x: {'a' * 70_000}", LENGTH))[0] == 431
    status, answer = await sent(port, HERE, JSON, *credentials, f"content-length: {2**40}")
    assert (status, b"connection: close" in answer) == (413, True)


async def test_idle_connections_end_and_hold_no_threads(listener: tuple[int, str | None]) -> None:
    port, _ = listener
    before = threading.active_count()
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert threading.active_count() <= before + 1
    async with asyncio.timeout(5):
        answers = [await reader.read() for reader, _ in idle]
    assert {answer.split()[1] for answer in answers} == {b"503", b"408"}
    for _, writer in idle:
        writer.close()
