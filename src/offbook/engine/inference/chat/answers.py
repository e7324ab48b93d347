"""Converts sampled tokens to answers in vLLM's format, of chats and of completions of a prompt, complete or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from offbook.base.types import CUT_OFF, Json
from offbook.openai_dialect.chat_answer import (
    CHUNK,
    COMPLETION,
    WHOLE,
    Answer,
    completion_logprobs,
    head,
    tool_call,
    usage,
)

from ...protocol import UNKNOWN_LOGPROB
from ..decoding.generation import Decoder, StopCutter, TextStream, Update
from .requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from .thoughts import OPEN, Thought, ThoughtSplitter
from .tool_calls import HERMES, CallFormat, CallParser, ToolCall
from .untagged_calls import UntaggedCalls

Pieces = list[str | Thought | ToolCall]

_OPENING_TOKENS = 8
"""Last tokens of a prompt that are searched for an opened thought."""


class TextReader:
    """The text of one choice, from its updates, without end tokens and stop strings."""

    def __init__(self, request: SamplingRequest, decoder: Decoder) -> None:
        self._request = request
        self._decoder = decoder
        self._stream = TextStream(decoder, skip_special=request.skips_special)
        self._cutter = StopCutter(request.stops, include=bool(request.include_stop_str_in_output))

    def read(self, update: Update) -> str:
        """The text that is final after this update. The last update returns everything that is left."""
        shown = list(update.token_ids)
        stop = update.stop_reason if isinstance(update.stop_reason, str) else None
        if update.finish == "stop" and stop is None:
            shown = shown[:-1]  # the end token has no text
        if update.finish and not self._request.stream and not self._request.stops:
            return self._decoder.decode(shown, skip_special=self._request.skips_special)
        if not update.finish:
            return self._cutter.push("".join(map(self._stream.push, shown)))
        before, last = shown[:-1], shown[-1:]
        text = self._cutter.push("".join(map(self._stream.push, before)))
        ending = "".join(map(self._stream.push, last)) + self._stream.finish()
        return text + self._cutter.finish(ending, stop)


class ChoiceReader:
    """Splits the tokens of one choice into thought, content and tool calls."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        decoder: Decoder,
        calls: CallFormat,
        thoughts: ThoughtSplitter | None = None,
    ) -> None:
        self._thoughts = thoughts
        self._text = TextReader(request, decoder)
        parsing = bool(request.tools) and request.tool_choice != "none"
        call_format = HERMES if request.shaped else calls  # grammars use hermes' format for every model family
        self._parser: CallParser | None = call_format.parser(request.most_calls) if parsing else None
        if self._parser and not request.shaped:
            self._parser = UntaggedCalls(self._parser, request.tools or (), request.most_calls)

    @property
    def called(self) -> bool:
        """Whether a tool call was read."""
        return bool(self._parser and self._parser.calls)

    @property
    def parse_failure(self) -> bool | None:
        """Whether any text looked like a tool call but could not be parsed; None if no tools were offered."""
        return None if self._parser is None else self._parser.failures > 0

    def read(self, update: Update) -> Pieces:
        """The pieces that are final after this update. The last update returns everything that is left."""
        thought, text = self._split(update)
        pieces: Pieces = [Thought(thought)] if thought else []
        if self._parser is None:
            return [*pieces, text] if text else pieces
        pieces += self._parser.push(text)
        if update.finish:
            pieces += self._parser.finish(truncated=update.finish == CUT_OFF)
        return pieces

    def finish_reason(self, update: Update) -> str | None:
        """OpenAI's finish reason: `tool_calls` after a call, unless the answer was cut off."""
        return "tool_calls" if update.finish == "stop" and self.called else update.finish

    def _split(self, update: Update) -> tuple[str, str]:
        text = self._text.read(update)
        if self._thoughts is None:
            return "", text
        thought, answer = self._thoughts.push(text)
        last = self._thoughts.finish() if update.finish else ("", "")
        return thought + last[0], answer + last[1]


