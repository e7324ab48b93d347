"""The stdio transport: runs a server in its own process group, bounds its messages, and always ends it.

The SDK's own transport buffers a line without limit, hides the process, and leaves it running when this process is killed.
It is used on Windows only, where it puts the server into a job object that ends with this process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import StdioServerParameters, stdio_client
from mcp.client._transport import TransportStreams
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

from offbook.base.errors import ConfigError
from offbook.base.redaction import error_text
from offbook_mcp.errors import McpOverflowError, McpProtocolError

from .connection_state import Link
from .reaper import reaper
from .servers import ROLLOUT_DIR, Limits, References, StdioServer, argument_secrets

logger = logging.getLogger("offbook")

_EXIT_SECONDS = 1.0
"""Time for the process to end after its stdin was closed, and again after SIGTERM."""
_FLUSH_SECONDS = 0.5
"""Time to send the messages that are still queued."""


def stdio_transport(
    server: StdioServer, folder: Path | None, link: Link, limits: Limits
) -> AbstractAsyncContextManager[TransportStreams]:
    """The SDK's streams for a new process of this server.

    Raises ConfigError for a reference that cannot be resolved. Entering raises OSError when the command cannot be started.
    """
    params = parameters(server, folder, link)
    if sys.platform == "win32":
        return stdio_client(params)
    return _process_streams(params, link, limits.message_bytes)


def parameters(server: StdioServer, folder: Path | None, link: Link) -> StdioServerParameters:
    """The command with references and `{rollout_dir}` replaced. Secret values are stored on the link."""
    references = References(server.name, server.workspace)

    def filled(text: str, name: str = "") -> str:
        return references.resolve(text, name).replace(ROLLOUT_DIR, str(folder or ROLLOUT_DIR))

    variables = {**_file_variables(server), **server.env}
    env = {name: filled(value, name) for name, value in variables.items()}
    command, *args = (filled(word) for word in (server.command, *server.args))
    cwd = filled(server.cwd) if server.cwd is not None else None
    for secret in argument_secrets([command, *args]):
        references.add_secret(secret)
    link.secrets = references.secrets()
    return StdioServerParameters(command=command, args=args, env=env, cwd=cwd)


def _file_variables(server: StdioServer) -> dict[str, str]:
    if server.env_file is None:
        return {}
    try:
        lines = server.env_file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"MCP server {server.name!r}: envFile {server.env_file} cannot be read: {error}") from error
    pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {name.strip().removeprefix("export "): value.strip().strip("\"'") for name, _, value in pairs}


@asynccontextmanager
async def _process_streams(params: StdioServerParameters, link: Link, limit: int) -> AsyncGenerator[TransportStreams]:
    process = await anyio.open_process(
        [params.command, *params.args],
        env=get_default_environment() | (params.env or {}),
        cwd=params.cwd,
        start_new_session=True,
    )
    try:
        reaper.add(process.pid)
        async with _ProcessStreams(process, link, limit).running() as streams:
            yield streams
    finally:
        reaper.remove(process.pid)  # no await, so it also runs while this task is being cancelled
        _close_pipes(process)


class _ProcessStreams:
    def __init__(self, process: Process, link: Link, limit: int) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._stdin: ByteSendStream = process.stdin
        self._stdout: ByteReceiveStream = process.stdout
        self._stderr: ByteReceiveStream = process.stderr
        self._link = link
        self._limit = limit
        self._written = anyio.Event()
        self._stderr_read = anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[TransportStreams]:
        """Run the readers and the writer inside the block, and stop the process at its end."""
        incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_send, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        with incoming, received, to_send, outgoing:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, incoming)
                tasks.start_soon(self._write, outgoing)
                tasks.start_soon(self._read_stderr)
                try:
                    yield received, to_send
                finally:
                    with anyio.CancelScope(shield=True):
                        received.close()  # the reader continues and discards messages
                        to_send.close()
                        await self._stop()
                    tasks.cancel_scope.cancel()

    async def _read(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Read messages line by line. `unanswered` counts the bytes since the last response, which the limit bounds."""
        buffer = bytearray()
        unanswered = 0
        with incoming:
            try:
                async for chunk in self._stdout:
                    unanswered += len(chunk)
                    buffer += chunk
                    if b"\n" in chunk:
                        *lines, rest = bytes(buffer).split(b"\n")
                        buffer = bytearray(rest)
                        for line in lines:
                            if await self._deliver(line, incoming):
                                unanswered = len(buffer)
                    if unanswered > self._limit:
                        return self._overflow()
            except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError) as error:
                logger.debug("stdout of MCP server %r: %s", self._link.server, error_text(error))
            await self._note_ending()

    async def _deliver(self, line: bytes, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> bool:
        """Pass a message on, and return whether it was a response. Other lines are noted: many servers print to stdout."""
        if not line.strip() or self._link.fault is not None:
            return False
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            self._stray(line)
            return False
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session is closing
            await incoming.send(SessionMessage(message))
        return isinstance(message, JSONRPCResponse | JSONRPCError)

    def _stray(self, line: bytes) -> None:
        """Note a line that is not a message. A line that looks like a broken message may be a lost response, so it ends the
        connection."""
        text = line[:1_000].decode("utf-8", "replace")
        self._link.stray_line = text
        try:
            value: object = json.loads(line)
            broken = isinstance(value, dict) and "jsonrpc" in value
        except (ValueError, RecursionError):
            broken = text.lstrip().startswith('{"')
        if broken:
            what = f"it sent a message that is not valid JSON-RPC: {self._link.clean(text)!r}"
            self._link.fail(McpProtocolError(self._link.server, what))

    def _overflow(self) -> None:
        self._link.fail(
            McpOverflowError(
                self._link.server,
                f"it sent more than message_bytes={self._limit:,} without an answer; ask for less (a smaller page, a "
                "filter), or raise the limit",
            )
        )

    async def _note_ending(self) -> None:
        """Close the link after the server ended, once its exit code and the rest of stderr are known."""
        with anyio.move_on_after(_EXIT_SECONDS):
            code = await _exit_code(self._process)
            self._link.ending = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            await self._stderr_read.wait()
        self._link.closed.set()

    async def _write(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        try:
            with outgoing:
                async for item in outgoing:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await self._stdin.send(text.encode() + b"\n")
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            await self._note_ending()
        finally:
            self._written.set()

    async def _read_stderr(self) -> None:
        try:
            async for chunk in self._stderr:
                self._link.add_stderr(chunk)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError) as error:
            logger.debug("stderr of MCP server %r: %s", self._link.server, error_text(error))
        finally:
            self._stderr_read.set()

    async def _stop(self) -> None:
        """Close stdin, send SIGTERM, then SIGKILL, with a pause after each. After a fault, send SIGKILL at once."""
        if self._link.fault is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with anyio.move_on_after(_FLUSH_SECONDS):
            await self._written.wait()
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            await self._stdin.aclose()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with anyio.move_on_after(_EXIT_SECONDS):
                await _exit_code(self._process)
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
        with anyio.move_on_after(_EXIT_SECONDS):
            await _exit_code(self._process)


async def _exit_code(process: Process) -> int:
    """Wait for the exit code. `process.wait()` would also wait for pipes that a grandchild may hold open."""
    while process.returncode is None:
        await asyncio.sleep(0.01)
    return process.returncode


def _close_pipes(process: Process) -> None:
    """Close asyncio's ends of the pipes. No public method does this while a grandchild holds the other ends."""
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    if transport is not None:
        transport.close()
