"""How a model family writes tool calls: hermes' tags, Llama 3's bare JSON, Mistral's mark; and who reads them.

Llama's and Mistral's calls end an answer, so everything from their beginning on is held back until the answer is over.
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

from ....types import Json
from .families import parsers
from .hermes import CLOSE, OPEN, HermesParser, ToolCall, as_written

_log = logging.getLogger("understudy.sampler")
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
"""Before the arguments, in Mistral's later formats."""
_BETWEEN = " \t\r\n;"

Found = tuple[ToolCall, str]
"""A call, and the text that it was read from."""


class CallParser(Protocol):
    """Splits text, as it comes, into content and tool calls. `failures`: what looked like a call and was none."""

    calls: int
    failures: int

    def push(self, text: str) -> list[str | ToolCall]: ...
    def finish(self, *, truncated: bool) -> list[str | ToolCall]: ...


@dataclass(frozen=True)
class CallFormat:
    """A family's format. `marks`: tokens that are part of calls, also where the tokenizer calls them special."""

    name: str
    marks: tuple[str, ...]
    parser: Callable[[int | None], CallParser]
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"


class EndingCalls:
    """Reads calls that begin with `mark`, or with `opening` at the very start, and go on to the end of the answer.

    What `read` cannot read whole stays text, and so do calls beyond `most`.
    """

    def __init__(
        self, mark: str, opening: str | None, read: Callable[[str], list[Found] | None], most: int | None = None
    ) -> None:
        self._mark, self._opening, self._read, self._most = mark, opening, read, most
        self.calls = 0
        self.failures = 0
        self._buffer = ""
        self._shown = False
        self._inside = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Content that is certain after this piece of text."""
        self._buffer += text
        if self._inside:
            return []
        start = self._buffer.lstrip()
        if self._opening is not None and not self._shown:
            if not start:
                return []
            self._inside = start.startswith(self._opening)
        sure = 0 if self._inside else self._buffer.find(self._mark)
        if sure < 0:
            sure = len(self._buffer) - _begun(self._buffer, self._mark)
        else:
            self._inside = True
        content, self._buffer = self._buffer[:sure], self._buffer[sure:]
        self._shown |= bool(content)
        return [content] if content else []

    def finish(self, *, truncated: bool) -> list[str | ToolCall]:
        """The rest. `truncated`: the text was cut by a length limit, so what is held back is no call."""
        rest, self._buffer = self._buffer, ""
        found = self._read(rest) if self._inside and not truncated else None
        if not found:
            self.failures += self._inside and (self._mark in rest or '"name"' in rest)
            return [rest] if rest else []
        taken, left = found[: self._most], "".join(text for _, text in found[self._most :] if self._most)
        self.calls = len(taken)
        return [*(call for call, _ in taken), *([left] if left else [])]


def read_llama(text: str) -> list[Found] | None:
    """`{"name": "f", "parameters": {...}}`, several with semicolons between; None when anything else is there."""
    body = text.strip(_BETWEEN).removeprefix(PYTHON_TAG)
    found: list[Found] = []
    while body := body.lstrip(_BETWEEN):
        part = _object(body)
        if part is None:
            return None
        call = _call(*part, "parameters") or _call(*part, "arguments")
        if call is None:
            return None
        found.append((call, part[1]))
        body = body[len(part[1]) :]
    return found


def read_mistral(text: str) -> list[Found] | None:
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` each; None for anything else."""
    found: list[Found] = []
    for body in text.split(TOOL_CALLS)[1:]:
        calls = _listed(body) if body.lstrip().startswith("[") else _named(body)
        if calls is None:
            return None
        found += calls
    return found


def _listed(body: str) -> list[Found] | None:
    try:
        whole = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found: list[Found] = []
    for value in cast(list[Json], whole):
        text = json.dumps(value, ensure_ascii=False)
        call = _call(cast(dict[str, Json], value), body, "arguments") if isinstance(value, dict) else None
        if call is None:
            return None
        found.append((call, f"{TOOL_CALLS} [{text}]"))
    return found


def _named(body: str) -> list[Found] | None:
    name = _NAMED.match(body)
    part = _object(body[name.end() :]) if name else None
    if name is None or part is None or body[name.end() + len(part[1]) :].strip():
        return None
    return [(ToolCall(name.group(1), part[1]), TOOL_CALLS + body)]


def _object(text: str) -> tuple[dict[str, Json], str] | None:
    """The JSON object that the text begins with, and its own text."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return (cast(dict[str, Json], value), text[:end]) if isinstance(value, dict) else None


def _call(value: dict[str, Json], text: str, key: str) -> ToolCall | None:
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, as_written(text, key, cast(dict[str, object], arguments)))


def _begun(text: str, mark: str) -> int:
    """How many last characters may be the beginning of the mark."""
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
        lambda: uuid.uuid4().hex[:9],  # Mistral's templates refuse any other length
    ),
}
"""By the name of vLLM's parser for the same format."""


def format_of(folder: Path) -> CallFormat:
    """The format of the model in a folder; hermes, and a line in the log, where the family's own is not read here."""
    name = parsers(folder).tool_call
    if name is not None and name not in _FORMATS:
        _log.warning("tool calls in the format %s are not read by this engine and stay text: use --engine vllm", name)
    return _FORMATS.get(name or "hermes", HERMES)
