"""How large the sampler's answer to a request may be."""

from __future__ import annotations

from dataclasses import dataclass

from offbook.base.errors import EngineError

MAX_ANSWER = 256 * 2**20
"""Bytes of an answer at most, whatever the request."""
MAX_TOOL_CALLS = 1024
"""Tool calls of one choice at most."""
MAX_FINISH_REASON = 64
"""Characters: the width of the database column."""
LOGPROB_ABOVE = 1e-3
"""Tolerance: rounding can raise a logprob of 0 by this much."""
_MAX_TOKENS = 2**17
"""Assumed length of a choice if the request has no max_tokens."""
_HEAD_BYTES = 4 * 2**20
"""Allowance for everything but the prompt and the tokens."""
_TOKEN_BYTES = 1024
"""A streamed token is an event of some 300 bytes."""
_PROMPT_BYTES = 16
"""The sampler repeats the prompt as token ids: up to one per byte of the request, and 8 bytes of JSON per id."""


class WrongAnswer(EngineError):
    """The sampler's answer contradicts its request. The message names the field."""


@dataclass(frozen=True)
class AnswerLimits:
    """The largest answer to one request. It protects the server from a faulty sampler.

    `tokens` limits each choice (None: no limit but the context), `bytes` the whole answer. `recorded`: the call is
    stored, so its answer must have token ids.
    """

    choices: int = 1
    tokens: int | None = None
    bytes: int = MAX_ANSWER
    recorded: bool = True

    @classmethod
    def of(
        cls, *, choices: int, tokens: int | None, top_logprobs: int, request_bytes: int, recorded: bool
    ) -> AnswerLimits:
        """The limits of a request, whose JSON body has `request_bytes` bytes.

        A request of 1,000 bytes for two choices of 10 tokens, with one alternative per token:

        >>> AnswerLimits.of(choices=2, tokens=10, top_logprobs=1, request_bytes=1_000, recorded=True).bytes
        4251264

        These are 4 MiB, 16 bytes for each byte of the request, and 1,024 bytes for each of 2 x 10 x (1 + 1) logprobs.
        """
        choice_bytes = min(tokens or _MAX_TOKENS, MAX_ANSWER) * _TOKEN_BYTES * (1 + top_logprobs)
        size = _HEAD_BYTES + request_bytes * _PROMPT_BYTES + choices * choice_bytes
        return cls(choices, tokens, min(size, MAX_ANSWER), recorded)

    def check_index(self, index: object) -> int:
        """Return the index of a choice. Raises WrongAnswer if the request has no such choice."""
        if type(index) is not int or not 0 <= index < self.choices:
            raise WrongAnswer(
                f"the sampler sent a choice with the index {str(index)[:40]} although n is {self.choices}"
            )
        return index

    def check_length(self, index: int, count: int) -> None:
        """Raise WrongAnswer if choice `index` has more tokens (`count` so far) than requested."""
        if self.tokens is not None and count > self.tokens:
            raise WrongAnswer(
                f"the sampler sent choice {index} with {count} tokens although max_tokens is {self.tokens}"
            )


def too_large(limit: int) -> WrongAnswer:
    """The error for an answer of more than `limit` bytes."""
    return WrongAnswer(f"the sampler's answer is larger than the {limit} bytes that its request allows")
