"""How every HTTP listener of ours is served: uvicorn with bounded connections, and nothing of it read from headers."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any, Literal, cast

import uvicorn

if sys.platform != "win32":
    import resource

from .bounded_protocol import BoundedProtocol, ConnectionLimiter, ConnectionLimits

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
    """The limit of open files of this process."""
    if sys.platform == "win32":
        return OPEN_FILES  # sockets are no files there
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
