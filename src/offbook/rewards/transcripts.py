"""Trajectories as text for a judge: one message per line as exact JSON, with invisible characters escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from pydantic import BaseModel

from offbook.base.errors import ConfigError
from offbook.base.types import History, Tool

Lines: TypeAlias = tuple[str, ...]
"""One conversation: a line `tools [...]` if it has tools, then one line of JSON per message. No line begins with
`[`."""
TOOLS = "tools "

_UNSEEN = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control, invisible and bidirectional characters, tags, and lone surrogates. JSON already escapes those below
U+0020."""


@dataclass(frozen=True)
class Transcript:
    """A trajectory's own conversation, then those of its sub-agents. Transcripts with equal `identity` differ at most
    in the ids of tool calls, which providers choose at random."""

    conversations: tuple[Lines, ...]
    identity: str

    @classmethod
    def of(cls, histories: Sequence[History], name: str, tools: Sequence[Tool] | None = None) -> Transcript:
        """The transcript of a trajectory's histories, its own first. `tools`: for histories without tools. `name`: of
        the trajectory in errors. Raises ConfigError for a message that is not JSON."""
        try:
            lines = tuple(tuple(_lines(history.messages(), history.tools or tools)) for history in histories)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"trajectory {name}: a message is no JSON, so no judge can read it: {error}") from error
        return cls(lines, json.dumps([_without_call_ids(conversation) for conversation in lines]))

    @property
    def empty(self) -> bool:
        """Whether it has no message."""
        return not any(line for lines in self.conversations for line in lines if not line.startswith(TOOLS))


def json_line(value: object) -> str:
    """A value as one line of JSON, with invisible characters escaped. `json.loads` restores the value."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return _UNSEEN.sub(lambda match: json.dumps(match[0])[1:-1], text)


def shared_beginning(conversations: Iterable[Lines]) -> Lines:
    """The longest common prefix of lines."""
    shared: list[str] = []
    for lines in zip(*conversations, strict=False):
        if len(set(lines)) > 1:
            break
        shared.append(lines[0])
    return tuple(shared)


def _lines(messages: Iterable[object], tools: Sequence[Tool] | None) -> Iterable[str]:
    if tools:
        yield TOOLS + json_line(list(tools))
    for message in messages:
        yield json_line(message)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):  # objects of the OpenAI SDK inside a message
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Mapping):
        return dict(cast(Mapping[object, object], value))
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _without_call_ids(lines: Lines) -> list[object]:
    """The messages, with ids of tool calls replaced by numbers in order of appearance."""
    numbers: dict[object, int] = {}

    def number(call_id: object) -> object:
        return numbers.setdefault(call_id, len(numbers)) if isinstance(call_id, str) else call_id

    def renamed(line: str) -> object:
        message: Any = line if line.startswith(TOOLS) else json.loads(line)
        if not isinstance(message, dict):
            return message
        fields = cast(dict[str, Any], message)
        calls = fields.get("tool_calls")
        for call in cast(list[Any], calls) if isinstance(calls, list) else []:
            if isinstance(call, dict) and "id" in call:
                call["id"] = number(cast(dict[str, object], call)["id"])
        if "tool_call_id" in fields:
            fields["tool_call_id"] = number(fields["tool_call_id"])
        return fields

    return [renamed(line) for line in lines]
