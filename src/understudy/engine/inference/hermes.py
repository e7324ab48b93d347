"""Tool calls in hermes format, read from text as it comes:
`<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>`.

A block counts as a call when it is closed, or the model ended right after it, and it holds a name and an object of
arguments; anything else stays text, and is counted in `failures`. Whole or in pieces, the same text gives the same
result.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class ToolCall:
    """One parsed call. `arguments` is the JSON text of an object, as the model wrote it."""

    name: str
    arguments: str


class HermesParser:
    """Splits text into content and tool calls; calls beyond `most` stay text."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.calls = 0
        self.failures = 0
        self._buffer = ""
        self._inside = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Content and calls that are certain after this piece of text."""
        self._buffer += text
        out: list[str | ToolCall] = []
        while (self._inside and CLOSE in self._buffer) or (not self._inside and OPEN in self._buffer):
            if self._inside:
                body, _, self._buffer = self._buffer.partition(CLOSE)
                self._block(body, CLOSE, out)
            else:
                content, _, self._buffer = self._buffer.partition(OPEN)
                self._content(content, out)
            self._inside = not self._inside
        if not self._inside:
            sure = len(self._buffer) - _begun(self._buffer)
            if self.calls:  # after a call, space is dropped unless text follows it
                sure = len(self._buffer[:sure].rstrip(_SPACE))
            out += [self._buffer[:sure]] if sure else []
            self._buffer = self._buffer[sure:]
        return out

    def finish(self, *, truncated: bool) -> list[str | ToolCall]:
        """The rest. `truncated`: the text was cut by a length limit, so an open block is no call."""
        out: list[str | ToolCall] = []
        if not self._inside:
            self._content(self._buffer, out)
        elif truncated:
            self.failures += 1
            out.append(OPEN + self._buffer)
        else:
            self._block(self._buffer, "", out)
        self._buffer, self._inside = "", False
        return out

    def _content(self, text: str, out: list[str | ToolCall]) -> None:
        if self.calls:
            text = text.rstrip(_SPACE)
        if text:
            out.append(text)

    def _block(self, body: str, close: str, out: list[str | ToolCall]) -> None:
        if self.calls == self._most:
            out.append(OPEN + body + close)
            return
        call = parse_call(body)
        if call is None:
            self.failures += 1
            out.append(OPEN + body + close)
        else:
            self.calls += 1
            out.append(call)


def parse_call(body: str) -> ToolCall | None:
    """What stands between the tags, or None when it is no call. Arguments encoded twice are unwrapped once."""
    try:
        value = json.loads(body)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # JSON
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        try:
            return ToolCall(name, arguments) if isinstance(json.loads(arguments), dict) else None
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, _as_written(body, arguments))  # pyright: ignore[reportUnknownArgumentType]  # JSON


def _as_written(body: str, arguments: dict[str, object]) -> str:
    """The text of the arguments inside `body`: exact where it can be found, else dumped again."""
    for match in _ARGUMENTS.finditer(body):
        try:
            value, end = json.JSONDecoder().raw_decode(body, match.end())
        except ValueError:
            continue  # "arguments" inside a string: look further
        if value == arguments:
            return body[match.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


def _begun(text: str) -> int:
    """How many last characters may be the beginning of an opening tag."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-size:]):
            return size
    return 0
