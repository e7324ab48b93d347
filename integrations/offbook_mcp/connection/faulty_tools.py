"""Removes tools with a faulty definition from lists of tools: the SDK refuses the whole list for one of them."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from mcp.client._transport import ReadStream, TransportStreams
from mcp.server import Server as LowLevelServer
from mcp.server.context import HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import HandlerEntry
from mcp.server.mcpserver import MCPServer
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCResponse, Tool
from pydantic import BaseModel, ValidationError

from .connection_state import Link
from .servers import InProcess

_Item: TypeAlias = "SessionMessage | Exception"


@asynccontextmanager
async def sound_listings(
    transport: AbstractAsyncContextManager[TransportStreams], link: Link
) -> AsyncGenerator[TransportStreams]:
    """The transport, without faulty tools in lists of tools. The link gets their names and what is wrong."""
    async with transport as (incoming, outgoing):
        yield _SoundListings(incoming, link), outgoing


def sound_server(server: InProcess, link: Link) -> InProcess:
    """A server object that lists no faulty tools: the object itself is not changed. The link gets their names and what is wrong."""
    # The SDK has no public way from an MCPServer to its low-level server.
    inner = server._lowlevel_server if isinstance(server, MCPServer) else server  # pyright: ignore[reportPrivateUsage]
    sound: LowLevelServer[Any] = copy.copy(inner)

    def handler_of(method: str) -> HandlerEntry[Any] | None:
        entry = inner.get_request_handler(method)
        if entry is None or method != "tools/list":
            return entry

        async def sound_list(context: ServerRequestContext[Any, Any], params: Any) -> HandlerResult:
            return _without_faulty(await entry.handler(context, params), link)

        return replace(entry, handler=sound_list)

    sound.get_request_handler = handler_of
    return sound


def _without_faulty(listed: HandlerResult, link: Link) -> HandlerResult:
    """A server object's answer to `tools/list`, as JSON without the faulty tools."""
    result = (
        listed.model_dump(by_alias=True, mode="json", exclude_none=True) if isinstance(listed, BaseModel) else listed
    )
    if not isinstance(result, dict) or not isinstance(tools := result.get("tools"), list):
        return listed
    return {**result, "tools": [_timely(tool) for tool in cast(list[object], tools) if _is_sound(tool, link)]}


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
