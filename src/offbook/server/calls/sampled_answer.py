"""Reads the sampler's answer, and collects it for recording: token ids, a logprob (or NaN) per token, and the parsed message.

What does not fit the request is a WrongAnswer. Unparsed tool calls are detected by how they begin: vLLM does not report parse
failures.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar, cast

import aiohttp
import orjson

from offbook.base.server_sent_events import EventReader
from offbook.base.types import (
    CUT_OFF,
    CallOutput,
    CallStatus,
    Json,
    Message,
)

from ...engine.protocol import UNKNOWN_LOGPROB
from ..errors import shortened
from ..sampler.transport import LOGPROB_ABOVE, MAX_FINISH_REASON, MAX_TOOL_CALLS, AnswerLimits, WrongAnswer, too_large

logger = logging.getLogger(__name__)
R = TypeVar("R")

WRONG_SHAPE = (AttributeError, KeyError, TypeError, ValueError)
"""What reading a field of an answer raises if the answer has another shape."""


class EventStream:
    """The events of a stream, up to [DONE]."""

    def __init__(self, response: aiohttp.ClientResponse, limit: int) -> None:
        self._content = response.content
        self._limit = limit
        self._size = 0
        self._reader = EventReader()
        self._done = False

    async def next(self, seconds: float | None = None) -> list[bytes] | None:
        """The next events, all that arrived together; None at the end, or after `seconds` without an event.

        Raises WrongAnswer for a stream of more than `limit` bytes.
        """
        if seconds is None:
            return await self._read()
        try:
            return await asyncio.wait_for(self._read(), seconds)
        except TimeoutError:
            logger.warning("The sampler kept a stream open for %.0f s after its last choice; closing it", seconds)
            return None

    async def _read(self) -> list[bytes] | None:
        while not self._done and (piece := await self._content.readany()):
            self._size += len(piece)
            if self._size > self._limit:
                raise too_large(self._limit)
            events = self._reader.push(piece)
            if b"\n" not in piece:
                continue
            if b"[DONE]" in events:
                self._done = True
                del events[events.index(b"[DONE]") :]
            return events
        return None


def json_object(raw: bytes) -> dict[str, Json]:
    """A JSON object of the sampler. Raises WrongAnswer."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise WrongAnswer(f"the sampler's answer is not JSON: {raw[:200]!r}") from error
    if not isinstance(answer, dict):
        raise WrongAnswer(f"the sampler's answer is not a JSON object: {raw[:200]!r}")
    return cast(dict[str, Json], answer)


def understood(take: Callable[[dict[str, Json]], R], answer: dict[str, Json]) -> R:
    """The result of `take`. Raises WrongAnswer if the answer has another shape than `take` reads."""
    try:
        return take(answer)
    except WRONG_SHAPE as error:
        raise not_understood(error, answer) from error


def not_understood(error: Exception, answer: dict[str, Json]) -> WrongAnswer:
    """The error for an answer of another shape."""
    shape = f"{type(error).__name__}: {error}"
    return WrongAnswer(f"the sampler's answer is not of vLLM's dialect ({shape}): {shortened(answer)}")


