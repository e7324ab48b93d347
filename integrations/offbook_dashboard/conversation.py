"""Groups the calls of a rollout into threads. In a thread, the prompt of each call continues the previous call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from offbook.base.json_files import parse_json
from offbook.base.types import Call, CallOutput, Json, Message

EMPTY: Mapping[str, str] = {}
_ONE_LINE = 60
"""Most characters of JSON on one line; longer JSON is indented."""


@dataclass(frozen=True)
class ToolUse:
    """A tool call of a message. `arguments` are indented if they are JSON."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class ShownMessage:
    """A message as text. `name` is the name of the tool that answered, or of the author."""

    role: str
    text: str
    name: str = ""
    reasoning: str = ""
    tools: tuple[ToolUse, ...] = ()


@dataclass(frozen=True)
class CallTurn:
    """A call, and how its prompt differs from the messages that its thread has already."""

    number: int  # 1, 2, ... in order of start
    call: Call
    branch: int  # number of the thread; 0 is the rollout's first
    label: str  # agent or node of the thread
    context: tuple[ShownMessage, ...]  # messages that are new in the thread
    kept: int  # messages that the prompt repeats unchanged
    changed: int  # messages of the thread that the prompt changes or leaves out
    outputs: tuple[CallOutput, ...]


@dataclass
class _Thread:
    number: int
    messages: list[Message]
    label: str


def turns(calls: Sequence[Call]) -> tuple[CallTurn, ...]:
    """Assign each call, in order, to a thread.

    A call continues the thread with which it shares the most first messages. It must share more than the system messages;
    otherwise it starts a new thread, as a sub-agent's first call does.
    """
    threads: list[_Thread] = []
    result: list[CallTurn] = []
    for number, call in enumerate(calls, 1):
        messages = list(call.messages)
        thread = max(threads, key=lambda thread: _repeated(thread.messages, messages), default=None)
        kept = _repeated(thread.messages, messages) if thread is not None else 0
        if thread is None or kept <= _instructions(messages):
            label = (call.origin.agent or call.origin.node or "") if call.origin is not None else ""
            thread, kept = _Thread(len(threads), [], label), 0
            threads.append(thread)
        changed = len(thread.messages) - kept
        names = _tool_names(messages)
        context = tuple(shown(message, names) for message in messages[kept:])
        result.append(CallTurn(number, call, thread.number, thread.label, context, kept, changed, call.outputs))
        answer = [call.outputs[0].message] if call.outputs else []
        thread.messages = [*messages, *answer]
    return tuple(result)


def shown(message: Message, names: Mapping[str, str] = EMPTY) -> ShownMessage:
    """Convert a message in OpenAI's format. Content other than text becomes JSON. `names`: tool call id -> tool's name.

    >>> shown({"role": "tool", "content": "42", "tool_call_id": "c1"}, {"c1": "search"})
    ShownMessage(role='tool', text='42', name='search', reasoning='', tools=())
    """
    calls: list[Json] = message.get("tool_calls") or []
    return ShownMessage(
        role=str(message.get("role", "?")),
        text=_text(message.get("content")),
        name=str(message.get("name") or names.get(str(message.get("tool_call_id")), "")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        tools=tuple(_tool_use(call) for call in calls),
    )


def indented(text: str) -> str:
    """Format JSON objects and lists: on one line if short, otherwise indented. Other text is returned unchanged.

    >>> indented('{"city":"Berlin"}')
    '{"city": "Berlin"}'
    """
    if text[:1] not in "{[" or not text:
        return text
    try:
        value = parse_json(text)
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


def _repeated(earlier: Sequence[Message], messages: Sequence[Message]) -> int:
    size = min(len(earlier), len(messages))
    return next((i for i in range(size) if _content_of(earlier[i]) != _content_of(messages[i])), size)


def _content_of(message: Message) -> tuple[str, str, str]:
    """Role, text and tool calls of a message, without ids and empty fields."""
    tools = [(use.name, use.arguments) for use in shown(message).tools]
    return str(message.get("role")), _text(message.get("content")).strip(), repr(tools)


def _instructions(messages: Sequence[Message]) -> int:
    """Number of system messages at the beginning, which several agents of an app can have in common."""
    return next((i for i, message in enumerate(messages) if message.get("role") not in ("system", "developer")), 0)
