"""Streams of responses that the OpenAI SDK parses into a class, without a pydantic warning per chunk.

langchain-openai serialises every event of the SDK, including a snapshot of the response so far. The snapshot's `parsed` field
has another type than the SDK declares, so pydantic warns. langchain-openai uses only the chunks of the events, so this module
passes on nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any


def plain_streams(client: Any) -> Any:
    """Replace a sync or async SDK client for langchain-openai's call that starts such a stream."""

    def stream(**options: Any) -> ChunkStream:
        return ChunkStream(client.beta.chat.completions.stream(**options))

    chat = SimpleNamespace(completions=SimpleNamespace(stream=stream))
    return SimpleNamespace(beta=SimpleNamespace(chat=chat))


class ChunkStream:
    """The SDK's parsed stream, reduced to its chunk events as dicts."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> ChunkStream:
        self._stream = self._manager.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (_chunk_of(event) for event in self._stream if event.type == "chunk")

    async def __aenter__(self) -> ChunkStream:
        self._stream = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._manager.__aexit__(kind, error, trace)

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return (_chunk_of(event) async for event in self._stream if event.type == "chunk")

    def get_final_completion(self) -> Any:
        """The complete parsed response; an awaitable for an async stream."""
        return self._stream.get_final_completion()


def _chunk_of(event: Any) -> dict[str, Any]:
    return {"type": event.type, "chunk": event.chunk.model_dump()}
