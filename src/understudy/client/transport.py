"""HTTP transports that live as long as the event loop they are used in."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import httpx

POOLS = 8
"""Of connections, in turn: httpcore looks through all connections of a pool at every request, which took two fifths of the
time of 200 rollouts at once."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30)


@dataclass(frozen=True)
class _Living:
    turn: Iterator[httpx.AsyncHTTPTransport]
    ending: AsyncGenerator[None]


_lock = threading.Lock()
_living: dict[tuple[asyncio.AbstractEventLoop, bool], _Living] = {}
"""Of each event loop that has not ended, with TLS and without. Shared by all clients of a loop: connections that a
garbage-collected client leaves open could not be closed any more."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_living.clear)  # connections are the parent's: answers would be swapped


class LoopTransport(httpx.AsyncBaseTransport):
    """The connections of the event loop in which it is used, closed when that loop shuts down.

    A client built on it can be used from several loops, one after the other or at once (a notebook's loop and
    `asyncio.run` in a thread), where a plain one fails with "Event loop is closed". Closing it closes no connection:
    other clients of the loop use them.
    """

    def __init__(self, *, secure: bool) -> None:
        # Without TLS there is nothing to verify, and loading the certificates takes longer than the first request.
        self._secure = secure

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over this loop's connections."""
        living = _living.get((asyncio.get_running_loop(), self._secure)) or await _open(self._secure)
        return await next(living.turn).handle_async_request(request)


async def _open(secure: bool) -> _Living:
    loop = asyncio.get_running_loop()
    verify = httpx.create_ssl_context() if secure else False
    pools = tuple(httpx.AsyncHTTPTransport(verify=verify, limits=LIMITS) for _ in range(POOLS))
    living = _Living(itertools.cycle(pools), _closed_at_the_end(pools))
    with _lock:
        for ended in [key for key in _living if key[0].is_closed()]:
            del _living[ended]
        _living[loop, secure] = living
    # Once started, the loop knows the generator and closes it in `shutdown_asyncgens`, which `asyncio.run` calls.
    await anext(living.ending)
    return living


async def _closed_at_the_end(pools: Sequence[httpx.AsyncHTTPTransport]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        for pool in pools:
            await pool.aclose()
