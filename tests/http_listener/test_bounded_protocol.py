"""What a stranger without a key may do to a server: send a bounded head and body, in a bounded time, on few connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from offbook.http_listener.config import BoundedProtocol, ConnectionLimiter, ConnectionLimits
from offbook.server.http import app
from offbook.server.http.auth import Guard
from tests.fakes.gateway import gateway_over
from tests.fakes.scripted_sampler import scripted_sampler

KEY = {"authorization": "Bearer the-key"}
LIMITS = ConnectionLimits(
    head_seconds=0.5, body_seconds=0.3, body_rate=10_000, linger_seconds=0.2, connections=12, unadmitted=4
)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


class Bounded:
    """A server with a key behind bounds that are small. `http` has the key."""

    def __init__(self, address: tuple[str, int], http: httpx.AsyncClient, limiter: ConnectionLimiter) -> None:
        self.address, self.http, self.limiter = address, http, limiter

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def sent(self, *pieces: bytes, pause: float = 0.0, most: int = 10**9) -> tuple[bytes, int]:
        """What the server answers to these bytes until it hangs up, and how many of them it let through."""
        reader, writer = await self.connect()
        sent = 0

        async def send() -> None:
            nonlocal sent
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                await asyncio.sleep(pause)

        sending = asyncio.create_task(send())
        try:
            async with asyncio.timeout(10):
                answer = await reader.read()
        except ConnectionError:
            answer = b""
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await closed(writer)
        return answer, sent


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Bounded]:
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as gateway:
        limiter = ConnectionLimiter(LIMITS)
        async with (
            behind(app.build(gateway.services, Guard("the-key")), limiter) as address,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}", headers=KEY, trust_env=False) as http,
        ):
            yield Bounded(address, http, limiter)
        assert limiter.open == 0


@asynccontextmanager
async def behind(application: Any, limiter: ConnectionLimiter) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    protocol: Any = partial(BoundedProtocol, limiter=limiter)
    config = uvicorn.Config(application, log_config=None, access_log=False, lifespan="off", ws="none", http=protocol)
    config.timeout_graceful_shutdown = 1
    config.timeout_keep_alive = 3
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    yield "127.0.0.1", listener.getsockname()[1]
    server.should_exit = True
    await task
    listener.close()


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def answers(server: Bounded) -> None:
    async with asyncio.timeout(5):
        assert (await server.http.get("/v1/models")).status_code == 200


async def test_a_header_line_without_end_is_refused_early_and_others_are_answered(server: Bounded) -> None:
    endless = asyncio.create_task(server.sent(b"GET / HTTP/1.1\r\nx: ", *[b"a" * 100_000] * 1_320))
    await answers(server)
    answer, sent = await endless
    assert error_of(answer) == (431, "header_too_large") if answer else True  # a reset may overtake the words
    assert sent < 20_000_000


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"".join(b"h%d: a\r\n" % at for at in range(300)), "too_many_headers"),
        (b"x: " + b"a" * 70_000 + b"\r\n", "header_too_large"),
    ],
)
async def test_heads_that_come_whole_have_the_same_bounds(server: Bounded, head: bytes, code: str) -> None:
    answer, _ = await server.sent(b"GET /health HTTP/1.1\r\nhost: a\r\n" + head + b"\r\n")
    assert error_of(answer) == (431, code)
    await answers(server)


async def test_two_million_headers_are_given_up_after_the_first(server: Bounded) -> None:
    answer, sent = await server.sent(b"GET / HTTP/1.1\r\n", *[b"a: b\r\n" * 20_000] * 100)
    assert not answer or error_of(answer)[0] == 431
    assert sent < 10_000_000


async def test_a_head_that_does_not_come_is_waited_for_so_long(server: Bounded) -> None:
    for piece in (b"", b"GET / HTTP/1.1\r\nhost"):
        answer, _ = await server.sent(piece)
        assert error_of(answer) == (408, "request_timeout")


async def test_slow_bodies_end_and_steady_ones_do_not(server: Bounded) -> None:
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": "x" * 60_000}]}).encode()
    head = HEAD + b"authorization: Bearer the-key\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer, _ = await server.sent(head + body[:10], *(body[at : at + 1] for at in range(10, 30)), pause=0.05)
    assert error_of(answer) == (408, "request_timeout")
    pieces = [body[at : at + 6_000] for at in range(0, len(body), 6_000)]
    head = head.replace(b"host: a", b"host: a\r\nconnection: close")
    answer, _ = await server.sent(head, *pieces, pause=0.08)  # 75,000 bytes a second
    assert answer.startswith(b"HTTP/1.1 200")


async def test_bodies_of_strangers_are_not_read(server: Bounded) -> None:
    large = [b"x" * 100_000] * 300
    answer, sent = await server.sent(HEAD + b"content-length: 30000000\r\n\r\n", *large)
    assert not answer or error_of(answer) == (401, "missing_api_key")
    assert sent < 12_000_000  # a part of it lies in the sockets' buffers
    small = b"x" * 200_000  # what an honest client with a wrong key sends: it must hear why
    answer, _ = await server.sent(HEAD + b"content-length: 200000\r\n\r\n" + small)
    assert error_of(answer) == (401, "missing_api_key")


async def test_a_stranger_who_stops_within_a_body_is_hung_up_on(server: Bounded) -> None:
    answer, _ = await server.sent(HEAD + b"content-length: 30000000\r\n\r\nxx")
    assert error_of(answer) == (401, "missing_api_key")


async def test_the_framing_of_a_body_is_bounded(server: Bounded) -> None:
    head = HEAD + b"authorization: Bearer the-key\r\ntransfer-encoding: chunked\r\n\r\n"
    for endless in (b"1;" + b"a" * 100_000, b"1\r\nx\r\n0\r\ntrailer: " + b"a" * 100_000):
        answer, sent = await server.sent(head, endless, *[b"a" * 100_000] * 200)
        assert not answer or error_of(answer)[0] == 400
        assert sent < 12_000_000


async def test_a_peer_has_few_connections_until_one_of_its_requests_may_pass(server: Bounded) -> None:
    unadmitted = [await server.connect() for _ in range(4)]
    try:
        await asyncio.sleep(0.05)
        assert error_of((await server.sent(b""))[0]) == (503, "too_many_connections")
    finally:
        for _, writer in unadmitted:
            await closed(writer)
    await asyncio.sleep(0.05)
    await answers(server)  # this client's connection is admitted, and stays open
    known = [httpx.AsyncClient(base_url=str(server.http.base_url), headers=KEY, trust_env=False) for _ in range(8)]
    try:
        for client in known:
            assert (await client.get("/v1/models")).status_code == 200
        assert server.limiter.open == 9
        unkeyed = [await server.connect() for _ in range(3)]
        await asyncio.sleep(0.05)
        assert error_of((await server.sent(b""))[0]) == (503, "too_many_connections")
        for _, writer in unkeyed:
            await closed(writer)
    finally:
        for client in known:
            await client.aclose()


async def test_health_needs_no_key_and_admits_nobody(server: Bounded) -> None:
    async with httpx.AsyncClient(base_url=str(server.http.base_url), trust_env=False) as stranger:
        assert (await stranger.get("/health")).status_code == 200
        assert sum(server.limiter._unadmitted.values()) == 1
        assert (await stranger.get("/v1/models")).status_code == 401
        assert (await stranger.get("/v1/models", headers=KEY)).status_code == 200
        assert not server.limiter._unadmitted


async def test_many_requests_on_one_connection_are_answered_in_order(server: Bounded) -> None:
    ask = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer the-key\r\n\r\n"
    answer, _ = await server.sent(ask * 5 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 6 and b'"object":"list"' in answer
