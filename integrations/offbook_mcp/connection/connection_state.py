"""The state of a connection beside its messages: why it ended, what the server wrote to stderr, and its faulty tools.

Tools with a faulty definition are removed from lists of tools: the SDK refuses the whole list for one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias, cast

from mcp.client._transport import ReadStream, TransportStreams
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCResponse, Tool
from pydantic import ValidationError

from offbook.base.redaction import error_text
from offbook.base.text import one_line, printable
from offbook_mcp.errors import McpServerError

from .servers import without

_TAIL_BYTES = 8_192
_TAIL_LINES = 15


@dataclass
class Link:
    """The state of one connection to one server. `closed` is set when no further response can come."""

    server: str
    secrets: tuple[str, ...] = field(default=(), repr=False)
    fault: McpServerError | None = None  # why the connection ended, if the transport knows more than the SDK
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    ending: str | None = None  # "exit code 1", once the process has ended
    http_error: str | None = None  # the last one, such as "HTTP 401 Unauthorized"
    stray_line: str | None = None  # the last line on stdout that was not a message
    faulty_tools: dict[str, str] = field(default_factory=dict[str, str])  # name -> what is wrong with its definition
    _stderr: bytearray = field(default_factory=bytearray)

    def fail(self, fault: McpServerError) -> None:
        """Record why the connection ends; the first reason wins."""
        self.fault = self.fault or fault
        self.closed.set()

    def add_stderr(self, chunk: bytes) -> None:
        """Append a chunk of the server's stderr; only the end is kept."""
        self._stderr += chunk
        del self._stderr[:-_TAIL_BYTES]

    @property
    def stderr(self) -> str:
        """The end of what the server wrote to stderr."""
        return self._stderr.decode("utf-8", "replace")

    def reason(self, error: BaseException | None = None) -> str:
        """Why the connection ended, as one printable clause."""
        if self.ending is not None:
            return f"the process ended ({self.ending})"
        if self.http_error is not None:
            return self.clean(self.http_error)
        return self.clean(error_text(error)) if error is not None else "the connection closed"

    def details(self) -> str:
        """Text that helps to find the cause: a stray line on stdout, and the end of stderr. Empty, or begins with `;`."""
        text = ""
        if self.stray_line is not None:
            text += f"; its stdout has lines that are not MCP messages, such as {self.clean(self.stray_line)!r}"
        if lines := [line for line in self.stderr.splitlines() if line.strip()][-_TAIL_LINES:]:
            text += "; the end of its stderr:\n" + printable(without("\n".join(lines), self.secrets))
        return text

    def clean(self, text: str) -> str:
        """A server's text on one line, printable and without secrets."""
        return one_line(without(text, self.secrets))


_Item: TypeAlias = "SessionMessage | Exception"


@asynccontextmanager
async def sound_listings(
    transport: AbstractAsyncContextManager[TransportStreams], link: Link
) -> AsyncGenerator[TransportStreams]:
    """The transport, without faulty tools in lists of tools. The link gets their names and what is wrong."""
    async with transport as (incoming, outgoing):
        yield _SoundListings(incoming, link), outgoing


class _SoundListings:
    """A stream of messages that drops faulty tools from responses to `tools/list`."""

    def __init__(self, stream: ReadStream[_Item], link: Link) -> None:
        self._stream = stream
        self._link = link

    async def receive(self) -> _Item:
        return self._sound(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Item:
        return self._sound(await self._stream.__anext__())

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(exc_type, exc_val, exc_tb)

    @property
    def last_context(self) -> object:
        """The sender's context, which the SDK reads where a stream has it."""
        return getattr(self._stream, "last_context", None)

    def _sound(self, item: _Item) -> _Item:
        if not isinstance(item, SessionMessage) or not isinstance(item.message, JSONRPCResponse):
            return item
        listed = item.message.result.get("tools")
        if isinstance(listed, list):
            tools = cast(list[object], listed)
            item.message.result["tools"] = [_timely(tool) for tool in tools if _is_sound(tool, self._link)]
        return item


def _timely(tool: object) -> object:
    """A tool's definition, its output schema without patterns: the SDK checks results in the event loop, without a time
    limit for them."""
    fields = cast(dict[str, object], tool)
    return {**fields, "outputSchema": _without_patterns(fields["outputSchema"])} if "outputSchema" in fields else tool


def _without_patterns(schema: object) -> object:
    """Keywords that a missing `patternProperties` would make stricter go with it."""
    if isinstance(schema, list):
        return [_without_patterns(one) for one in cast(list[object], schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast(dict[str, object], schema)
    gone = {"pattern"} if isinstance(fields.get("pattern"), str) else set[str]()
    if isinstance(fields.get("patternProperties"), dict):
        gone |= {"patternProperties", "additionalProperties", "unevaluatedProperties"}
    return {name: _without_patterns(value) for name, value in fields.items() if name not in gone}


def _is_sound(tool: object, link: Link) -> bool:
    """Whether a tool's definition is valid. The link gets the name of one that is not, and what is wrong."""
    fields = cast(dict[str, object], tool) if isinstance(tool, dict) else {}
    name = str(fields.get("name", "a tool without a name"))
    schema = fields.get("inputSchema")
    try:
        Tool.model_validate(fields, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        fault = f"its definition is faulty: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    else:
        if isinstance(schema, dict) and cast(dict[str, object], schema).get("type") == "object":
            return True
        fault = 'its definition is faulty: inputSchema needs "type": "object"'
    link.faulty_tools[name] = link.clean(fault)
    return False
