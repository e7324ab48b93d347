"""A client that disconnects, within its body or within its answer, is at most one line of the server's log."""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import urlsplit

import pytest

from offbook.base.types import CallStatus
from offbook.server.http import training_api
from offbook.server.http.json_body import JsonRoute
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedCompletion
from tests.server.http.test_openai_api import DEADLINE, until_recorded

CHAT = "/t/t1/v1/chat/completions"
ROUTES = [
    (method, route.path.replace("{", "").replace("}", ""))
    for route in training_api.router.routes
    if isinstance(route, JsonRoute)
    for method in route.methods
]


async def begun(url: str, request: str, body: bytes, *, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the head of a request and `sent` bytes of its body were sent."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    lines = (f"{request} HTTP/1.1", f"host: {place.netloc}", "content-type: application/json")
    writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body[:sent])
    await writer.drain()
    return reader, writer


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "uvicorn")  # as the real server has it
    caplog.set_level(logging.INFO)
    return caplog


async def until_logged(log: pytest.LogCaptureFixture) -> list[str]:
    async with asyncio.timeout(DEADLINE):
        while not log.records:
            await asyncio.sleep(0.01)
    return log.text.splitlines()


async def test_within_a_body(gateway: Gateway, log: pytest.LogCaptureFixture) -> None:
    assert len(ROUTES) > 10
    for method, path in [*ROUTES, ("POST", CHAT)]:
        log.clear()
        _, writer = await begun(gateway.url, f"{method} {path}", b'{"model": "agent"}', sent=5)
        writer.transport.abort()
        [line] = await until_logged(log)
        assert line.endswith(f"{method} {path}: the client disconnected before the request was complete")


async def test_within_an_answer(gateway: Gateway, log: pytest.LogCaptureFixture) -> None:
    for number, stream in enumerate((True, False), 1):
        gate = asyncio.Event()
        gateway.sampler.completions.append(ScriptedCompletion(gates={int(stream): gate}))
        message = {"role": "user", "content": "hi"}
        body = json.dumps({"model": "default", "messages": [message], "stream": stream}).encode()
        reader, writer = await begun(gateway.url, f"POST {CHAT}", body, sent=len(body))
        await gateway.sampler.arrived.acquire()
        if stream:
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        calls = await until_recorded(gateway, "t1", number)
        assert {call.status for call in calls} == {CallStatus.CANCELLED}
        gate.set()
    assert log.text == ""
