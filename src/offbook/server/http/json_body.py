"""JSON bodies of the API's routes: size limits, and rejection of strings that are not valid UTF-8."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine

from fastapi import Request, Response
from fastapi.routing import APIRoute

from offbook.base.types import Json

from ..errors import ApiError

MAX_BYTES = {"/api/train": 8 * 2**20, "/api/trajectories": 16 * 2**20}
"""Limits for routes with large bodies. Bodies are parsed on the event loop, which blocks all other requests."""
MAX_OTHER_BYTES = 2 * 2**20
"""Limit for all other routes, such as a user's state."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check_size(path: str, body: bytes) -> None:
    """Raise ApiError 413 for a body above the route's limit: parsing it would block all other requests."""
    limit = MAX_BYTES.get(path, MAX_OTHER_BYTES)
    if len(body) > limit:
        raise ApiError(413, f"the body has {len(body)} bytes; {path} takes at most {limit}", None, "body_too_large")


class JsonRequest(Request):
    """A request whose JSON strings can be encoded as UTF-8, so that files and databases accept them."""

    async def json(self) -> Json:
        """The parsed body. Raises json.JSONDecodeError, also for a lone surrogate, which UTF-8 cannot encode."""
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
        """Wrap FastAPI's handler: check the body's size and read it as a JsonRequest."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            read = JsonRequest(request.scope, request.receive)
            check_size(request.scope["path"], await read.body())
            return await handle(read)

        return handled
