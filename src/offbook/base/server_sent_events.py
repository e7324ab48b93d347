"""Server-sent events, as bytes: framing and reading. What an event says is the matter of a dialect.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

EVENT_STREAM = "text/event-stream"
"""Content type of a stream."""


def event(data: bytes, name: str | None = None) -> bytes:
    r"""One event. `data` has no line break; `name` is the event's type, which OpenAI's chat completions leave out.

    >>> event(b"{}"), event(b"{}", "message_stop")
    (b'data: {}\n\n', b'event: message_stop\ndata: {}\n\n')
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class EventReader:
    r"""The data of events, from pieces of a stream that begin and end anywhere.

    >>> reader = EventReader()
    >>> reader.push(b": a comment\n\ndata: 1\n\nda"), reader.push(b"ta: 2\n\n")
    ([b'1'], [b'2'])
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of an incomplete line

    def push(self, piece: bytes) -> list[bytes]:
        """Add a piece; the data lines that it completes, without those that are empty."""
        self._rest.append(piece)
        if b"\n" not in piece:
            return []
        *lines, last = b"".join(self._rest).split(b"\n")
        self._rest = [last]
        return [data for line in lines if line.startswith(b"data:") and (data := line[5:].strip())]
