"""What every API but chat completions implements: how its request becomes a chat, and how the answer becomes its own; and the
checks of JSON values that a dialect reads one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

from ..calls.chat_answer import Rendering
from ..calls.chat_request import ChatRequest
from ..calls.sampled_calls import SampledCalls, TrajectoryCalls
from ..errors import ApiError, shortened


@dataclass(frozen=True)
class DialectRequest:
    """A request before its translation. `path`: the named groups of the route's pattern, None for one that is not in it.

    `said`: what was sampled for the request's trajectory. `recorded`: finds a call by its id.
    """

    body: dict[str, Json]
    path: Mapping[str, str | None]
    query: Mapping[str, str]
    said: TrajectoryCalls
    recorded: SampledCalls


@dataclass(frozen=True)
class Translation:
    """A request's body as that of a chat completion, and how the answer is written. `recorded`: not so for a count of tokens.

    `request`: what parses the body.
    """

    body: dict[str, Json]
    rendering: Rendering
    recorded: bool = True
    request: type[ChatRequest] = ChatRequest


class Dialect(Protocol):
    """An API whose requests are recorded calls."""

    async def translate(self, request: DialectRequest) -> Translation:
        """The chat completion of a request. Raises ApiError, naming the request's field."""
        ...

    def refusal(self, error: ApiError) -> Answer:
        """The body of a response that is an error."""
        ...


def unsupported(message: str, field: str | None = None, status: int = 400, code: str = "unsupported_field") -> ApiError:
    """The refusal of what cannot be served. `field`: what is at fault."""
    return ApiError(status, message, field, code)


def an_object(value: Json, where: str) -> Answer:
    """The value, if it is a JSON object. Raises ApiError, naming `where`."""
    if not isinstance(value, dict):
        raise _wrong("an object", value, where)
    return cast(Answer, value)


def a_list(value: Json, where: str) -> list[Json]:
    """The value, if it is a list. Raises ApiError, naming `where`."""
    if not isinstance(value, list):
        raise _wrong("a list", value, where)
    return cast(list[Json], value)


def a_text(value: Json, where: str) -> str:
    """The value, if it is a string. Raises ApiError, naming `where`."""
    if not isinstance(value, str):
        raise _wrong("a string", value, where)
    return value


def _wrong(wanted: str, value: Json, where: str) -> ApiError:
    return ApiError(400, f"{where} must be {wanted}, got {shortened(value)}", where, "invalid_value")