CALL_MARKS = ("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""Beginnings of tool calls of Qwen, Granite, Mistral, Llama and Qwen3-Coder, as a special token or plain text."""
BARE_CALL = '{"name"'
"""Beginning of a Llama tool call without a mark."""


def looks_like_call(token_ids: Sequence[int], message: Message, mark_ids: Set[int]) -> bool:
    """Whether an answer contains the beginning of a tool call.

    `mark_ids` are the base's special tokens that equal one of CALL_MARKS. They leave no text if the engine skips special
    tokens.
    """
    if not mark_ids.isdisjoint(token_ids):
        return True
    content: Json = message.get("content")
    if not isinstance(content, str):
        return False
    return content.lstrip().startswith(BARE_CALL) or any(mark in content for mark in CALL_MARKS)


COMPLETE_REASONS = frozenset({"stop", "tool_calls", "function_call"})
TOKEN_IDS = 2**31
"""Exclusive upper bound of token ids, which are recorded as int32."""


@dataclass
class SampledChoice:
    """One choice, taken at once or accumulated from a stream's deltas."""

    index: int
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    message: Message = field(default_factory=lambda: {"role": "assistant", "content": None})
    finish_reason: str | None = None
    parse_failure: bool | None = None  # None: the engine does not say
    ids_seen: bool = False

    def add_tokens(self, choice: dict[str, Json]) -> None:
        """Append `token_ids` and `logprobs` of a choice or chunk. Raises WrongAnswer, TypeError."""
        ids = choice.get("token_ids")
        if ids is None:
            return
        _check_ids(ids)
        self.ids_seen = True
        logprobs = cast(dict[str, Json], choice.get("logprobs") or {})
        values = cast(list[float | None] | None, logprobs.get("token_logprobs"))
        if values is None:
            content = cast(list[dict[str, Json] | None], logprobs.get("content") or [])
            values = [item.get("logprob") if item is not None else None for item in content]
        known = aligned(self.index, ids, values)
        self.token_ids.extend(ids)
        self.logprobs.extend(known)

    def add_message(self, message: dict[str, Json]) -> None:
        """Set the message of a complete answer. Raises TypeError for a malformed tool call."""
        self.message = {name: value for name, value in message.items() if value not in (None, [])}
        self.message.setdefault("content", None)
        for call in self.message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["name"], str) or not isinstance(function["arguments"], str):
                raise TypeError("the name and the arguments of a tool call are strings")

    def finish(self, reason: object) -> None:
        """Set the finish reason; None leaves the choice unfinished. Raises TypeError."""
        if reason is None:
            return
        if not isinstance(reason, str) or len(reason) > MAX_FINISH_REASON:
            raise TypeError(f"finish_reason is a string of at most {MAX_FINISH_REASON} characters")
        self.finish_reason = reason

    def add_delta(self, delta: dict[str, Json]) -> None:
        """Append a streamed delta to the message. Text is concatenated, tool calls are merged by index."""
        for name, value in delta.items():
            if name == "tool_calls":
                for part in value or ():
                    self._add_tool_call(part)
            elif name == "role":
                self.message["role"] = value or self.message["role"]
            elif isinstance(value, str):
                self.message[name] = (self.message.get(name) or "") + value
            elif value is not None:
                self.message[name] = value

    def output(self, unfinished: CallStatus, mark_ids: Set[int] | None) -> CallOutput:
        """The choice for the record. `unfinished` is the status without a finish reason. `mark_ids`: see `Sampled.outputs`."""
        if self.finish_reason is None:
            status = unfinished
        elif self.finish_reason == CUT_OFF:
            status = CallStatus.TRUNCATED
        else:
            status = CallStatus.COMPLETE if self.finish_reason in COMPLETE_REASONS else CallStatus.FAILED
        return CallOutput(
            index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            message=self.message,
            finish_reason=self.finish_reason,
            status=status,
            parse_failure=self._parse_failure(mark_ids),
        )

    def _parse_failure(self, mark_ids: Set[int] | None) -> bool:
        """Whether a tool call could not be parsed: as the engine reports it, else judged by the text."""
        if self.parse_failure is not None:
            return self.parse_failure
        if mark_ids is None or self.message.get("tool_calls"):
            return False
        return looks_like_call(self.token_ids, self.message, mark_ids)

    def _add_tool_call(self, part: dict[str, Json]) -> None:
        calls = cast(list[dict[str, Json]], self.message.setdefault("tool_calls", []))
        index = part.get("index") or 0
        if type(index) is not int or not 0 <= index < MAX_TOOL_CALLS:
            raise WrongAnswer(
                f"the sampler gave a tool call the index {str(index)[:40]}, of at most {MAX_TOOL_CALLS} calls"
            )
        while len(calls) <= index:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        for name in ("id", "type"):
            call[name] = part.get(name) or call[name]
        function = cast(dict[str, Json], part.get("function") or {})
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""


