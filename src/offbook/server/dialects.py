"""The door of APIs beside chat completions: how a request becomes a chat, and how the answer becomes the API's own.

A package names a subclass of `Dialect` as an entry point of the group `offbook.dialects`. The call is sampled and recorded as a
chat completion is. The record keeps the sampled text, which restores what clients send back in another form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from offbook import plugins
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

from .calls.chat_answer import Rendering
from .calls.chat_request import ChatRequest
from .calls.sampled_calls import SampledCalls, TrajectoryCalls
from .errors import ApiError


@dataclass(frozen=True)
class DialectRequest:
    """A request before its translation. `path`: the named groups of the route's pattern, None for one that is not in it.

    `sampled`: the tool calls that were sampled for the request's trajectory. `recorded`: finds a call by its id.
    """

    body: dict[str, Json]
    path: Mapping[str, str | None]
    query: Mapping[str, str]
    sampled: TrajectoryCalls
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


class Dialect:
    """An API whose requests are recorded calls."""

    paths: ClassVar[tuple[str, ...]]
    """Patterns of its paths, below those of a model, a trajectory and a temperature. A group `count` means that the path is no
    call, but counts the tokens of its prompt."""
    error_paths: ClassVar[tuple[str, ...]] = ()
    """Patterns of other paths where errors have its form."""

    async def translate(self, request: DialectRequest) -> Translation:
        """The chat completion of a request. Raises ApiError, naming the request's field."""
        raise NotImplementedError

    def refusal(self, error: ApiError) -> Answer:
        """The body of a response that is an error: by default OpenAI's."""
        return error.body()

    def joined(self, events: Sequence[Answer]) -> Answer:
        """The events of a stream, at least one, as the answer that is not streamed. Raises LookupError, TypeError, ValueError
        for other shapes."""
        raise NotImplementedError

    def next_turn(self, body: Answer, answer: Answer) -> Answer:
        """The field of a request that has its conversation, with an answer as its last turn. Raises ApiError if a request has no
        conversation."""
        raise NotImplementedError


@cache
def installed_dialects() -> tuple[Dialect, ...]:
    """The dialects of all installed packages. Raises ConfigError."""
    names = plugins.names("offbook.dialects")
    return tuple(plugins.load_class("offbook.dialects", name, Dialect)() for name in names)
