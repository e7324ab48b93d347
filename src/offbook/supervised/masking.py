"""Replaces texts of conversations before they are kept or trained: secrets that Offbook knows, or by a filter of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from offbook.base.choices import is_choice
from offbook.base.errors import ConfigError
from offbook.base.json_files import parse_json
from offbook.base.redaction import Redaction
from offbook.base.types import History, Json, Message, MessageOrChoice, RenderedHistory, Tool

TextFilter: TypeAlias = Callable[[str], str]
"""What is kept or trained instead of a text: of contents, thoughts, and values in the arguments of calls."""


class Masking:
    """Replaces texts by those of a filter, by default with the secrets that Offbook knows masked, unless the environment
    variable OFFBOOK_REDACT is 0. `count`: texts that changed."""

    def __init__(self, filter: TextFilter | None) -> None:
        self.count = 0
        self._filter = filter

    def message(self, message: Message) -> Message:
        """The message with its content, thoughts and arguments of calls filtered."""
        clean = dict(message)
        for name in ("content", "refusal", "reasoning", "reasoning_content"):
            if name in clean:
                clean[name] = self._content(clean[name])
        if calls := cast(list[Json], clean.get("tool_calls")):
            clean["tool_calls"] = [self._call(call) for call in calls]
        return clean

    def tools(self, tools: Sequence[Tool] | None) -> tuple[Tool, ...] | None:
        """The tools, of which the default masks what is a secret; a filter of the user's leaves them as they are."""
        if tools is None or self._filter is not None:
            return tools if tools is None else tuple(tools)
        return tuple(self._value(tool) for tool in tools)

    def rendered(self, history: RenderedHistory) -> RenderedHistory:
        """The conversation with its messages and tools filtered."""
        messages = tuple(self.message(message) for message in history.messages)
        return history.model_copy(update={"messages": messages, "tools": self.tools(history.tools)})

    def filter_in_place(self, history: History) -> None:
        """Filter the messages, choices and tools of a conversation."""
        history.messages_and_choices[:] = [self._entry(entry) for entry in history.entries()]
        tools = self.tools(history.tools)
        history.tools = None if tools is None else list(tools)

    def _entry(self, entry: MessageOrChoice) -> MessageOrChoice:
        if not is_choice(entry):
            return cast(MessageOrChoice, self.message(cast(Message, entry)))
        written = entry.message.model_dump(exclude_unset=True)
        clean = self.message(written)
        if clean == written:
            return entry
        return entry.model_copy(update={"message": type(entry.message).model_validate(clean)})

    def _content(self, content: Json) -> Json:
        if isinstance(content, list):
            return [self._content(part) for part in cast(list[Json], content)]
        if isinstance(content, dict):  # a part: its type is no text of the conversation
            part = cast(dict[str, Json], content)
            return part | {
                name: self._text(part[name]) for name in ("text", "refusal") if isinstance(part.get(name), str)
            }
        return self._text(content) if isinstance(content, str) else content

    def _call(self, call: Json) -> Json:
        function = cast(dict[str, Json], call.get("function") or {})
        arguments: Json = function.get("arguments")
        if not arguments:
            return call
        try:
            value = parse_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError:  # an observed model's, which no training takes
            return {**call, "function": {**function, "arguments": self._text(arguments)}}
        clean = self._value(value)
        if clean == value:
            return call  # its text as it was written
        written = json.dumps(clean, ensure_ascii=False) if isinstance(arguments, str) else clean
        return {**call, "function": {**function, "arguments": written}}

    def _value(self, value: Json, key: str = "") -> Json:
        if isinstance(value, dict):
            return {name: self._value(item, name) for name, item in cast(dict[str, Json], value).items()}
        if isinstance(value, list):
            return [self._value(item) for item in cast(list[Json], value)]
        return self._text(value, key) if isinstance(value, str) else value

    def _text(self, text: str, key: str = "") -> str:
        clean = Redaction().value(text, key) if self._filter is None else self._filter(text)
        if not isinstance(clean, str):
            raise ConfigError(f"filter: it must return the text to keep, got {clean!r:.200}")
        self.count += clean != text
        return clean
