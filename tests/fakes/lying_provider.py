"""A provider that answers with whatever bytes a test gives it, on a plain socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class LyingProvider:
    """Answers every request with `pieces`, and then closes the connection. `KEY` in them is the key that the request had.

    `heads`: what was asked, as it came. `silent`: it reads, and never answers."""

    url: str = ""
    pieces: Sequence[bytes] = ()
    silent: bool = False
    heads: list[bytes] = field(default_factory=list[bytes])

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if self.silent:
                await reader.read()
            _, _, after = head.lower().partition(b"authorization: bearer ")
            key = head[len(head) - len(after) :].partition(b"\r\n")[0] if after else b"no key"
            for piece in self.pieces:
                writer.write(piece.replace(b"KEY", key))
                await writer.drain()
                await asyncio.sleep(0)
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError):  # the gateway has left
            writer.close()


@asynccontextmanager
async def lying_provider() -> AsyncGenerator[LyingProvider]:
    provider = LyingProvider()
    server = await asyncio.start_server(provider.answer, "127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield provider
    finally:
        server.close()