class AnswerWriter:
    """Writes the answer to one request, as JSON objects."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        prompt_ids: tuple[int, ...],
        decoder: Decoder,
        calls: CallFormat = HERMES,
        *,
        thinks: bool = False,
    ) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._decoder = decoder
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        end_of_prompt = decoder.decode(prompt_ids[-_OPENING_TOKENS:]).rstrip()
        inside = thinks and not request.shaped and end_of_prompt.endswith(OPEN)
        self._readers = [
            ChoiceReader(request, decoder, calls, ThoughtSplitter(inside=inside) if thinks else None)
            for _ in range(request.choices)
        ]
        self._new_id = calls.new_id
        self._calls = [0] * request.choices
        self._sampled = 0

    def whole(self, updates: Sequence[Update]) -> dict[str, Json]:
        """The complete answer. `updates` has the only update of each choice."""
        choices = [self._choice(index, update) for index, update in enumerate(updates)]
        return self._frame(WHOLE, choices, {"usage": self._usage()})

    def opening(self, index: int) -> dict[str, Json]:
        """The first chunk of a choice, with its role and, if requested, the prompt's token ids."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._frame(CHUNK, [choice], {})

    def chunk(self, index: int, update: Update) -> dict[str, Json]:
        """A chunk with the text, tool calls, token ids and logprobs of an update."""
        self._sampled += len(update.token_ids)
        reader = self._readers[index]
        pieces = reader.read(update)
        delta: dict[str, Json] = {}
        if thought := self._thought(pieces):
            delta["reasoning"] = thought
        if content := "".join(piece for piece in pieces if isinstance(piece, str)):
            delta["content"] = content
        if calls := self._tool_calls(index, pieces):
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
        return self._frame(CHUNK, [self._facts(index, update, {"delta": delta})], {}, first=False)

    def usage_chunk(self) -> dict[str, Json]:
        """The last chunk, if usage was requested."""
        return self._frame(CHUNK, [], {"usage": self._usage()}, first=False)

    def _choice(self, index: int, update: Update) -> dict[str, Json]:
        self._sampled += len(update.token_ids)
        pieces = self._readers[index].read(update)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [call for _, call in self._tool_calls(index, pieces)]
        thought = self._thought(pieces)
        message: dict[str, Json] = {"role": "assistant", "content": content or (None if calls or thought else "")}
        if thought:
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = calls
        return self._facts(index, update, {"message": message})

    def _thought(self, pieces: Pieces) -> str:
        shown = self._request.include_reasoning is not False
        return "".join(piece.text for piece in pieces if isinstance(piece, Thought)) if shown else ""

    def _facts(self, index: int, update: Update, content: dict[str, Json]) -> dict[str, Json]:
        """A choice with `content` (its message or delta), logprobs, finish reason and, if requested, token ids."""
        request, reader = self._request, self._readers[index]
        choice: dict[str, Json] = {"index": index, **content}
        choice["logprobs"] = {"content": self._logprobs(update)} if request.logprobs else None
        choice["finish_reason"] = reader.finish_reason(update)
        if update.finish:
            choice["stop_reason"] = update.stop_reason
            if reader.parse_failure is not None:
                choice["parse_failure"] = reader.parse_failure
        if request.return_token_ids:
            choice["token_ids"] = list(update.token_ids)
        return choice

    def _tool_calls(self, index: int, pieces: Pieces) -> list[tuple[int, dict[str, Json]]]:
        calls: list[tuple[int, dict[str, Json]]] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                calls.append((self._calls[index], tool_call(self._new_id(), piece.name, piece.arguments)))
                self._calls[index] += 1
        return calls

    def _logprobs(self, update: Update) -> list[dict[str, Json]]:
        top = update.top or [()] * len(update.token_ids)
        return [
            {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in best]}
            for token, logprob, best in zip(update.token_ids, update.logprobs, top, strict=True)
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Json]:
        text, utf8 = self._decoder.token(token)
        if self._request.return_tokens_as_token_ids:
            text = f"token_id:{token}"
        return {"token": text, "logprob": max(logprob, UNKNOWN_LOGPROB), "bytes": utf8}

    def _usage(self) -> Answer:
        return usage(len(self._prompt_ids), self._sampled)

    def _frame(
        self, kind: str, choices: list[dict[str, Json]], more: dict[str, Json], *, first: bool = True
    ) -> dict[str, Json]:
        frame = head(kind, self._id, self._created, self._request.model) | {"choices": choices, **more}
        if self._request.return_token_ids and first:
            frame["prompt_token_ids"] = list(self._prompt_ids)
        return frame


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
