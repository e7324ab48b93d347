"""Calls that the server refuses by itself: before anything is sampled, and with the connection left as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from offbook.base.types import CallStatus
from offbook.base.wire import TRAJECTORY_HEADER
from offbook.server.calls import chat_exchange as exchange
from offbook.server.calls.chat_request import MAX_MESSAGES, MAX_SHAPE_BYTES
from tests.fakes.gateway import Gateway

T1 = {TRAJECTORY_HEADER: "t1"}
LONG = "x" * MAX_SHAPE_BYTES


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]}, "tools", MAX_SHAPE_BYTES),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": LONG}}}},
            "response_format",
            MAX_SHAPE_BYTES,
        ),
        ({"guided_regex": LONG}, "guided_regex", MAX_SHAPE_BYTES),
        ({"messages": [{"role": "user", "content": "hi"}] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
    ],
)
async def test_more_than_a_call_may_bring_is_a_413_with_the_limit(
    gateway: Gateway, fields: dict[str, Any], param: str, limit: int
) -> None:
    response = await gateway.chat(**fields)
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "too_large")
    assert str(limit) in error["message"] and len(error["message"]) < 200
    assert gateway.sampler.received == []


async def test_long_messages_are_the_engines_to_judge(gateway: Gateway) -> None:
    response = await gateway.chat(messages=[{"role": "user", "content": LONG * 2}])
    assert response.status_code == 200


@pytest.mark.parametrize("field", ["response_format", "chat_template_kwargs", "metadata"])
async def test_a_body_that_is_nested_too_deeply_is_a_400(gateway: Gateway, field: str) -> None:
    nested: Any = {"type": "text"}
    for _ in range(500):
        nested = {"type": "text", "a": nested}
    response = await gateway.chat(T1, **{field: nested})
    assert response.status_code == 400
    assert "nested too deeply" in response.json()["error"]["message"]


# ---- defects of our own


class Broken(Exception):
    """Something that nobody foresaw."""


class Connection:
    """One connection to the server, as it is: what is asked on it is answered on it, or not at all."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(content))}
        lines |= headers or {}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        async with asyncio.timeout(10):
            first, *rest = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            length = next(int(line.split(":")[1]) for line in rest if line.startswith("content-length"))
            return int(first.split()[1]), json.loads(await self._reader.readexactly(length))

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def connection(gateway: Gateway) -> AsyncIterator[Connection]:
    address = httpx.URL(gateway.url)
    made = Connection(*await asyncio.open_connection(address.host, address.port))
    yield made
    await made.close()


CHAT = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}


async def test_after_a_defect_of_ours_the_connection_still_answers(
    gateway: Gateway, connection: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Any:
        raise Broken("secret detail")

    with monkeypatch.context() as patched:
        patched.setattr(gateway.services.models.registry, "names", broken)
        patched.setattr(gateway.services.sampler.calls, "post", broken)
        for method, path, body in (("GET", "/v1/models", None), ("POST", "/v1/chat/completions", CHAT)):
            status, answer = await connection.ask(method, path, body, T1)
            assert (status, answer["error"]["code"]) == (500, "internal_error")
            assert "Broken" in answer["error"]["message"] and "secret detail" not in answer["error"]["message"]
            assert "secret detail" in caplog.text
            caplog.clear()
    assert (await connection.ask("POST", "/v1/chat/completions", CHAT))[0] == 200
    (call,) = await gateway.calls("t1")
    assert call.status == CallStatus.FAILED and "Broken" in (call.error or "")


async def test_a_stream_in_which_something_breaks_ends_with_an_error_event(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, chunks = exchange.split, iter(range(10))

    def broken(chunk: Any) -> Any:
        if next(chunks) == 1:
            raise Broken("mid-stream")
        return split(chunk)

    monkeypatch.setattr(exchange, "split", broken)
    response = await gateway.chat(T1, stream=True)
    *_, last, done, _ = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert done == "data: [DONE]"
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED]
