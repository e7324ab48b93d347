"""What another LLM answered, and what that took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from understudy.types import Json

Value = TypeVar("Value")


class Tokens(NamedTuple):
    """Tokens of an answer's requests."""

    prompt: int
    completion: int


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """`value` is validated; `text` is what the model wrote. `tokens` and `cost` (USD) are those of all requests that it took
    to get the answer; None: the provider did not tell, or the price is unknown. An answer from the cache costs 0 and
    has the tokens that it took then. `repairs` counts what was wrong with the JSON: text mended, and a question repeated."""

    value: Value
    text: str
    tokens: Tokens | None
    cost: float | None
    cached: bool = False
    repairs: int = 0
    served_model: str | None = None


@dataclass(frozen=True)
class ChatAnswer:
    """`choices` are as OpenAI's API has them. `tokens` and `cost` (USD) are None where the provider does not tell, or the
    price is unknown. `seconds` is the time of the request that was answered, without waiting and retries."""

    choices: tuple[Json, ...]
    tokens: Tokens | None
    cost: float | None
    seconds: float
    served_model: str | None = None
