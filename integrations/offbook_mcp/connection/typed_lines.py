"""Reads lines from a terminal or a pipe without blocking the event loop or its shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import TextIO


async def typed_line(stream: TextIO) -> str | None:
    """Read one line without its end; None at the end of the stream. A daemon thread waits for it, so Ctrl-C does not."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        text = stream.readline()
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: line.done() or line.set_result(text))

    threading.Thread(target=read, name="typed line", daemon=True).start()
    return (await line).rstrip("\n") if await line else None


async def typed_lines(stream: TextIO) -> AsyncIterator[str]:
    """Yield the stream's lines until it ends. A daemon thread reads them, so Ctrl-C does not wait for the next line."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()

    def put(line: str | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lines.put_nowait, line)

    def read() -> None:
        try:
            for line in stream:
                put(line.rstrip("\n"))
        finally:
            put(None)

    threading.Thread(target=read, name="typed lines", daemon=True).start()
    while (line := await lines.get()) is not None:
        yield line
