"""Types of sampling: a generation with its settings, the updates and failures that it returns, and its tokens as text: decoded at
once or one by one, with stop strings detected and cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offbook.base.types import GREEDY_BELOW, Sampling

from .adapters import Adapter

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Settings:
    """The sampling settings of a generation, with OpenAI's defaults. `seed` None is random."""

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
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
        return self.sampling.temperature < GREEDY_BELOW

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


_LAG = 16
"""Most tokens that wait for the rest of a character; then their bytes are decoded as they are."""


class Decoder:
    """Decodes tokens without special ones, except `kept`, such as the markup of tool calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        keep = {vocabulary[text] for text in kept if text in vocabulary}
        self._skipped = frozenset(tokenizer.all_special_ids) - keep
        self._tokens: dict[int, tuple[str, list[int]]] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of these tokens."""
        shown = [token for token in token_ids if token not in self._skipped] if skip_special else list(token_ids)
        text = self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # pyright: ignore[reportUnknownMemberType]  # transformers' tokenizers are only partly typed
        assert isinstance(text, str)
        return text

    def skips(self, token: int) -> bool:
        """Whether a token is left out of the text."""
        return token in self._skipped

    def token(self, token: int) -> tuple[str, list[int]]:
        """The text of a single token and the bytes of that text, for logprobs."""
        text_and_bytes = self._tokens.get(token)
        if text_and_bytes is None:
            text = self.decode([token], skip_special=False)
            text_and_bytes = self._tokens[token] = (text, list(text.encode("utf-8", errors="replace")))
        return text_and_bytes


class TextStream:
    """Decodes tokens one by one. A character that is split over tokens waits for its last byte."""

    def __init__(self, decoder: Decoder, *, skip_special: bool = True) -> None:
        self._decoder = decoder
        self._skip = skip_special
        self._ids: list[int] = []
        self._shown = 0  # number of tokens in _ids whose text has been returned

    def push(self, token: int) -> str:
        """Add a token, and return the text that is complete with it; may be empty."""
        if self._skip and self._decoder.skips(token):
            return ""
        self._ids.append(token)
        text = self._pending()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < _LAG:
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        """The text of tokens that still wait for the rest of a character."""
        text = self._pending()
        self._advance()
        return text

    def _pending(self) -> str:
        before = self._decoder.decode(self._ids[: self._shown], skip_special=False)
        return self._decoder.decode(self._ids, skip_special=False)[len(before) :]

    def _advance(self) -> None:
        # Keep the last tokens as context, because some decoders drop the space before a first token.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)


class StopDetector:
    """Detects stop strings while tokens are sampled."""

    def __init__(self, decoder: Decoder, stop: Sequence[str], *, skip_special: bool = True) -> None:
        self._stream = TextStream(decoder, skip_special=skip_special)
        self._stop = tuple(stop)
        self._reach = max(map(len, self._stop)) - 1
        self._tail = ""

    def push(self, token: int, *, armed: bool = True) -> str | None:
        """The stop string that this token completes, if any. Not `armed` (before min_tokens), it is ignored."""
        fresh = self._stream.push(token)
        window = self._tail + fresh
        self._tail = window[-self._reach :] if self._reach else ""
        if not armed:
            return None
        matches = [(window.find(stop), stop) for stop in self._stop if stop in window]
        return min(matches)[1] if matches else None


class StopCutter:
    """Cuts off a stop string from the text of an answer. Holds back text that could become one.

    >>> cutter = StopCutter(["STOP"])
    >>> cutter.push("Hello ST")
    'Hello'
    >>> cutter.finish("OP", "STOP")
    ' '
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._reach = max(map(len, stop), default=1) - 1
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """Add text, and return the part that cannot belong to a stop string."""
        self._held += text
        safe = len(self._held) - self._reach
        if safe <= 0:
            return ""
        out, self._held = self._held[:safe], self._held[safe:]
        return out

    def finish(self, text: str, stopped_by: str | None) -> str:
        """End the text, and return what is left. `text` is that of the last token, which completed `stopped_by`, if any."""
        start = max(0, len(self._held) - self._reach)
        whole, self._held = self._held + text, ""
        position = whole.find(stopped_by, start) if stopped_by else -1
        if stopped_by is None or position < 0:
            return whole
        return whole[: position + (len(stopped_by) if self._include else 0)]
