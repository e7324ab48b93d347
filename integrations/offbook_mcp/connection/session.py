"""A session with one MCP server. A dedicated task opens and closes it; calls may come from any task of the same loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

from mcp import Client, MCPError, types
from mcp.client._transport import Transport
from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, REQUEST_TIMEOUT
from pydantic import ValidationError

from offbook.base.errors import ConfigError
from offbook.base.redaction import error_text
from offbook_mcp.errors import (
    McpConnectionError,
    McpProtocolError,
    McpServerError,
    McpStartError,
    McpTimeoutError,
)
from offbook_mcp.tools.tool import ServerDescription, as_server_tool

from .connection_state import Link, sound_listings
from .http_transport import http_transport, speaks_sse, sse_transport
from .process_transport import stdio_transport
from .servers import AnyServer, HttpServer, InProcess, Limits, StdioServer, names_secret, without

logger = logging.getLogger("offbook")
ResultT = TypeVar("ResultT")

_CLOSE_SECONDS = 8.0
"""Longer than the SDK and our transports need to end a server that does not stop."""
_GRACE_SECONDS = 2.0
"""Added to a call's deadline, so that the SDK's own timeout comes first."""
_MAX_PAGES, _MAX_TOOLS = 100, 1_000
_CLOSED = ("Connection closed", "SSE stream ", "server answered a request with 202")
"""How the SDK's own errors of the code CONNECTION_CLOSED begin."""
_HTTP_FAILED = "Server returned an error response"  # the SDK's message for an HTTP error status


