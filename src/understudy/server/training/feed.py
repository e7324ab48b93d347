"""What listeners hear of a train request while it waits and runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ...types import TrainResult
from ...wire import TrainEvent, TrainRequest


@dataclass
class TrainFeed:
    """One accepted request and its events so far. Every listener hears all of them; the last is result or error."""

    request: TrainRequest
    events: list[TrainEvent] = field(default_factory=list[TrainEvent])
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].kind in ("result", "error")

    def publish(self, event: TrainEvent) -> None:
        self.events.append(event)
        self._news.set()
        self._news = asyncio.Event()

    def end(self, result: TrainResult) -> None:
        """Publish the result."""
        self.publish(TrainEvent(kind="result", result=result))

    def fail(self, message: str, code: str) -> None:
        """Publish the error."""
        error = {"message": message, "code": code, "param": None}
        self.publish(TrainEvent(kind="error", message=message, error=error))

    async def listen(self) -> AsyncIterator[TrainEvent]:
        heard = 0
        while True:
            news = self._news
            while heard < len(self.events):
                heard += 1
                yield self.events[heard - 1]
            if self.ended:
                return
            await news.wait()
