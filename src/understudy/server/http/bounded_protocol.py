"""uvicorn's HTTP protocol with bounds: what a stranger may send before the application has said who it is.

uvicorn reads headers of any size and number for any time, and keeps slow bodies open for ever. Here a head and a body
have a size and a time, and connections that no request has admitted yet are counted by peer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..errors import ApiError

log = logging.getLogger(__name__)

ADMIT = "understudy.admit"
"""Key of the ASGI scope: a function to call once a request may pass."""
_IDLE, _HEAD, _BODY = range(3)
_CHUNK_OVERHEAD = 8
"""Bytes of framing that a chunked body may take for each of its own."""


@dataclass(frozen=True)
class DoorLimits:
    """Sizes in bytes, times in seconds. `strangers`: connections of one peer that no request has admitted."""

    head_bytes: int = 64 * 1024
    headers: int = 200
    head_seconds: float = 20.0
    body_seconds: float = 30.0
    body_rate: int = 16 * 1024
    discarded: int = 2**20
    linger_seconds: float = 2.0
    connections: int = 16_384
    strangers: int = 1024


class Door:
    """The connections of one server."""

    def __init__(self, limits: DoorLimits) -> None:
        self.limits = limits
        self.open = 0
        self._strangers: Counter[str] = Counter()

    def enter(self, peer: str) -> str | None:
        """Count a connection; why it may not stay, or None."""
        self.open += 1
        self._strangers[peer] += 1
        if self.open > self.limits.connections:
            return f"the server has {self.limits.connections} connections open, which is its limit"
        if self._strangers[peer] > self.limits.strangers:
            return f"{self.limits.strangers} connections of {peer} have not asked for anything that they may have"
        return None

    def admit(self, peer: str) -> None:
        """A connection is no stranger any more."""
        self._strangers[peer] -= 1
        if not self._strangers[peer]:
            del self._strangers[peer]

    def leave(self, peer: str, *, admitted: bool) -> None:
        """A connection has ended."""
        self.open -= 1
        if not admitted:
            self.admit(peer)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Bounds are checked after each piece that arrives, so that they hold within one read of the socket.

    A whole request that arrives in one piece costs a few comparisons; timers are set only for one that does not.
    """

    def __init__(self, *args: Any, door: Door, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._door = door
        self._limits = door.limits
        self._peer = ""
        self._admitted = False
        self._phase = _IDLE
        self._fed = 0  # bytes of this head or body that came in pieces of their own
        self._delivered = 0  # bytes of this body, without its framing
        self._delivered_before = 0  # at the last check of its rate
        self._discarded = 0
        self._timer: asyncio.TimerHandle | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        if (why := self._door.enter(self._peer)) is not None:
            self._refuse(503, "too_many_connections", why)
        else:
            self._watch(self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._door.leave(self._peer, admitted=self._admitted)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._phase:
            self._fed += len(data)
        super().data_received(data)
        if not self._phase:
            if self._timer is not None:
                self._unwatch()
                if self.cycle.response_complete:  # it was answered before its body had ended
                    self._watch(self.timeout_keep_alive)
        elif not self.transport.is_closing():
            self._check_size()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", msg)

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        self._phase, self._fed = _HEAD, 0
        super().on_message_begin()
        if not self._admitted:
            self.scope[ADMIT] = self._admit  # type: ignore[typeddict-unknown-key]  # a key of ours

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == _HEAD:  # trailers are read by nobody
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase, self._fed, self._delivered, self._delivered_before = _BODY, 0, 0, 0
        self._discarded = 0
        limits = self._limits
        if len(self.headers) > limits.headers:
            self._refuse(431, "too_many_headers", f"more than {limits.headers} headers")
        elif sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > limits.head_bytes:
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self._delivered += len(body)
        if self.cycle.response_complete:  # answered without being read: the rest is of no use
            self._discarded += len(body)
            if self._discarded > self._limits.discarded:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = _IDLE
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase == _BODY and self.cycle.response_complete and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._watch(self._limits.linger_seconds)

    # ---- inside

    def _admit(self) -> None:
        if not self._admitted:
            self._admitted = True
            self._door.admit(self._peer)

    def _check_size(self) -> None:
        """Of a head or body that is not whole yet."""
        if self._phase == _HEAD and self._fed > self._limits.head_bytes:
            self._refuse_head()
        elif self._fed - self._delivered > self._limits.head_bytes + _CHUNK_OVERHEAD * self._delivered:
            self._refuse(400, "invalid_http", "the framing of the body is larger than the body")
        elif self._timer is None:
            self._watch(self._limits.head_seconds if self._phase == _HEAD else self._limits.body_seconds)

    def _watch(self, seconds: float) -> None:
        self._unwatch()
        self._timer = self.loop.call_later(seconds, self._late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """The time of a head, of a stretch of a body, or of the rest of a refused one is over."""
        self._timer = None
        limits = self._limits
        if self.transport.is_closing():
            return
        if self._phase != _BODY:
            if self._phase == _HEAD or self.cycle is None:  # pyright: ignore[reportUnnecessaryComparison]  # None at first
                self._refuse(408, "request_timeout", f"no whole header within {limits.head_seconds:g} s")
            elif self.cycle.response_complete:  # idle for as long as uvicorn's own timer allows
                self.transport.close()
        elif self.cycle.response_complete:
            self.transport.close()
        elif (
            self.flow.read_paused or self._delivered - self._delivered_before >= limits.body_rate * limits.body_seconds
        ):
            self._delivered_before = self._delivered
            self._watch(limits.body_seconds)
        else:
            slow = f"the body came with less than {limits.body_rate} bytes a second for {limits.body_seconds:g} s"
            self._refuse(408, "request_timeout", slow)

    def _refuse_head(self) -> None:
        self._refuse(431, "header_too_large", f"the request's header is larger than {self._limits.head_bytes} bytes")

    def _refuse(self, status: int, code: str, why: str) -> None:
        """Answer, unless an answer has begun, and close. The application sees a client that went away."""
        if self.transport.is_closing():
            return
        log.debug("%s refused: %s", self._peer, why)
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]  # None at first
        if not begun:
            body = json.dumps(ApiError(status, why, code=code).body()).encode()
            fields = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + fields + body)
        self.transport.close()
