"""Parses tool calls in hermes format from a stream of text:
`<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>`.

A block is a call if it contains a name and an object of arguments, and is closed or followed by the model's end token. Any
other block stays text and is counted in `failures`. A closing tag inside a JSON string does not close the block. How the
text is divided into pieces does not affect the result.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from offbook.base.json_files import STRICT_DECODER

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SPACE = " \t\r\n"
_FIRST = re.compile(r"[^ \t\r\n]")
_BARE = re.compile(r'["{}<]')
_QUOTED = re.compile(r'["\\\x00-\x1f]')


@dataclass(frozen=True)
class ToolCall:
    """A parsed call. `arguments` is the JSON of an object, exactly as the model wrote it."""

    name: str
    arguments: str


class HermesParser:
    """Splits text into content and tool calls. After `most` calls, further ones stay text.

    >>> parser = HermesParser()
    >>> parser.push('Let me look. <tool_call>{"name": "find", "argu')
    ['Let me look. ']
    >>> parser.push('ments": {"id": 7}}</tool_call>')
    [ToolCall(name='find', arguments='{"id": 7}')]
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.calls = 0
        self.failures = 0
        self._buffer = ""
        self._block: _Block | None = None

    def push(self, text: str) -> list[str | ToolCall]:
        """Add a piece of text, and return the content and calls that are final."""
        self._buffer += text
        out: list[str | ToolCall] = []
        while self._step(out):
            continue
        if self._block is None:
            final = len(self._buffer) - _partial_tag(self._buffer)
            if self.calls:  # white space after a call is dropped unless text follows
                final = len(self._buffer[:final].rstrip(_SPACE))
            out += [self._buffer[:final]] if final else []
            self._buffer = self._buffer[final:]
        return out

    def finish(self, *, truncated: bool) -> list[str | ToolCall]:
        """End the text, and return what is left. `truncated`: a length limit cut the text, so an open block is not a call."""
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
        """Read up to the next tag. False if the buffer does not contain it yet."""
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
    """Finds the tag that closes a block: the first one after its JSON object, or the first one if it has no object.

    Receives the growing text of the block, and reads each character once. `scanning`: the object's end is not known yet.
    """

    def __init__(self) -> None:
        self._at: int = 0
        self._start: int = 0
        self._depth = 0
        self._quoted = False
        self.scanning = True

    def closing(self, text: str) -> int:
        """The index of the closing tag; -1 if it is not known yet."""
        while self.scanning:
            pattern = _QUOTED if self._quoted else _BARE if self._depth else _FIRST
            match = pattern.search(text, self._at)
            if match is None:
                self._at = max(self._at, len(text))
                return -1
            self._at = match.end()
            self._take(match.group(), text)
        end = text.find(CLOSE, self._at)
        if end < 0:
            self._at = max(self._at, len(text) - len(CLOSE) + 1)
        return end

    def has_no_object(self) -> None:
        """Note that the block does not contain JSON, so that quotes in it have no meaning."""
        self.scanning, self._at = False, 0

    def _take(self, character: str, text: str) -> None:
        match character:
            case '"' if self._depth:
                self._quoted = not self._quoted
            case "\\" if self._quoted:
                self._at += 1  # skip the escaped character, even if it has not arrived yet
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
        STRICT_DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return False
    return True


def parse_call(body: str) -> ToolCall | None:
    """Parse the text between the tags; None if it is not a call. Arguments that are a JSON string are decoded once.

    >>> parse_call('{"name": "find", "arguments": {"id": 7}}')
    ToolCall(name='find', arguments='{"id": 7}')
    """
    try:
        value = STRICT_DECODER.decode(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # JSON
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        try:
            return ToolCall(name, arguments) if isinstance(STRICT_DECODER.decode(arguments), dict) else None
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, as_written(body, "arguments", arguments))  # pyright: ignore[reportUnknownArgumentType]  # JSON


def as_written(body: str, key: str, arguments: dict[str, object]) -> str:
    """The original text of the arguments under `key` in `body`; if it cannot be located, their JSON encoded again."""
    for match in re.finditer(rf'"{key}"\s*:\s*', body):
        try:
            value, end = STRICT_DECODER.raw_decode(body, match.end())
        except ValueError:
            continue  # this is not the key but part of a string
        if value == arguments:
            return body[match.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


def _partial_tag(text: str) -> int:
    """Number of last characters that could be the beginning of an opening tag."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-size:]):
            return size
    return 0
