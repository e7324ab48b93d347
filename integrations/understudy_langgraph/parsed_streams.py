"""Streams of answers that the SDK parses into a class, without pydantic's warnings.

langchain-openai turns each of the SDK's events into a dict, and with it the snapshot of the whole answer so far, whose `parsed`
the SDK declares as another type than it has: a warning for every chunk. What it reads of the events are the chunks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any


def plain_streams(client: Any) -> Any:
    """Stands for an SDK client, sync or async, where langchain-openai begins such a stream."""

    def stream(**options: Any) -> ChunkStream:
        return ChunkStream(client.beta.chat.completions.stream(**options))

    chat = SimpleNamespace(completions=SimpleNamespace(stream=stream))
    return SimpleNamespace(beta=SimpleNamespace(chat=chat))


class ChunkStream:
    """The SDK's stream, its chunks as dicts."""

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
        """The whole answer with what it was parsed into; of an async stream an awaitable."""
        return self._stream.get_final_completion()


def _chunk_of(event: Any) -> dict[str, Any]:
    return {"type": event.type, "chunk": event.chunk.model_dump()}
