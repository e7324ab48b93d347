"""A server over streamable HTTP: headers, OAuth, refusals, floods, and an end."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import Context

from tests.mcp_adapter.servers import notes_server
from understudy_mcp import (
    HttpServer,
    Limits,
    McpConnectionError,
    McpOverflowError,
    McpStartError,
    McpTimeoutError,
    ServerPool,
    Target,
    client_credentials,
)

App = Callable[[dict[str, Any], Any, Any], Any]
QUICK = Limits(start_seconds=20, call_seconds=3, message_bytes=1_000_000)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The application on a free port, until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


def shop() -> Any:
    server = notes_server.make()

    @server.tool()
    def who(context: Context) -> str:
        """The caller."""
        return str(dict(context.headers or {}).get("x-caller"))

    @server.tool()
    def long(size: int) -> str:
        """A text of this size."""
        return "x" * size

    @server.tool()
    async def slow() -> str:
        """Takes long."""
        await asyncio.sleep(30)
        return "done"

    return server.streamable_http_app()


async def test_a_url_is_called_with_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLER", "ada-lovelace")
    with served(shop()) as url:
        async with ServerPool(Target.parse(f"{url}/mcp", headers={"x-caller": "${env:CALLER}"})) as pool:
            assert pool.servers[0].title == "notes"
            async with pool.rollout() as one, pool.rollout() as two:
                assert (
                    await one.call("who", {})
                ).text == "***"  # it was given as a reference, and is treated as a secret
                assert (await two.call("list_notes", {})).text == "[]"
        async with ServerPool(Target.parse(f"{url}/mcp", headers={"x-caller": "ada"})) as pool, pool.rollout() as one:
            assert (await one.call("who", {})).text == "ada"


async def test_a_flood_a_hang_and_the_end_of_a_server_are_told() -> None:
    with served(shop()) as url:
        async with ServerPool(Target.parse(f"{url}/mcp", limits=QUICK)) as pool:
            async with pool.rollout() as tools:
                assert (await tools.call("long", {"size": 30_000})).cut
                with pytest.raises(McpOverflowError):
                    await tools.call("long", {"size": 50_000_000})
            async with pool.rollout() as tools:
                with pytest.raises(McpTimeoutError, match="no answer to the call of 'slow' within call_seconds=3"):
                    await tools.call("slow", {})
    with pytest.raises(McpStartError, match="could not be started, ConnectError"):
        async with ServerPool(Target.parse(f"{url}/mcp", limits=QUICK)):
            pass


async def test_a_server_that_goes_away_ends_the_rollout() -> None:
    with served(shop()) as url:
        pool = ServerPool(Target.parse(f"{url}/mcp", limits=QUICK))
        await pool.__aenter__()
        tools = await pool.acquire()
        assert (await tools.call("list_notes", {})).text == "[]"
    with pytest.raises(McpConnectionError):
        await tools.call("list_notes", {})
    pool.release(tools)
    await asyncio.wait_for(pool.__aexit__(None, None, None), 20)


def refusing(status: int) -> App:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"no \x1b[31mentry"})

    return app


@pytest.mark.parametrize(("status", "reason"), [(401, "Unauthorized"), (403, "Forbidden"), (500, "Internal Server")])
async def test_a_refusal_is_told_with_its_status(status: int, reason: str) -> None:
    with served(refusing(status)) as url, pytest.raises(McpStartError, match=f"HTTP {status} {reason}"):
        async with ServerPool(Target.parse(url, limits=QUICK)):
            pass


async def test_a_compressed_answer_is_refused_as_its_size_is_not_known() -> None:
    bomb = gzip.compress(b" " * 50_000_000)

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": bomb})

    refused = r"it compressed a response \(gzip\) despite `accept-encoding: identity`"
    with served(app) as url, pytest.raises(McpStartError, match=refused):
        async with ServerPool(Target.parse(url, limits=QUICK)):
            pass


async def test_a_client_of_oauth_gets_a_token_and_calls_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = shop()
    monkeypatch.setenv("SHOP_SECRET", "s3cret-words")
    seen: list[tuple[str, str]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await inner(scope, receive, send)
            return
        base = f"http://127.0.0.1:{scope['server'][1]}"
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode()
        seen.append((scope["path"], authorization))
        pages = {
            "/.well-known/oauth-protected-resource/mcp": {"resource": f"{base}/mcp", "authorization_servers": [base]},
            "/.well-known/oauth-authorization-server": {
                "issuer": base,
                "authorization_endpoint": f"{base}/authorize",
                "token_endpoint": f"{base}/token",
                "response_types_supported": ["code"],
            },
            "/token": {"access_token": "granted-token", "token_type": "Bearer", "expires_in": 3600},
        }
        if scope["path"] in pages:
            await respond(send, 200, pages[scope["path"]])
        elif authorization != "Bearer granted-token":
            await respond(send, 401, {}, [(b"www-authenticate", b"Bearer")])
        else:
            await inner(scope, receive, send)

    with served(app) as url:
        auth = client_credentials(f"{url}/mcp", "me", "${env:SHOP_SECRET}", issuer=url)
        target = Target((HttpServer("shop", f"{url}/mcp", auth=auth),), limits=QUICK)
        async with ServerPool(target) as pool, pool.rollout() as tools:
            assert (await tools.call("list_notes", {})).text == "[]"
    assert ("/mcp", "Bearer granted-token") in seen


async def respond(
    send: Any, status: int, body: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    kind = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": kind + (headers or [])})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
