"""Parses tool calls in the formats of model families: hermes' tags, Llama 3's plain JSON, and Mistral's mark.

Hermes: `<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>`. A block is a call if it contains a name and an object
of arguments, and is closed or followed by the model's end token. Any other block stays text and is counted in `failures`. A
closing tag inside a JSON string does not close the block. How the text is divided into pieces does not affect the result.

In the formats of Llama and Mistral the calls end the answer, so their text is held back until the answer is complete.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from offbook.base.json_files import STRICT_DECODER
from offbook.base.types import Json

from .families import parsers

logger = logging.getLogger(__name__)
OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SPACE = " \t\r\n"
_FIRST = re.compile(r"[^ \t\r\n]")
_BARE = re.compile(r'["{}<]')
_QUOTED = re.compile(r'["\\\x00-\x1f]')
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
"""The name before the arguments, in Mistral's later formats."""
_BETWEEN = " \t\r\n;"


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
            final = len(self._buffer) - _partial_mark(self._buffer, OPEN)
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
        self._position: int = 0
        self._start: int = 0
        self._depth = 0
        self._quoted = False
        self.scanning = True

    def closing(self, text: str) -> int:
        """The index of the closing tag; -1 if it is not known yet."""
        while self.scanning:
            pattern = _QUOTED if self._quoted else _BARE if self._depth else _FIRST
            match = pattern.search(text, self._position)
            if match is None:
                self._position = max(self._position, len(text))
                return -1
            self._position = match.end()
            self._take(match.group(), text)
        end = text.find(CLOSE, self._position)
        if end < 0:
            self._position = max(self._position, len(text) - len(CLOSE) + 1)
        return end

    def has_no_object(self) -> None:
        """Note that the block does not contain JSON, so that quotes in it have no meaning."""
        self.scanning, self._position = False, 0

    def _take(self, character: str, text: str) -> None:
        match character:
            case '"' if self._depth:
                self._quoted = not self._quoted
            case "\\" if self._quoted:
                self._position += 1  # skip the escaped character, even if it has not arrived yet
            case "{":
                self._start = self._start if self._depth else self._position - 1
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


ParsedCall = tuple[ToolCall, str]
"""A call, and the text from which it was parsed."""


class CallParser(Protocol):
    """Splits a stream of text into content and tool calls."""

    @property
    def calls(self) -> int:
        """Number of parsed calls."""
        ...

    @property
    def failures(self) -> int:
        """Number of texts that looked like a call and could not be parsed."""
        ...

    def push(self, text: str) -> list[str | ToolCall]:
        """Add a piece of text, and return the content and calls that are final."""
        ...

    def finish(self, *, truncated: bool) -> list[str | ToolCall]:
        """End the text, and return what is left. `truncated`: a length limit cut the text."""
        ...


@dataclass(frozen=True)
class CallFormat:
    """The format of a model family. `marks` are tokens of calls, which must stay in the text even if they are special.

    `parser` takes the maximal number of calls, None for no limit.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[int | None], CallParser]
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"


class EndingCalls:
    """Parses calls at the end of an answer. They begin with `mark`, or with `opening` at the answer's first character.

    `read` parses their text. It stays text if `read` returns None, and so do calls after the first `most`.
    """

    def __init__(
        self, mark: str, opening: str | None, read: Callable[[str], list[ParsedCall] | None], most: int | None = None
    ) -> None:
        self._mark, self._opening, self._read, self._most = mark, opening, read, most
        self.calls = 0
        self.failures = 0
        self._buffer = ""
        self._shown = False
        self._inside = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Add a piece of text, and return the content that is final."""
        self._buffer += text
        if self._inside:
            return []
        start = self._buffer.lstrip()
        if self._opening is not None and not self._shown:
            if not start:
                return []
            self._inside = start.startswith(self._opening)
        end = 0 if self._inside else self._buffer.find(self._mark)
        if end < 0:
            end = len(self._buffer) - _partial_mark(self._buffer, self._mark)
        else:
            self._inside = True
        content, self._buffer = self._buffer[:end], self._buffer[end:]
        self._shown |= bool(content)
        return [content] if content else []

    def finish(self, *, truncated: bool) -> list[str | ToolCall]:
        """End the text, and return what is left. If a length limit truncated the text, it contains no call."""
        rest, self._buffer = self._buffer, ""
        parsed = self._read(rest) if self._inside and not truncated else None
        if not parsed:
            self.failures += self._inside and (self._mark in rest or '"name"' in rest)
            return [rest] if rest else []
        accepted, remaining = parsed[: self._most], "".join(text for _, text in parsed[self._most :] if self._most)
        self.calls = len(accepted)
        return [*(call for call, _ in accepted), *([remaining] if remaining else [])]


