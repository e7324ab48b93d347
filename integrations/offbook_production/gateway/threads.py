"""Which thread of an app a call belongs to, and what is decided by its name: the id of its trajectory, and its share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast

import orjson

from offbook.base.types import Json
from offbook.base.wire import THREAD_HEADER

FIELD = "thread_id"


def thread_of(headers: Mapping[str, str], body: bytes) -> str | None:
    """The app's own name of a thread: the header `x-offbook-thread`, else `metadata.thread_id` of the body; None without."""
    if named := headers.get(THREAD_HEADER):
        return named
    if b'"thread_id"' not in body:  # most requests have none, and need not be parsed
        return None
    try:
        asked: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    metadata = _field(asked, "metadata")
    value = _field(metadata, FIELD)
    return str(value) if isinstance(value, str | int) and str(value) else None


def _field(value: Json, name: str) -> Json:
    return cast(dict[str, Json], value).get(name) if isinstance(value, dict) else None


def trajectory_id(route: str, thread: str) -> str:
    """The id of the trajectory that has a thread's calls. It does not reveal the thread's name."""
    return f"thread-{_digest('trajectory', route, thread).hex()[:32]}"


def position(salt: str, route: str, thread: str) -> float:
    """A number in [0, 1), uniform over threads and always the same for one: a thread stays on its side of any share."""
    return int.from_bytes(_digest(salt, route, thread)[:8]) / 2**64


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).digest()
