"""How large an answer may be, by what its request asked for, and the error of one that does not fit its request."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import EngineError

MAX_ANSWER = 256 * 2**20
"""Bytes of any answer, whatever was asked for."""
MAX_TOOL_CALLS = 1024
"""In one choice."""
MAX_FINISH_REASON = 64
"""Characters: the column of the records."""
LOGPROB_ABOVE = 1e-3
"""Rounding may lift a logprob of 0 by as much."""
_MAX_TOKENS = 2**17
"""Of a choice whose request names no length, to estimate its bytes."""
_HEAD_BYTES = 4 * 2**20
_TOKEN_BYTES = 1024
"""A streamed token comes in an event of its own, of some 300 bytes."""
_PROMPT_BYTES = 16
"""The sampler repeats the prompt as token ids: up to one for each byte, 8 bytes each."""


class WrongAnswer(EngineError):
    """The sampler's answer does not fit its request; the message names the field."""


@dataclass(frozen=True)
class AnswerLimits:
    """What a request allows: choices, tokens of each (None: up to the context), bytes of the whole answer."""

    choices: int = 1
    tokens: int | None = None
    bytes: int = MAX_ANSWER
    recorded: bool = True

    @classmethod
    def of(
        cls, *, choices: int, tokens: int | None, top_logprobs: int, request_bytes: int, recorded: bool
    ) -> AnswerLimits:
        """The limits of a request. `top_logprobs` are sent for each token beside its own logprob."""
        each = min(tokens or _MAX_TOKENS, MAX_ANSWER) * _TOKEN_BYTES * (1 + top_logprobs)
        size = _HEAD_BYTES + request_bytes * _PROMPT_BYTES + choices * each
        return cls(choices, tokens, min(size, MAX_ANSWER), recorded)

    def check_index(self, index: object) -> int:
        """The index of a choice. Raises WrongAnswer."""
        if type(index) is not int or not 0 <= index < self.choices:
            raise WrongAnswer(
                f"the sampler gave a choice the index {str(index)[:40]} where {self.choices} were asked for"
            )
        return index

    def check_length(self, index: int, count: int) -> None:
        """The tokens of a choice so far. Raises WrongAnswer."""
        if self.tokens is not None and count > self.tokens:
            raise WrongAnswer(f"the sampler gave choice {index} {count} tokens where {self.tokens} were asked for")


def too_large(limit: int) -> WrongAnswer:
    """The error of an answer that goes on past its limit."""
    return WrongAnswer(f"the sampler's answer is larger than the {limit} bytes that its request allows")
