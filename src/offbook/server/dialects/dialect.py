"""What every API but chat completions implements: how its request becomes a chat, and how the answer becomes its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

from ..calls.chat_request import ChatRequest
from ..calls.rendering import Rendering
from ..calls.sampled_calls import SampledCalls, TrajectoryCalls
from ..errors import ApiError


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
