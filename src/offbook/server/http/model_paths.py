"""The paths of model calls in every API, and the form that errors have there."""

from __future__ import annotations

import re
from functools import cache

from offbook.base.types import Json

from ..dialects import Dialect, installed_dialects
from ..errors import ApiError

_MODEL = r"(?:/m/(?P<model>[^/]+(?:/(?!v1(?:alpha|beta)?/|t/)[^/]+)?))"
_WHERE = _MODEL + r"?(?:/t/(?P<trajectory>[^/]+)(?:/at/(?P<temperature>[^/]+))?)?(?:/v1(?=/v1))?"
"""Before a path: the model that answers, whatever the client asks for, the trajectory that the calls belong to, and the
temperature at which they are sampled, whatever the client asks for. A second version is that of a base URL to which the client
adds another."""
_PLACE = re.compile(_MODEL + "?(?:/t/(?P<trajectory>[^/]+)(?P<at>/at/[^/]+)?)?(?=/)")
_ROUTE = re.compile("/r/[^/]+(?=/)")
CHATS = re.compile(_WHERE + "/v1/chat/completions/?")


@cache
def dialect_paths() -> tuple[tuple[re.Pattern[str], Dialect], ...]:
    """The paths of calls of the other APIs. The groups of a pattern besides those of `_WHERE` are the dialect's own."""
    return tuple((re.compile(_WHERE + path), dialect) for dialect in installed_dialects() for path in dialect.paths)


@cache
def _error_paths() -> tuple[tuple[re.Pattern[str], Dialect], ...]:
    return tuple((re.compile(_WHERE + path), it) for it in installed_dialects() for path in it.error_paths)


def found_path(path: str) -> tuple[re.Match[str], Dialect | None] | None:
    """How a path of a model call matches, and its API: None for chat completions; None for every other path."""
    if (match := CHATS.fullmatch(path)) is not None:
        return match, None
    for pattern, dialect in dialect_paths():
        if (match := pattern.fullmatch(path)) is not None:
            return match, dialect
    return None


def counts_tokens(match: re.Match[str]) -> bool:
    """Whether a path of `found_path` is no call of a model, but counts the tokens that one would have."""
    return bool(match.groupdict().get("count"))


def trajectory_of(path: str) -> str | None:
    """The trajectory below which a path is; None for every other path."""
    match = _PLACE.match(path)
    return None if match is None else match["trajectory"]


def model_of(path: str) -> str | None:
    """The model below which a path is, which answers whatever name the client has; None for every other path."""
    match = _PLACE.match(path)
    return None if match is None else match["model"]


def without_temperature(path: str) -> str:
    """A path without the temperature, which has no effect on what samples nothing."""
    match = _PLACE.match(path)
    return path if match is None or match["at"] is None else path[: match.start("at")] + path[match.end("at") :]


def refusal_body(path: str, error: ApiError) -> dict[str, Json]:
    """The body of an error, in the form of the API at the path."""
    path = _ROUTE.sub("", path)
    found = found_path(path)
    dialect = (
        next((it for pattern, it in _error_paths() if pattern.fullmatch(path)), None) if found is None else found[1]
    )
    return error.body() if dialect is None else dialect.refusal(error)