def read_llama(text: str) -> list[ParsedCall] | None:
    """Parse `{"name": "f", "parameters": {...}}`, or several, separated by semicolons; None for any other text.

    >>> read_llama('{"name": "find", "parameters": {"id": 7}}')
    [(ToolCall(name='find', arguments='{"id": 7}'), '{"name": "find", "parameters": {"id": 7}}')]
    """
    body = text.strip(_BETWEEN).removeprefix(PYTHON_TAG)
    parsed: list[ParsedCall] = []
    while body := body.lstrip(_BETWEEN):
        part = _object(body)
        if part is None:
            return None
        call = _call(*part, "parameters") or _call(*part, "arguments")
        if call is None:
            return None
        parsed.append((call, part[1]))
        body = body[len(part[1]) :]
    return parsed


def read_mistral(text: str) -> list[ParsedCall] | None:
    """Parse `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, or one or more `[TOOL_CALLS]f[ARGS]{...}`.

    None for any other text.

    >>> read_mistral('[TOOL_CALLS]find[ARGS]{"id": 7}')
    [(ToolCall(name='find', arguments='{"id": 7}'), '[TOOL_CALLS]find[ARGS]{"id": 7}')]
    """
    parsed: list[ParsedCall] = []
    for body in text.split(TOOL_CALLS)[1:]:
        calls = _listed(body) if body.lstrip().startswith("[") else _named(body)
        if calls is None:
            return None
        parsed += calls
    return parsed


def _listed(body: str) -> list[ParsedCall] | None:
    try:
        whole = STRICT_DECODER.decode(body)
    except (ValueError, RecursionError):
        return None
    parsed: list[ParsedCall] = []
    end = body.index("[") + 1
    for value in cast(list[Json], whole):
        if not isinstance(value, dict):
            return None
        start = body.index("{", end)
        _, end = json.JSONDecoder().raw_decode(body, start)
        call = _call(cast(dict[str, Json], value), body[start:end], "arguments")
        if call is None:
            return None
        parsed.append((call, f"{TOOL_CALLS} [{json.dumps(value, ensure_ascii=False)}]"))
    return parsed


def _named(body: str) -> list[ParsedCall] | None:
    name = _NAMED.match(body)
    part = _object(body[name.end() :]) if name else None
    if name is None or part is None or body[name.end() + len(part[1]) :].strip():
        return None
    return [(ToolCall(name.group(1), part[1]), TOOL_CALLS + body)]


def _object(text: str) -> tuple[dict[str, Json], str] | None:
    try:
        value, end = STRICT_DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return (cast(dict[str, Json], value), text[:end]) if isinstance(value, dict) else None


def _call(value: dict[str, Json], text: str, key: str) -> ToolCall | None:
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, as_written(text, key, cast(dict[str, object], arguments)))


def _partial_mark(text: str, mark: str) -> int:
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


HERMES = CallFormat("hermes", (OPEN, CLOSE), HermesParser)
_FORMATS = {
    "hermes": HERMES,
    "llama3_json": CallFormat(
        "llama3_json", (PYTHON_TAG,), lambda most: EndingCalls(PYTHON_TAG, "{", read_llama, most)
    ),
    "mistral": CallFormat(
        "mistral",
        (TOOL_CALLS, "[ARGS]", "[CALL_ID]"),
        lambda most: EndingCalls(TOOL_CALLS, None, read_mistral, most),
        lambda: uuid.uuid4().hex[:9],  # Mistral's templates reject any other length
    ),
}
"""Name of vLLM's parser -> format."""
MARKS = frozenset(mark for calls in _FORMATS.values() for mark in calls.marks)
"""The tokens of calls in all formats."""


def format_of(folder: Path) -> CallFormat:
    """The format of the model in a folder. For a format that is not supported here, logs a warning and returns hermes."""
    name = parsers(folder).tool_call
    if name is not None and name not in _FORMATS:
        logger.warning(
            "tool calls in the format %s are not parsed by this engine and stay text: use --engine vllm", name
        )
    return _FORMATS.get(name or "hermes", HERMES)
