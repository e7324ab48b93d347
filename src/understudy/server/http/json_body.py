"""JSON bodies of the API's routes: what JSON allows and text does not is refused before anything is made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ...types import Json
from ..errors import ApiError

MAX_BYTES = {"/api/train": 8 * 2**20, "/api/trajectories": 16 * 2**20}
"""Of bodies that name many things: they are read on the event loop, where all others wait."""
MAX_OTHER_BYTES = 2 * 2**20
"""Of all other bodies, such as a user's state."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check_size(path: str, body: bytes) -> None:
    """Raises ApiError 413 for a body that would keep all others waiting."""
    limit = MAX_BYTES.get(path, MAX_OTHER_BYTES)
    if len(body) > limit:
        raise ApiError(413, f"the body has {len(body)} bytes; {path} takes at most {limit}", None, "body_too_large")


class JsonRequest(Request):
    """A request whose strings can be written to files and databases."""

    async def json(self) -> Json:
        """The body. Raises json.JSONDecodeError, also for half a surrogate pair: it has no place in UTF-8."""
        value: Json = await super().json()
        raw = await self.body()
        if _SURROGATE.search(raw):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise json.JSONDecodeError(
                    "a lone surrogate (\\ud800 to \\udfff without its other half)", "", 0
                ) from error
        return value


class JsonRoute(APIRoute):
    """A route whose body is read by JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            read = JsonRequest(request.scope, request.receive)
            check_size(request.scope["path"], await read.body())
            return await handle(read)

        return handled
