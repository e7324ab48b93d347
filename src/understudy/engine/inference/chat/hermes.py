"""Tool calls in hermes format, read from text as it comes:
`<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>`.

A block counts as a call when it is closed, or the model ended right after it, and it holds a name and an object of
arguments; anything else stays text, and is counted in `failures`. A closing tag inside the JSON's strings is part of
them. Whole or in pieces, the same text gives the same result.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SPACE = " \t\r\n"
_FIRST = re.compile(r"[^ \t\r\n]")
_BARE = re.compile(r'["{}<]')
_QUOTED = re.compile(r'["\\\x00-\x1f]')


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
        self._block: _Block | None = None

    def push(self, text: str) -> list[str | ToolCall]:
        """Content and calls that are certain after this piece of text."""
        self._buffer += text
        out: list[str | ToolCall] = []
        while self._step(out):
            continue
        if self._block is None:
            sure = len(self._buffer) - _begun(self._buffer)
            if self.calls:  # after a call, space is dropped unless text follows it
                sure = len(self._buffer[:sure].rstrip(_SPACE))
            out += [self._buffer[:sure]] if sure else []
            self._buffer = self._buffer[sure:]
        return out

    def finish(self, *, truncated: bool) -> list[str | ToolCall]:
        """The rest. `truncated`: the text was cut by a length limit, so an open block is no call."""
        out: list[str | ToolCall] = []
        while self._block is not None and self._block.scanning and CLOSE in self._buffer:
            self._block.has_no_object()
            out += self.push("")
        if self._block is None:
            self._content(self._buffer, out)
        elif truncated:
            self.failures += 1
            out.append(OPEN + self._buffer)
        else:
            self._closed(self._buffer, "", out)
        self._buffer, self._block = "", None
        return out

    def _step(self, out: list[str | ToolCall]) -> bool:
        """Read up to the next tag; False when it is not there yet."""
        if self._block is None:
            content, tag, rest = self._buffer.partition(OPEN)
            if not tag:
                return False
            self._content(content, out)
            self._block = _Block()
        else:
            end = self._block.closing(self._buffer)
            if end < 0:
                return False
            self._closed(self._buffer[:end], CLOSE, out)
            rest = self._buffer[end + len(CLOSE) :]
            self._block = None
        self._buffer = rest
        return True

    def _content(self, text: str, out: list[str | ToolCall]) -> None:
        if self.calls:
            text = text.rstrip(_SPACE)
        if text:
            out.append(text)

    def _closed(self, body: str, close: str, out: list[str | ToolCall]) -> None:
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


class _Block:
    """Finds the tag that closes a block: the first one after its JSON object, or the first one where there is no object.

    It is given the block's text as it grows, and looks at each character once. `scanning`: the object's end is not found.
    """

    def __init__(self) -> None:
        self._at: int = 0
        self._start: int = 0
        self._depth = 0
        self._quoted = False
        self.scanning = True

    def closing(self, text: str) -> int:
        """Where the closing tag is; -1 while it is not there."""
        while self.scanning:
            pattern = _QUOTED if self._quoted else _BARE if self._depth else _FIRST
            found = pattern.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text))
                return -1
            self._at = found.end()
            self._take(found.group(), text)
        end = text.find(CLOSE, self._at)
        if end < 0:
            self._at = max(self._at, len(text) - len(CLOSE) + 1)
        return end

    def has_no_object(self) -> None:
        """What began as JSON is none, so that its quotes mean nothing."""
        self.scanning, self._at = False, 0

    def _take(self, character: str, text: str) -> None:
        match character:
            case '"' if self._depth:
                self._quoted = not self._quoted
            case "\\" if self._quoted:
                self._at += 1  # the next character is escaped; it may not be here yet
            case "{":
                self._start = self._start if self._depth else self._at - 1
                self._depth += 1
            case "}" if self._depth:
                self._depth -= 1
                if not self._depth:
                    self.scanning = False
                    if not _is_json(text, self._start):
                        self.has_no_object()
            case _:
                self.has_no_object()


def _is_json(text: str, start: int) -> bool:
    try:
        json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return False
    return True


def parse_call(body: str) -> ToolCall | None:
    """What stands between the tags, or None when it is no call. Arguments encoded twice are unwrapped once."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # JSON
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        try:
            return ToolCall(name, arguments) if isinstance(json.loads(arguments), dict) else None
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, as_written(body, "arguments", arguments))  # pyright: ignore[reportUnknownArgumentType]  # JSON


def as_written(body: str, key: str, arguments: dict[str, object]) -> str:
    """The text of the arguments under `key` inside `body`: exact where it can be found, else dumped again."""
    for match in re.finditer(rf'"{key}"\s*:\s*', body):
        try:
            value, end = json.JSONDecoder().raw_decode(body, match.end())
        except ValueError:
            continue  # the key inside a string: look further
        if value == arguments:
            return body[match.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


def _begun(text: str) -> int:
    """How many last characters may be the beginning of an opening tag."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-size:]):
            return size
    return 0
