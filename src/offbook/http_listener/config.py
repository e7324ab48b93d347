"""How every HTTP listener of ours is served: uvicorn with limits on clients that have not been authenticated yet, and nothing of it
read from headers.

uvicorn itself reads headers of any size and number for any time, and keeps slow bodies open forever. Its protocol here limits
the size and time of headers and bodies, and the number of unadmitted connections per peer. A connection is admitted when
the application accepts its first request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from offbook.openai_dialect.chat_answer import error_body, kind_of

from .access_checks import ADMIT, CLOSE

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

_IDLE, _HEAD, _BODY = range(3)
_CHUNK_OVERHEAD = 8
"""The most bytes of framing per byte of a chunked body."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections: sizes in bytes, times in seconds, `body_rate` in bytes per second.

    `connections` is for the whole server. `unadmitted` is the number of unadmitted connections per peer. `discarded` is how
    much of a body is read after its response. `linger_seconds` is how long that may take.
    """

    head_bytes: int = 64 * 1024
    headers: int = 200
    head_seconds: float = 20.0
    body_seconds: float = 30.0
    body_rate: int = 16 * 1024
    discarded: int = 2**20
    linger_seconds: float = 2.0
    connections: int = 16_384
    unadmitted: int = 1024


class ConnectionLimiter:
    """Counts the open connections of one server, and the unadmitted ones by peer."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.open = 0
        self._unadmitted: Counter[str] = Counter()

    def enter(self, peer: str) -> str | None:
        """Count a new connection. Returns why it must be closed; None if it may stay."""
        self.open += 1
        self._unadmitted[peer] += 1
        if self.open > self.limits.connections:
            return f"the server has {self.limits.connections} connections open, which is its limit"
        if self._unadmitted[peer] > self.limits.unadmitted:
            return f"{self.limits.unadmitted} connections of {peer} have not asked for anything that they may have"
        return None

    def admit(self, peer: str) -> None:
        """Count a connection of this peer as admitted."""
        self._unadmitted[peer] -= 1
        if not self._unadmitted[peer]:
            del self._unadmitted[peer]

    def leave(self, peer: str, *, admitted: bool) -> None:
        """Count a connection as closed."""
        self.open -= 1
        if not admitted:
            self.admit(peer)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. The limits are checked after every read of the socket.

    A request that arrives in one piece costs a few comparisons. Timers are set only for a request in several pieces.
    """

    def __init__(self, *args: Any, limiter: ConnectionLimiter, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._limiter = limiter
        self._limits = limiter.limits
        self._peer = ""
        self._admitted = False
        self._phase = _IDLE
        self._fed = 0  # raw bytes of this head or body, from reads after its beginning
        self._delivered = 0  # bytes of this body without framing
        self._delivered_before = 0  # the value at the last rate check
        self._discarded = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        if (why := self._limiter.enter(self._peer)) is not None:
            self._refuse(503, "too_many_connections", why)
        else:
            self._watch(self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._limiter.leave(self._peer, admitted=self._admitted)
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
                if self.cycle.response_complete:  # the response was complete before the body had ended
                    self._watch(self.timeout_keep_alive)
        elif not self.transport.is_closing():
            self._check_size()

    def send_400_response(self, msg: str) -> None:
        """Answer 400 in the API's error format."""
        self._refuse(400, "invalid_http", msg)

    def on_message_begin(self) -> None:
        self._phase, self._fed = _HEAD, 0
        super().on_message_begin()
        if not self._admitted:
            self.scope[ADMIT] = self._admit  # type: ignore[typeddict-unknown-key]  # our own key
        self.scope[CLOSE] = self.transport.close  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == _HEAD:  # trailers are ignored
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
        if self.cycle.response_complete:  # answered without reading the body: discard the rest
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

    def _admit(self) -> None:
        if not self._admitted:
            self._admitted = True
            self._limiter.admit(self._peer)

    def _check_size(self) -> None:
        """Check a head or body that is not complete yet, and start its timer."""
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
        """The timer of a head, of a part of a body, or of the rest of a rejected body has expired."""
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
        """Send an error response, unless a response has begun, and close. The application sees a disconnected client."""
        if self.transport.is_closing():
            return
        logger.debug("%s refused: %s", self._peer, why)
        started = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]  # None at first
        if not started:
            body = json.dumps(error_body(why, kind_of(status), code=code)).encode()
            fields = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + fields + body)
        self.transport.close()


OPEN_FILES = 65_536
"""Wanted limit of open files. A call in flight holds two sockets, and many systems allow 256 or 1,024 by default."""
KEPT_FILES = 64
"""Open files other than connections: records, logs, checkpoints, the children's pipes."""


def listener_config(application: Any, *, lifespan: Literal["on", "off"] = "off") -> uvicorn.Config:
    """The configuration of a listener. `application` is ASGI, behind `AccessChecks`."""
    return uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan=lifespan,
        proxy_headers=False,  # nothing here reads the client's address from headers
        server_header=False,
        timeout_keep_alive=75,
        ws="none",
        http=cast(type[asyncio.Protocol], partial(BoundedProtocol, limiter=ConnectionLimiter(connection_limits()))),
    )


def connection_limits() -> ConnectionLimits:
    """Limits of connections that fit the limit of open files. A call in flight holds two."""
    files = _open_files()
    connections = max(64, min(files // 2 - KEPT_FILES, ConnectionLimits.connections))
    return ConnectionLimits(connections=connections, unadmitted=min(ConnectionLimits.unadmitted, connections // 2))


def _open_files() -> int:
    if sys.platform == "win32":
        return OPEN_FILES  # sockets are no files there
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
