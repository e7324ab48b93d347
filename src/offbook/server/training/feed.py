"""The events of one train request, for any number of listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from offbook.base.types import TrainResult
from offbook.base.wire import TrainEvent, TrainRequest


@dataclass
class TrainFeed:
    """An accepted train request and its events so far.

    Every listener gets all of them; the last is a result or an error.
    """

    request: TrainRequest
    events: list[TrainEvent] = field(default_factory=list[TrainEvent])
    _new_event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether the last event, a result or an error, was published."""
        return bool(self.events) and self.events[-1].kind in ("result", "error")

    def publish(self, event: TrainEvent) -> None:
        """Append an event and wake the listeners."""
        self.events.append(event)
        self._new_event.set()
        self._new_event = asyncio.Event()

    def end(self, result: TrainResult) -> None:
        """Publish the result as the last event."""
        self.publish(TrainEvent(kind="result", result=result))

    def fail(self, message: str, code: str) -> None:
        """Publish an error as the last event."""
        error = {"message": message, "code": code, "param": None}
        self.publish(TrainEvent(kind="error", message=message, error=error))

    async def listen(self) -> AsyncIterator[TrainEvent]:
        """Yield all events from the first one on, and wait for new ones until the last."""
        count = 0
        while True:
            new_event = self._new_event
            while count < len(self.events):
                count += 1
                yield self.events[count - 1]
            if self.ended:
                return
            await new_event.wait()
