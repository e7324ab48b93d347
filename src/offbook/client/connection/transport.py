"""HTTP connection pools that live as long as the event loop that uses them."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import httpx

POOLS = 8
"""Connection pools per event loop, used in turn. httpcore scans all connections of a pool at every request; with one pool,
that took two fifths of the time of 200 concurrent rollouts."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30)


@dataclass(frozen=True)
class _LoopPools:
    """The pools of one event loop in rotation, and the generator that closes them when the loop shuts down."""

    rotation: Iterator[httpx.AsyncHTTPTransport]
    closer: AsyncGenerator[None]


_lock = threading.Lock()
_pools: dict[tuple[asyncio.AbstractEventLoop, bool], _LoopPools] = {}
"""Pools by running event loop and TLS. All clients of a loop share them: the connections of a garbage-collected client
could not be closed any more."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a child on its parent's connections would mix up responses


class LoopTransport(httpx.AsyncBaseTransport):
    """A transport over the connection pools of the running event loop, which are closed when that loop shuts down.

    A client built on it works in several loops, one after the other or at once (a notebook's loop and `asyncio.run` in a
    thread), where a plain one fails with "Event loop is closed". Closing it closes no connection, since other clients of
    the loop share them.
    """

    def __init__(self, *, secure: bool) -> None:
        # `secure=False` skips loading the certificates, which takes longer than the first request.
        self._secure = secure

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over the connections of the running event loop."""
        loop_pools = _pools.get((asyncio.get_running_loop(), self._secure)) or await _open(self._secure)
        return await next(loop_pools.rotation).handle_async_request(request)


async def _open(secure: bool) -> _LoopPools:
    loop = asyncio.get_running_loop()
    verify = httpx.create_ssl_context() if secure else False
    pools = tuple(httpx.AsyncHTTPTransport(verify=verify, limits=LIMITS) for _ in range(POOLS))
    loop_pools = _LoopPools(itertools.cycle(pools), _close_with_loop(pools))
    with _lock:
        for closed in [key for key in _pools if key[0].is_closed()]:
            del _pools[closed]
        _pools[loop, secure] = loop_pools
    # The first `anext` registers the generator with the loop, which closes it in `shutdown_asyncgens` (`asyncio.run` does).
    await anext(loop_pools.closer)
    return loop_pools


async def _close_with_loop(pools: Sequence[httpx.AsyncHTTPTransport]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        for pool in pools:
            await pool.aclose()