@dataclass
class Sampled:
    """The sampler's answer so far, checked against the limits of its request."""

    limits: AnswerLimits = field(default_factory=AnswerLimits)
    prompt_ids: list[int] | None = None
    choices: dict[int, SampledChoice] = field(default_factory=dict[int, SampledChoice])

    def add_answer(self, answer: dict[str, Json]) -> None:
        """Add a complete answer. Raises WrongAnswer, TypeError, KeyError."""
        self._add_prompt(answer)
        for item in answer["choices"]:
            index = self.limits.check_index(item["index"])
            if index in self.choices:
                raise WrongAnswer(f"the sampler gave choice {index} twice")
            choice = self._add_tokens(index, item)
            choice.add_message(item["message"])
            choice.finish(item.get("finish_reason"))
            choice.parse_failure = item.get("parse_failure")

    def add_chunk(self, chunk: dict[str, Json]) -> None:
        """Add one chunk of a stream. Raises WrongAnswer, TypeError, KeyError."""
        self._add_prompt(chunk)
        for item in chunk.get("choices") or ():
            index = self.limits.check_index(item["index"])
            known = self.choices.get(index)
            if known is not None and known.finish_reason is not None and (item.get("token_ids") or item.get("delta")):
                raise WrongAnswer(f"the sampler went on with choice {index} after its finish_reason")
            choice = self._add_tokens(index, item)
            choice.add_delta(item.get("delta") or {})
            choice.finish(item.get("finish_reason"))
            choice.parse_failure = item.get("parse_failure", choice.parse_failure)

    def _add_prompt(self, answer: dict[str, Json]) -> None:
        ids = answer.get("prompt_token_ids")
        if ids is not None:
            _check_ids(ids)
            self.prompt_ids = ids

    def _add_tokens(self, index: int, item: dict[str, Json]) -> SampledChoice:
        """Add the item's tokens to the choice of this index, which is created if it is new."""
        choice = self.choice(index)
        choice.add_tokens(item)
        self.limits.check_length(index, len(choice.token_ids))
        return choice

    def choice(self, index: int) -> SampledChoice:
        """The choice of this index, which is created if it is new."""
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = SampledChoice(index)
        return choice

    def begun(self) -> bool:
        """Whether a token was sampled."""
        return any(choice.token_ids for choice in self.choices.values())

    def finished(self) -> bool:
        """Whether all requested choices have a finish reason."""
        if len(self.choices) < self.limits.choices:
            return False
        return all(choice.finish_reason is not None for choice in self.choices.values())

    def check(self) -> None:
        """Raise WrongAnswer, naming the field, if the complete answer does not match the request."""
        limits = self.limits
        if limits.recorded and not self.prompt_ids:
            raise WrongAnswer(_lacks("prompt_token_ids"))
        if len(self.choices) < limits.choices:
            raise WrongAnswer(f"the sampler answered {len(self.choices)} choices of {limits.choices}")
        for choice in self.choices.values():
            if limits.recorded and not choice.ids_seen:
                raise WrongAnswer(_lacks(f"choices[{choice.index}].token_ids"))
            if choice.finish_reason is None:
                raise WrongAnswer(f"the sampler gave choice {choice.index} no finish_reason")

    def outputs(self, unfinished: CallStatus, mark_ids: Set[int] | None = None) -> tuple[CallOutput, ...]:
        """The choices for the record, by index.

        `mark_ids` are tokens that begin a tool call, for an engine that does not report parse failures; None means that no
        tools were offered.
        """
        return tuple(self.choices[index].output(unfinished, mark_ids) for index in sorted(self.choices))


def _check_ids(ids: object) -> None:
    known = cast(list[int], ids) if isinstance(ids, list) else None
    # `set`, `min` and `max` run in C: prompts are long, and every call is checked.
    if known is None or (known and (set(map(type, known)) != {int} or min(known) < 0 or max(known) >= TOKEN_IDS)):
        raise TypeError("token ids are integers of 0 to 2^31 - 1")


def aligned(index: int, ids: Sequence[int], values: Sequence[float | None]) -> list[float]:
    """One logprob per token id of choice `index`; NaN where the engine returned none.

    Raises WrongAnswer if the numbers of logprobs and ids differ, or a logprob is above 0.
    """
    if not values:
        return [math.nan] * len(ids)
    if len(values) != len(ids):
        raise WrongAnswer(f"the sampler gave choice {index} {len(values)} logprobs for {len(ids)} tokens")
    known = [math.nan if value is None or value <= UNKNOWN_LOGPROB else float(value) for value in values]
    if any(value > LOGPROB_ABOVE for value in known):
        raise WrongAnswer(f"the sampler gave choice {index} a logprob above 0")
    return known


def status_of(outputs: Sequence[CallOutput]) -> CallStatus:
    """The call's status: the worst of its choices' statuses."""
    statuses = {output.status for output in outputs}
    for status in (CallStatus.CANCELLED, CallStatus.FAILED, CallStatus.TRUNCATED):
        if status in statuses:
            return status
    return CallStatus.COMPLETE if outputs else CallStatus.FAILED


def _lacks(name: str) -> str:
    return (
        f"the sampler's answer has no {name}, so the call cannot be recorded: it must speak vLLM's dialect with "
        "`return_token_ids` (vLLM 0.10.2 or newer)"
    )
