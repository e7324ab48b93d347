"""Reads tool calls that a policy writes without the marks of its template: small models often answer with the JSON alone, bare
or in a code fence. Such an answer is a call if it begins with an object that names an offered tool."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import regex

from offbook.base.json_files import STRICT_DECODER
from offbook.base.types import Json, Tool

from .tool_calls import CallParser, ToolCall, as_written

_FENCE = r"\s*(?:```(?:json|tool_call)?\s*)?"
_BETWEEN = " \t\r\n,;"
_KEYS = ("arguments", "parameters")


class UntaggedCalls:
    """Passes text on to `parser`, but for an answer that may be calls of the offered tools without marks: that is held back
    until the answer is complete. It goes on to `parser` as well if it is no call, or has more than `most`."""

    def __init__(self, parser: CallParser, tools: Collection[Tool], most: int | None = None) -> None:
        self._parser = parser
        functions = [tool.get("function") for tool in tools]
        self._names = {
            str(cast(dict[str, Json], function).get("name")) for function in functions if isinstance(function, dict)
        }
        self._most = most
        named = "|".join(map(regex.escape, sorted(self._names)))
        self._beginning = regex.compile(rf'{_FENCE}\[?\s*\{{\s*"name"\s*:\s*"(?:{named})"')
        self._named = False
        self._held: str | None = ""
        self.untagged = 0

    @property
    def calls(self) -> int:
        """Number of parsed calls."""
        return self.untagged or self._parser.calls

    @property
    def failures(self) -> int:
        """Number of texts that looked like a call and could not be parsed."""
        return self._parser.failures

    def push(self, text: str) -> list[str | ToolCall]:
        """Add a piece of text, and return the content and calls that are final."""
        if self._held is None:
            return self._parser.push(text)
        self._held += text
        if not self._named:
            match = self._beginning.match(self._held, partial=True)
            if match is None:
                held, self._held = self._held, None
                return self._parser.push(held)
            self._named = not match.partial
        return []

    def finish(self, *, truncated: bool) -> list[str | ToolCall]:
        """End the text, and return what is left. `truncated`: a length limit cut the text, so that it holds no call."""
        held, self._held = self._held, None
        calls = None if truncated or not held else self._read(held)
        if calls is None or (self._most is not None and len(calls) > self._most):
            return [*(self._parser.push(held) if held else []), *self._parser.finish(truncated=truncated)]
        self.untagged = len(calls)
        return list(calls)

    def _read(self, text: str) -> list[ToolCall] | None:
        """The calls that a whole text consists of; None if it is anything else."""
        body = regex.sub(_FENCE, "", text, count=1).strip().removesuffix("```").strip()
        if body.startswith("[") and body.endswith("]"):
            body = body[1:-1].strip()
        calls: list[ToolCall] = []
        while body := body.lstrip(_BETWEEN):
            try:
                value, end = STRICT_DECODER.raw_decode(body)
            except (ValueError, RecursionError):
                return None
            call = self._call(value, body[:end])
            if call is None:
                return None
            calls.append(call)
            body = body[end:]
        return calls or None

    def _call(self, value: object, text: str) -> ToolCall | None:
        fields = cast(dict[str, Json], value) if isinstance(value, dict) else {}
        name, key = fields.get("name"), next((key for key in _KEYS if key in fields), "")
        arguments = fields.get(key)
        if name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(cast(str, name), as_written(text, key, cast(dict[str, object], arguments)))
