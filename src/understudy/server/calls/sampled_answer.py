"""What the sampler answered, as it is recorded: exact ids, a logprob or NaN for each, the message as it was parsed."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import cast

from ...engine.protocol import UNKNOWN_LOGPROB
from ...errors import EngineError
from ...types import CUT_OFF, CallOutput, CallStatus, Json, Message
from .call_marks import looks_like_call

COMPLETE_REASONS = frozenset({"stop", "tool_calls", "function_call"})
_IDS = 2**31
"""Token ids are smaller: they are recorded as int32."""


@dataclass
class SampledChoice:
    """One choice as it grows, whole or from a stream's deltas."""

    index: int
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    message: Message = field(default_factory=lambda: {"role": "assistant", "content": None})
    finish_reason: str | None = None
    parse_failure: bool | None = None  # None: the engine does not say
    ids_seen: bool = False

    def add_tokens(self, choice: dict[str, Json]) -> None:
        """Take `token_ids` and `logprobs` of a choice or chunk; a chunk's lists belong together."""
        ids = choice.get("token_ids")
        if ids is None:
            return
        _check_ids(ids)
        self.ids_seen = True
        logprobs = cast(dict[str, Json], choice.get("logprobs") or {})
        self.token_ids.extend(ids)
        values = cast(list[float | None] | None, logprobs.get("token_logprobs"))
        if values is None:
            content = cast(list[dict[str, Json] | None], logprobs.get("content") or [])
            values = [item.get("logprob") if item is not None else None for item in content]
        self.logprobs.extend(aligned(ids, values))

    def add_delta(self, delta: dict[str, Json]) -> None:
        """Append a streamed delta to the message: text is joined, tool calls by their index."""
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
        """As recorded; `unfinished` is the status of a choice that has no finish reason. See `Sampled.outputs`."""
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
        """The engine's own word, else what the text looks like."""
        if self.parse_failure is not None:
            return self.parse_failure
        if mark_ids is None or self.message.get("tool_calls"):
            return False
        return looks_like_call(self.token_ids, self.message, mark_ids)

    def _add_tool_call(self, part: dict[str, Json]) -> None:
        calls = cast(list[dict[str, Json]], self.message.setdefault("tool_calls", []))
        at = int(part.get("index") or 0)
        while len(calls) <= at:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[at]
        for name in ("id", "type"):
            call[name] = part.get(name) or call[name]
        function = cast(dict[str, Json], part.get("function") or {})
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""


@dataclass
class Sampled:
    """An answer of the sampler as far as it came."""

    prompt_ids: list[int] | None = None
    choices: dict[int, SampledChoice] = field(default_factory=dict[int, SampledChoice])

    def add_answer(self, answer: dict[str, Json]) -> None:
        """Take a whole answer."""
        self._add_prompt(answer)
        for item in answer["choices"]:
            choice = self.choice(int(item["index"]))
            choice.add_tokens(item)
            choice.message = {name: value for name, value in item["message"].items() if value not in (None, [])}
            choice.message.setdefault("content", None)
            choice.finish_reason = item.get("finish_reason")
            choice.parse_failure = item.get("parse_failure")

    def add_chunk(self, chunk: dict[str, Json]) -> None:
        """Take one chunk of a stream."""
        self._add_prompt(chunk)
        for item in chunk.get("choices") or ():
            choice = self.choice(int(item["index"]))
            choice.add_tokens(item)
            choice.add_delta(item.get("delta") or {})
            choice.finish_reason = item.get("finish_reason") or choice.finish_reason
            choice.parse_failure = item.get("parse_failure", choice.parse_failure)

    def _add_prompt(self, answer: dict[str, Json]) -> None:
        ids = answer.get("prompt_token_ids")
        if ids is not None:
            _check_ids(ids)
            self.prompt_ids = ids

    def choice(self, index: int) -> SampledChoice:
        """The choice of this index, made where it is new."""
        return self.choices.setdefault(index, SampledChoice(index))

    def finished(self, count: int) -> bool:
        """Whether `count` choices have their finish reason."""
        return sum(choice.finish_reason is not None for choice in self.choices.values()) >= count

    def check(self, count: int) -> None:
        """Raises EngineError where the answer cannot be recorded, naming the field that lacks."""
        if not self.prompt_ids:
            raise EngineError(_lacks("prompt_token_ids"))
        if len(self.choices) < count:
            raise EngineError(f"the sampler answered {len(self.choices)} choices of {count}")
        for choice in self.choices.values():
            if not choice.ids_seen:
                raise EngineError(_lacks(f"choices[{choice.index}].token_ids"))
            if choice.finish_reason is None:
                raise EngineError(f"the sampler gave choice {choice.index} no finish_reason")

    def outputs(self, unfinished: CallStatus, mark_ids: Set[int] | None = None) -> tuple[CallOutput, ...]:
        """The choices in order of index. `mark_ids`: tokens that begin a tool call, for an engine that does not say
        whether it read them all; None: no tools were offered."""
        return tuple(self.choices[index].output(unfinished, mark_ids) for index in sorted(self.choices))


def _check_ids(ids: object) -> None:
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < _IDS for each in cast(list[object], ids)):
        raise TypeError("token ids are integers of 0 to 2^31 - 1")


def aligned(ids: Sequence[int], values: Sequence[float | None]) -> list[float]:
    """One logprob for each id, NaN where the engine gave none.

    A list that stops early lacks those of the last ids. One that is too long cannot be matched: all NaN.
    """
    if len(values) > len(ids):
        return [math.nan] * len(ids)
    known = [float(value) if value is not None and abs(value) < -UNKNOWN_LOGPROB else math.nan for value in values]
    return known + [math.nan] * (len(ids) - len(known))


def status_of(outputs: Sequence[CallOutput]) -> CallStatus:
    """The call's status: the worst of its choices'."""
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
