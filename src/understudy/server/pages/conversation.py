"""The calls of a rollout as a conversation: threads of calls that go on from each other, each with what is new to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ...types import Call, CallOutput, Json, Message

EMPTY: Mapping[str, str] = {}
_ONE_LINE = 60
"""Characters of JSON that stay on one line."""


@dataclass(frozen=True)
class ToolUse:
    """A tool call of a message. `arguments` are laid out where they are JSON."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class ShownMessage:
    """A message as people read it. `name`: the tool that answered, or the speaker's."""

    role: str
    text: str
    name: str = ""
    reasoning: str = ""
    tools: tuple[ToolUse, ...] = ()


@dataclass(frozen=True)
class CallTurn:
    """A call in order of start. `context` are the messages that its thread had not shown; `changed` says how many earlier
    messages came back other than they were. `branch` is 0 in the rollout's first thread."""

    number: int
    call: Call
    branch: int
    label: str  # of the branch: agent or node
    context: tuple[ShownMessage, ...]
    kept: int  # messages that the thread had shown
    changed: int
    outputs: tuple[CallOutput, ...]


@dataclass
class _Thread:
    number: int
    messages: list[Message]
    label: str


def turns(calls: Sequence[Call]) -> tuple[CallTurn, ...]:
    """The calls as turns of threads. A call goes on in the thread with which it shares most messages, at least up to the
    first that is no system message; else it opens a thread of its own, as a sub-agent does."""
    threads: list[_Thread] = []
    found: list[CallTurn] = []
    for number, call in enumerate(calls, 1):
        messages = list(call.messages)
        best = max(threads, key=lambda thread: _shared(thread.messages, messages), default=None)
        shared = _shared(best.messages, messages) if best is not None else 0
        if best is None or shared <= _opening(messages):
            best, shared = _Thread(len(threads), [], _label(call)), 0
            threads.append(best)
        changed = len(best.messages) - shared
        names = _tool_names(messages)
        context = tuple(shown(message, names) for message in messages[shared:])
        found.append(CallTurn(number, call, best.number, best.label, context, shared, changed, call.outputs))
        answer = [call.outputs[0].message] if call.outputs else []
        best.messages = [*messages, *answer]
    return tuple(found)


def shown(message: Message, names: Mapping[str, str] = EMPTY) -> ShownMessage:
    """A message in OpenAI's shape as people read it; content that is no text is shown as JSON. `names`: of tools, by the
    id of their call."""
    calls: list[Json] = message.get("tool_calls") or []
    return ShownMessage(
        role=str(message.get("role", "?")),
        text=_text(message.get("content")),
        name=str(message.get("name") or names.get(str(message.get("tool_call_id")), "")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        tools=tuple(_tool_use(call) for call in calls),
    )


def indented(text: str) -> str:
    """JSON on one line where it fits, else indented; other text as it is."""
    if text[:1] not in "{[" or not text:
        return text
    try:
        value: Json = json.loads(text)
    except ValueError:
        return text
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= _ONE_LINE else json.dumps(value, indent=2, ensure_ascii=False)


def _tool_names(messages: Sequence[Message]) -> dict[str, str]:
    uses = (use for message in messages for use in shown(message).tools)
    return {use.id: use.name for use in uses if use.id}


def _tool_use(call: Json) -> ToolUse:
    function: dict[str, Json] = call.get("function") or {}
    arguments: Json = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolUse(str(function.get("name", "?")), indented(text), str(call.get("id") or ""))


def _text(content: Json) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast(list[Json], content)
        return "\n".join(
            str(cast(dict[str, Json], part)["text"])
            if isinstance(part, dict) and "text" in part
            else json.dumps(part, ensure_ascii=False)
            for part in parts
        )
    return json.dumps(content, ensure_ascii=False)


def _shared(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """How many first messages say the same."""
    size = min(len(known), len(messages))
    return next((i for i in range(size) if _said(known[i]) != _said(messages[i])), size)


def _said(message: Message) -> tuple[str, str, str]:
    """What a message says, whatever ids and empty fields it carries."""
    tools = [(use.name, use.arguments) for use in shown(message).tools]
    return str(message.get("role")), _text(message.get("content")).strip(), repr(tools)


def _opening(messages: Sequence[Message]) -> int:
    """How many first messages are instructions, which agents of one app may share."""
    return next((i for i, message in enumerate(messages) if message.get("role") not in ("system", "developer")), 0)


def _label(call: Call) -> str:
    origin = call.origin
    if origin is None:
        return ""
    return origin.agent or origin.node or ""
