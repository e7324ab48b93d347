"""Removes tools with a faulty definition from a server's answers: the SDK refuses the whole list for one of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self, TypeAlias, cast

from mcp.client._transport import ReadStream, TransportStreams
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCResponse, Tool
from pydantic import ValidationError

from .link import Link

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
            item.message.result["tools"] = [tool for tool in tools if self._is_sound(tool)]
        return item

    def _is_sound(self, tool: object) -> bool:
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
        self._link.faulty_tools[name] = self._link.clean(fault)
        return False
