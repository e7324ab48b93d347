"""Answers of other LLMs, with their tokens and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from offbook.base.types import Json

Value = TypeVar("Value")


class Tokens(NamedTuple):
    """Prompt and completion tokens, summed over an answer's requests."""

    prompt: int
    completion: int


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """A validated answer; `text` is what the model wrote.

    `tokens` and `cost` (USD) are sums over all requests of the question; None if the provider did not report them, or the
    price is unknown. A cached answer costs 0 and has its original tokens. `repairs` counts repaired JSON and repeated
    questions.
    """

    value: Value
    text: str
    tokens: Tokens | None
    cost: float | None
    cached: bool = False
    repairs: int = 0
    served_model: str | None = None


@dataclass(frozen=True)
class ChatAnswer:
    """A chat completion. `choices` are in OpenAI's format.

    `tokens` and `cost` (USD) are None if the provider did not report them, or the price is unknown. `seconds` is the time of
    the successful request, without waiting and retries.
    """

    choices: tuple[Json, ...]
    tokens: Tokens | None
    cost: float | None
    seconds: float
    served_model: str | None = None
