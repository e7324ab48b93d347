"""Types of sampling: a generation with its settings, and the updates and failures that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from offbook.base.types import GREEDY_BELOW

from .adapters import Adapter
from .text import StopDetector

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Settings:
    """The sampling settings of a generation, with OpenAI's defaults. `top_k` 0 is off; `seed` None is random."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: tuple[int, ...] | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen. Then top_p, top_k and min_p have no effect."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether any penalty for repeated tokens is set."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class NoAllowedToken(Exception):
    """A grammar allows no next token. `param` is the request's field that contains the grammar."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TokenMask(Protocol):
    """The state of a grammar in one generation."""

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf for tokens that the grammar forbids. Raises NoAllowedToken if it forbids all."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        ...


@dataclass(frozen=True)
class Failure:
    """Why a generation ended without an answer.

    `code` is engine_error or out_of_memory. `status` and `param` are those of the HTTP response.
    """

    message: str
    code: str | None = "engine_error"
    status: int = 500
    param: str | None = None


@dataclass(frozen=True)
class Update:
    """The tokens sampled since the last update. The last update of a generation has `finish` or `failure`.

    top[i]: the most likely tokens at position i as (token, logprob), best first; empty unless requested.
    `stop_reason`: the stop string or stop token id that ended it; None for the model's end token and a length limit.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: Failure | None = None


@dataclass(eq=False)
class Generation:
    """One completion to sample. The scheduler's thread owns it from `submit` to its last update.

    `streamed`: send an update per step instead of one at the end. `eos` are the model's end tokens. `top` and `sent` are
    the top logprobs so far, and the number of tokens in earlier updates.
    """

    prompt_ids: tuple[int, ...]
    settings: Settings
    eos: frozenset[int]
    adapter: Adapter | None = None
    streamed: bool = False
    mask: TokenMask | None = None
    stop_detector: StopDetector | None = None
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    sent: int = 0

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end it after `min_tokens` tokens."""
        own = frozenset[int]() if self.settings.ignore_eos else self.eos
        return own | frozenset(self.settings.stop_token_ids)

    @property
    def watched(self) -> bool:
        """Whether each of its tokens must be processed when it is sampled, not only at the end."""
        return bool(self.streamed or self.mask or self.stop_detector or self.settings.top_logprobs)


class Deliver(Protocol):
    """Receives updates in the scheduler's thread, in order. Must not block."""

    def __call__(self, updates: Sequence[tuple[Generation, Update]]) -> None: ...
