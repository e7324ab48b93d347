"""What is sampled: a prompt, the settings of its sampling, and what comes back of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from ....types import GREEDY_BELOW
from .adapters import Adapter
from .text import StopWatch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Settings:
    """How one completion is sampled; defaults are OpenAI's. `top_k` 0 is off; `seed` None draws a fresh one."""

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
        """The likeliest token is taken; top_p, top_k and min_p have no meaning then."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the distribution."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class DeadEnd(Exception):
    """A grammar allows no token more. `param`: the request's field that it was made from."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TokenMask(Protocol):
    """A grammar's state in one completion."""

    def apply(self, logits: Tensor) -> Tensor:
        """One row of logits [V] with -inf where the grammar allows no token. Raises DeadEnd where it allows none."""
        ...

    def accept(self, token: int) -> None:
        """Advance by the token that was sampled."""
        ...


@dataclass(frozen=True)
class Failure:
    """Why a completion ended without an answer. `code`: engine_error or out_of_memory; `status`, `param`: as over HTTP."""

    message: str
    code: str | None = "engine_error"
    status: int = 500
    param: str | None = None


@dataclass(frozen=True)
class Update:
    """Tokens sampled since the last update; the last update of a completion has `finish` or `failure`.

    top[i]: the likeliest tokens at position i as (token, logprob), best first; empty unless asked for.
    `stop_reason`: the stop string or stop token id that ended it; None for the model's own end and for length.
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

    `streamed`: an update per step instead of one at the end. `eos`: the model's own end tokens.
    """

    prompt_ids: tuple[int, ...]
    settings: Settings
    eos: frozenset[int]
    adapter: Adapter | None = None
    streamed: bool = False
    mask: TokenMask | None = None
    stop_watch: StopWatch | None = None
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    sent: int = 0

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end it once `min_tokens` are sampled."""
        own = frozenset[int]() if self.settings.ignore_eos else self.eos
        return own | frozenset(self.settings.stop_token_ids)

    @property
    def watched(self) -> bool:
        """Its tokens must be looked at one by one, not only at the end."""
        return bool(self.streamed or self.mask or self.stop_watch or self.settings.top_logprobs)


class Deliver(Protocol):
    """Takes updates from the scheduler's thread, in order; must not block."""

    def __call__(self, updates: Sequence[tuple[Generation, Update]]) -> None: ...