class Session:
    """A running session. `Session.start` creates it; `close` ends it and the server's process."""

    description: ServerDescription

    def __init__(self, server: AnyServer, folder: Path | None, limits: Limits) -> None:
        self.server = server
        self._folder = folder
        self._limits = limits
        self._link = Link(server.name)
        self._client: Client | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._timed_out = False
        self._closing = False
        # An empty context: the session may outlive the rollout that starts it, and must not belong to its capture.
        self._task = asyncio.create_task(self._run(), name=f"mcp {server.name}", context=Context())

    @classmethod
    async def start(cls, server: AnyServer, folder: Path | None = None, limits: Limits | None = None) -> Session:
        """Connect and list the tools.

        Raises McpStartError, or ConfigError for a setting that cannot be resolved.
        """
        session = cls(server, folder, limits or Limits())
        try:
            async with asyncio.timeout(session._limits.start_seconds):
                await session._ready.wait()
        except TimeoutError:
            await session.close()
            seconds = session._limits.start_seconds
            what = f"was not ready within start_seconds={seconds:g}; if it needs longer, raise that (--start-timeout)"
            raise session._start_error(what) from None
        except BaseException:
            await session.close()
            raise
        if session._client is None:
            await session.close()
            if isinstance(session._error, ConfigError):
                raise session._error
            raise session._start_error(session._start_failure()) from session._error
        return session

    @property
    def usable(self) -> bool:
        """Whether another call makes sense: it is connected, and no call has timed out."""
        return self._client is not None and not self._link.closed.is_set() and not self._timed_out

    def give_up(self) -> None:
        """Note that a caller stopped waiting for an answer: a server that is stuck in one call may answer no other."""
        self._timed_out = True

    async def call(self, tool: str, arguments: dict[str, object]) -> types.CallToolResult:
        """Call a tool. An error that the tool or the server reports is a result with `is_error`.

        Raises McpServerError: McpConnectionError, McpTimeoutError, McpOverflowError, McpProtocolError.
        """
        seconds = self._limits.call_seconds
        try:
            return await self._ask(
                f"the call of {tool!r}",
                lambda client: client.call_tool(tool, arguments, read_timeout_seconds=seconds),
            )
        except MCPError as error:
            return _error_result(error.message)
        except McpServerError:
            raise
        except RuntimeError as error:  # raised by the SDK for a response that violates the tool's output schema
            return _error_result(str(error))

    def hide(self, text: str) -> str:
        """Mask the secrets that the server was started with: a tool may return its environment."""
        return without(text, self._link.secrets)

    async def close(self) -> None:
        """End the connection and the process. Does not raise if the server fails while closing."""
        self._closing = True
        self._stop.set()
        if not self._ready.is_set():
            self._task.cancel()
        for _ in range(2):
            done, _ = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
            if done:
                return
            self._task.cancel()
        logger.warning("MCP server %r could not be closed in %g s", self.server.name, 2 * _CLOSE_SECONDS)

    async def _ask(self, what: str, send: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
        """Send a request and wait for its response, the end of the connection or the deadline."""
        client = self._client
        if client is None or self._link.closed.is_set():
            raise self._connection_error(what)
        deadline = self._limits.call_seconds + _GRACE_SECONDS
        began = time.monotonic()
        request = asyncio.ensure_future(send(client))
        closed = asyncio.ensure_future(self._link.closed.wait())
        try:
            await asyncio.wait({request, closed, self._task}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
            if closed.done() or self._task.done():
                raise self._connection_error(what)
            raise self._timeout_error(what)
        except MCPError as error:
            raise self._as_server_error(what, error, time.monotonic() - began) or error from error
        except ValidationError as error:
            problem = self._link.clean(str(error.errors(include_url=False)[0]))
            raise McpProtocolError(self.server.name, f"{what}: its answer is not valid MCP: {problem}") from error
        finally:
            await _cancelled(request, closed)

    def _as_server_error(self, what: str, error: MCPError, seconds: float) -> McpServerError | None:
        """Convert an SDK error that means that no response came within these seconds; None if the error is the server's
        response. Its code does not tell: a server may use the SDK's codes -32000 and -32001 for errors of its own."""
        if error.code == REQUEST_TIMEOUT and seconds >= self._limits.call_seconds:
            return self._timeout_error(what)
        if error.code == CONNECTION_CLOSED and error.message.startswith(_CLOSED):
            return self._connection_error(what, error)
        if error.code == INTERNAL_ERROR and error.message == _HTTP_FAILED and self._link.http_error is not None:
            return self._connection_error(what, error)
        return self._link.fault

    def _timeout_error(self, what: str) -> McpServerError:
        self.give_up()
        seconds = self._limits.call_seconds
        remedy = "if it needs longer, raise that (--call-timeout)"
        return McpTimeoutError(
            self.server.name,
            f"no answer to {what} within call_seconds={seconds:g}; {remedy}{self._link.details()}",
        )

    def _connection_error(self, what: str, error: BaseException | None = None) -> McpServerError:
        if self._link.fault is not None:
            return self._link.fault
        reason = self._link.reason(error or self._error)
        return McpConnectionError(self.server.name, f"{reason}, during {what}{self._link.details()}")

    def _start_error(self, what: str) -> McpServerError:
        shown = self._link.clean(self.server.shown())
        hints = _sdk_hint(self._link.stderr)
        if isinstance(self.server, StdioServer) and self._link.ending is not None:
            hints += "; it inherits only a few variables, such as PATH: --env NAME passes another"
        return McpStartError(self.server.name, f"{what}: {shown}{hints}{self._link.details()}")

    def _start_failure(self) -> str:
        if isinstance(self._error, FileNotFoundError | NotADirectoryError | PermissionError):
            where = self._error.filename or "the command"
            return f"cannot be started, {self._error.strerror} ({where}){_start_hint(str(where))}"
        if self._link.fault is not None:
            return f"could not be started, {self._link.fault}"
        return (
            f"could not be started, {self._link.reason(self._error)}{_access_hint(self.server, self._link.http_error)}"
        )

    async def _run(self) -> None:
        """The session's task: open the client, keep it until `close` or the server's end, and close it."""
        try:
            async with self._connected() as client:
                self.description = await self._described(client)
                self._client = client
                self._ready.set()
                await self._until_ended()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._error = McpConnectionError(self.server.name, "the transport gave up")  # anyio's own cancellation
        except Exception as error:  # noqa: BLE001  # any failure of the transport ends the session, also an ExceptionGroup
            self._error = error
            if not self._closing:
                logger.debug("MCP server %r: %s", self.server.name, error_text(error))
        finally:
            self._client = None
            self._link.closed.set()
            self._ready.set()

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[Client]:
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(_client(self._transport(), "auto"))
            except Exception:
                if not isinstance(self.server, HttpServer) or not speaks_sse(self._link):
                    raise
                older = sound_listings(sse_transport(self.server, self._link, self._limits), self._link)
                client = await stack.enter_async_context(_client(older, "legacy"))
            yield client

    def _transport(self) -> Transport | InProcess:
        if isinstance(self.server, StdioServer):
            return sound_listings(stdio_transport(self.server, self._folder, self._link, self._limits), self._link)
        if isinstance(self.server, HttpServer):
            return sound_listings(http_transport(self.server, self._link, self._limits), self._link)
        return self.server.object_for(self._folder)

    async def _until_ended(self) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._stop, self._link.closed)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._client = None
            for task in waiting:
                task.cancel()

    async def _described(self, client: Client) -> ServerDescription:
        identity, offers = client.server_info, client.server_capabilities
        tools = await self._listed(client) if offers.tools is not None else []
        return ServerDescription(
            name=self.server.name,
            title=identity.name if identity else None,
            version=identity.version if identity else None,
            protocol=client.protocol_version,
            tools=tuple(as_server_tool(self.server.name, tool, read_only=self.server.read_only) for tool in tools),
            faulty=dict(self._link.faulty_tools),
        )

    async def _listed(self, client: Client) -> list[types.Tool]:
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None or len(tools) > _MAX_TOOLS:
                break
        if cursor is not None or len(tools) > _MAX_TOOLS:
            raise McpProtocolError(self.server.name, f"it lists more than {_MAX_TOOLS} tools or {_MAX_PAGES} pages")
        return tools


def _client(transport: Transport | InProcess, mode: Literal["auto", "legacy"]) -> Client:
    return Client(transport, mode=mode, client_info=_client_info(), cache=None)


@cache  # reading the version takes as long as connecting to an in-process server
def _client_info() -> types.Implementation:
    return types.Implementation(name="offbook", version=version("offbook"))


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they end. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
    for task in done:
        if not task.cancelled():
            task.exception()


def _start_hint(command: str) -> str:
    """What to do about a command that cannot be started: scripts need their interpreter."""
    for suffix, interpreter in ((".py", "python"), (".js", "node"), (".ts", "npx tsx")):
        if command.endswith(suffix):
            return f'; a script needs its interpreter in front, as in "{interpreter} {command}"'
    return ""


def _sdk_hint(stderr: str) -> str:
    """What to do about a server in Python that was written for version 1 of the MCP SDK and found version 2."""
    if "No module named 'mcp.server.fastmcp'" not in stderr and "'Server' object has no attribute 'list_" not in stderr:
        return ""
    return (
        "; it was written for version 1 of the MCP SDK, and this Python has version 2: give it an environment of its own with "
        '"mcp<2", and name the interpreter there, as in "/path/to/.venv/bin/python server.py"'
    )


def _access_hint(server: AnyServer, http_error: str | None) -> str:
    """What to do about a URL that denies access: give credentials, or other ones."""
    if not isinstance(server, HttpServer) or http_error is None or not http_error.startswith(("HTTP 401", "HTTP 403")):
        return ""
    if server.auth is not None or any(names_secret(name) for name in server.headers):
        return "; it does not accept the credentials: check that they are valid and permit this use"
    return (
        "; give its token, as in --header 'Authorization: Bearer ${env:TOKEN}', or for OAuth `auth` in an mcp.json or "
        "Target.parse(url, auth=...)"
    )


def _error_result(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)
