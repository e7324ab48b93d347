"""Converts sampled tokens to completions of a prompt in vLLM's format, complete or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import COMPLETION, completion_logprobs, usage

from ...protocol import UNKNOWN_LOGPROB
from ..decoding.generation import Update
from ..decoding.text import Decoder
from .answers import TextReader
from .requests import CompletionRequest


class CompletionWriter:
    """Writes the answer to one request, as JSON objects. Text is passed on as it was sampled, markup included."""

    def __init__(self, request: CompletionRequest, prompt_ids: tuple[int, ...], decoder: Decoder) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._decoder = decoder
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._readers = [TextReader(request, decoder) for _ in range(request.choices)]
        self._offsets = [0] * request.choices  # characters of the tokens so far
        self._sampled = 0

    def whole(self, updates: Sequence[Update]) -> dict[str, Json]:
        """The complete answer. `updates` has the only update of each choice."""
        choices = [self._choice(index, update) | self._prompt() for index, update in enumerate(updates)]
        return self._frame(choices) | {"usage": usage(len(self._prompt_ids), self._sampled)}

    def opening(self, index: int) -> dict[str, Json]:
        """The first chunk of a choice, with the prompt's token ids if they are requested."""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        return self._frame([choice | self._prompt()])

    def chunk(self, index: int, update: Update) -> dict[str, Json]:
        """A chunk with the text, token ids and logprobs of an update."""
        return self._frame([self._choice(index, update)])

    def usage_chunk(self) -> dict[str, Json]:
        """The last chunk, if usage was requested."""
        return self._frame([]) | {"usage": usage(len(self._prompt_ids), self._sampled)}

    def _choice(self, index: int, update: Update) -> dict[str, Json]:
        self._sampled += len(update.token_ids)
        choice: dict[str, Json] = {"index": index, "text": self._readers[index].read(update)}
        choice["logprobs"] = self._logprobs(index, update) if self._request.logprobs else None
        choice["finish_reason"] = update.finish
        if update.finish:
            choice["stop_reason"] = update.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = list(update.token_ids)
        return choice

    def _logprobs(self, index: int, update: Update) -> dict[str, Json]:
        top = update.top or [()] * len(update.token_ids)
        tokens = [
            (self._text(token), _known(logprob), {self._text(other): _known(value) for other, value in best})
            for token, logprob, best in zip(update.token_ids, update.logprobs, top, strict=True)
        ]
        start = self._offsets[index]
        self._offsets[index] += sum(len(text) for text, _, _ in tokens)
        return completion_logprobs(tokens, start)

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._request.return_tokens_as_token_ids else self._decoder.token(token)[0]

    def _prompt(self) -> dict[str, Json]:
        return {"prompt_token_ids": list(self._prompt_ids)} if self._request.return_token_ids else {}

    def _frame(self, choices: list[dict[str, Json]]) -> dict[str, Json]:
        head = {"id": self._id, "object": COMPLETION, "created": self._created, "model": self._request.model}
        return head | {"choices": choices}


def _known(logprob: float) -> float:
    return max(logprob, UNKNOWN_LOGPROB)
