"""A server over streamable HTTP: headers, OAuth, refusals, floods, and an end."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from mcp.server.mcpserver import Context

from offbook_mcp import (
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
from tests.mcp_adapter.servers import notes_server

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
        async with ServerPool(
            Target.parse(f"{url}/mcp", headers={"x-caller": "${env:CALLER}"}, allow_all=True)
        ) as pool:
            assert pool.servers[0].title == "notes"
            async with pool.rollout() as one, pool.rollout() as two:
                assert (
                    await one.call("who", {})
                ).text == "***"  # it was given as a reference, and is treated as a secret
                assert (await two.call("list_notes", {})).text == "[]"
        async with (
            ServerPool(Target.parse(f"{url}/mcp", headers={"x-caller": "ada"}, allow_all=True)) as pool,
            pool.rollout() as one,
        ):
            assert (await one.call("who", {})).text == "ada"


async def test_a_server_with_sse_alone_is_called_over_it(tmp_path: Path) -> None:
    server = notes_server.make()

    @server.tool()
    def long(size: int) -> str:
        """A text of this size."""
        return "x" * size

    with served(server.sse_app()) as url:
        file = tmp_path / "mcp.json"
        file.write_text(json.dumps({"mcpServers": {"notes": {"type": "sse", "url": f"{url}/sse"}}}))
        for target in (
            Target.parse(f"{url}/sse", limits=QUICK, allow_all=True),
            Target.parse(file, limits=QUICK, allow_all=True),
        ):
            async with ServerPool(target) as pool, pool.rollout() as rollout:
                assert pool.servers[0].title == "notes"
                for _ in range(3):  # more than one answer may have, in all
                    assert (await rollout.call("list_notes", {})).text == "[]"
                    assert not (await rollout.call("long", {"size": 400_000})).is_error
                with pytest.raises(McpOverflowError, match="message_bytes"):
                    await rollout.call("long", {"size": 600_000})


async def test_a_url_without_a_server_is_told_with_what_it_answered() -> None:
    with served(shop()) as url, pytest.raises(McpStartError, match="HTTP 404 Not Found"):
        async with ServerPool(Target.parse(f"{url}/nothing", limits=QUICK, allow_all=True)):
            pass


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_a_flood_a_hang_and_the_end_of_a_server_are_told() -> None:
    with served(shop()) as url:
        async with ServerPool(Target.parse(f"{url}/mcp", limits=QUICK, allow_all=True)) as pool:
            async with pool.rollout() as tools:
                assert (await tools.call("long", {"size": 30_000})).cut
                with pytest.raises(McpOverflowError):
                    await tools.call("long", {"size": 50_000_000})
            async with pool.rollout() as tools:
                with pytest.raises(McpTimeoutError, match="no answer to the call of 'slow' within call_seconds=3"):
                    await tools.call("slow", {})
    with pytest.raises(McpStartError, match="could not be started, ConnectError"):
        async with ServerPool(Target.parse(f"{url}/mcp", limits=QUICK, allow_all=True)):
            pass


async def test_a_server_that_goes_away_ends_the_rollout() -> None:
    with served(shop()) as url:
        pool = ServerPool(Target.parse(f"{url}/mcp", limits=QUICK, allow_all=True))
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
        async with ServerPool(Target.parse(url, limits=QUICK, allow_all=True)):
            pass


@pytest.mark.parametrize("status", [401, 403])
async def test_a_url_that_denies_access_is_told_with_the_ways_to_give_credentials(status: int) -> None:
    with served(refusing(status)) as url:
        with pytest.raises(McpStartError) as denied:
            async with ServerPool(Target.parse(url, limits=QUICK, allow_all=True)):
                pass
        with pytest.raises(McpStartError, match="it does not accept the credentials: check that they are valid"):
            async with ServerPool(
                Target.parse(url, headers={"Authorization": "Bearer old-token"}, limits=QUICK, allow_all=True)
            ):
                pass
    for remedy in ("--header 'Authorization: Bearer ${env:TOKEN}'", "`auth` in an mcp.json", "Target.parse(url, auth="):
        assert remedy in str(denied.value)


async def test_another_refusal_of_a_url_speaks_of_no_credentials() -> None:
    with served(refusing(500)) as url, pytest.raises(McpStartError) as refused:
        async with ServerPool(Target.parse(url, limits=QUICK, allow_all=True)):
            pass
    assert "Authorization" not in str(refused.value)


async def test_a_compressed_answer_is_refused_as_its_size_is_not_known() -> None:
    bomb = gzip.compress(b" " * 50_000_000)

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": bomb})

    refused = r"it compressed a response \(gzip\) despite `accept-encoding: identity`"
    with served(app) as url, pytest.raises(McpStartError, match=refused):
        async with ServerPool(Target.parse(url, limits=QUICK, allow_all=True)):
            pass


def with_oauth(inner: Any, seen: list[tuple[str, str]]) -> App:
    """The application behind OAuth: it grants `granted-token` to every client, and notes paths and authorizations in `seen`."""

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

    return app


async def test_a_client_of_oauth_gets_a_token_and_calls_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_SECRET", "s3cret-words")
    seen: list[tuple[str, str]] = []
    with served(with_oauth(shop(), seen)) as url:
        auth = client_credentials(f"{url}/mcp", "me", "${env:SHOP_SECRET}", issuer=url)
        target = Target((HttpServer("shop", f"{url}/mcp", auth=auth),), limits=QUICK, allow_all=True)
        async with ServerPool(target) as pool, pool.rollout() as tools:
            assert (await tools.call("list_notes", {})).text == "[]"
    assert ("/mcp", "Bearer granted-token") in seen


async def test_a_clients_secret_and_its_token_are_in_no_result(tmp_path: Path) -> None:
    inner = notes_server.make()
    seen: list[tuple[str, str]] = []

    @inner.tool()
    def leak(context: Context) -> list[str]:
        """All that the server knows of its client."""
        return [
            seen[-1][1],
            dict(seen)["/token"],
            str(dict(context.headers or {}).get("authorization")),
            "the secret: s3cret-words",
        ]

    with served(with_oauth(inner.streamable_http_app(), seen)) as url:
        oauth = {"CLIENT_ID": "me", "CLIENT_SECRET": "s3cret-words", "issuer": url}
        path = tmp_path / "mcp.json"
        path.write_text(json.dumps({"mcpServers": {"shop": {"url": f"{url}/mcp", "auth": oauth}}}))
        async with ServerPool(Target.parse(path, limits=QUICK, allow_all=True)) as pool, pool.rollout() as tools:
            answer = await tools.call("leak", {})
    assert answer.structured == {"result": ["Bearer ***", "Basic ***", "Bearer ***", "the secret: ***"]}


@pytest.mark.parametrize("page", ["resource_metadata", "authorization_servers", "redirect"])
async def test_an_answer_of_oauth_sends_no_request_to_another_address(page: str) -> None:
    async def unreachable(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await respond(send, 404, {})

    reached: list[str] = []
    with served(unreachable) as elsewhere:

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            base = f"http://127.0.0.1:{scope['server'][1]}"
            if scope["path"] == "/mcp":
                named = f'Bearer resource_metadata="{elsewhere if page == "resource_metadata" else base}/page"'
                await respond(send, 401, {}, [(b"www-authenticate", named.encode())])
            elif scope["path"] == "/page" and page == "redirect":
                await respond(send, 302, {}, [(b"location", f"{elsewhere}/latest".encode())])
            elif scope["path"] == "/page":
                await respond(send, 200, {"resource": f"{base}/mcp", "authorization_servers": [elsewhere]})
            else:
                await respond(send, 404, {})

        with served(app) as url:
            auth = client_credentials(f"{url}/mcp", "me", "s3cret-words", issuer=url)
            with pytest.raises(McpStartError):
                async with ServerPool(
                    Target((HttpServer("shop", f"{url}/mcp", auth=auth),), limits=QUICK, allow_all=True)
                ):
                    pass
    assert reached == []


class _Signed(httpx2.Auth):
    """Authentication of a user's own."""

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response]:
        request.headers["authorization"] = "Signature by-my-own-hand"
        yield request


async def test_a_credential_of_any_authentication_is_in_no_result() -> None:
    inner = notes_server.make()

    @inner.tool()
    def leak(context: Context) -> str:
        """The caller's credential."""
        return str(dict(context.headers or {}).get("authorization")).split()[1]

    with served(inner.streamable_http_app()) as url:
        target = Target.parse(f"{url}/mcp", auth=_Signed(), allow_all=True)
        async with ServerPool(target) as pool, pool.rollout() as tools:
            assert (await tools.call("leak", {})).text == "***"


async def respond(
    send: Any, status: int, body: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    kind = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": kind + (headers or [])})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
