"""The tools of one rollout: sends the model's tool calls to the servers and converts the results to text of bounded length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from mcp import MCPError, types

from offbook.base.json_files import parse_json
from offbook.base.text import one_line
from offbook_mcp.connection.servers import ROLLOUT_DIR, Limits
from offbook_mcp.connection.session import Session

from .result_values import Structure, structure_of
from .tool import ToolKind
from .toolset import Toolset, with_folder

_WRAPPERS = ("result", "content")
"""Keys under which servers wrap plain text in an object."""


@dataclass(frozen=True)
class ToolResult:
    """A tool's result. The model reads `text`.

    `structured` is the JSON result, if the server sent one. `cut` means that the text exceeded the limit and ends with a
    note about it; `whole` is the text before.
    """

    text: str
    is_error: bool = False
    structured: object = None
    cut: bool = False
    whole: str = field(default="", repr=False)

    @property
    def full_text(self) -> str:
        """The text without a limit."""
        return self.whole if self.cut else self.text

    @cached_property
    def values(self) -> Structure | None:
        """The values in the text without a limit; None if it has none of the known notations."""
        return structure_of(self.full_text)


def as_tool_result(
    result: types.CallToolResult, limit: int, hide: Callable[[str], str] = lambda text: text
) -> ToolResult:
    """Convert an SDK result, cut to `limit` characters.

    The text is the structured content if there is any and no error, else the text blocks joined by newlines. Other blocks
    become a line in brackets; a result with only such blocks is an error. `hide` masks secrets.
    """
    structured = _masked(cast(object, result.structured_content), hide)
    if structured is not None and not result.is_error:
        return _bounded(_structured_text(structured), False, structured, limit)
    texts = [hide(_block_text(block)) for block in result.content]
    refused = bool(result.content) and not any(_has_text(block) for block in result.content)
    return _bounded("\n".join(texts), result.is_error or refused, structured, limit)


def bounded_text(text: str, limit: int, *, is_error: bool = False) -> ToolResult:
    """Convert a text to a result, cut to `limit` characters with a note."""
    return _bounded(text, is_error, None, limit)


def _bounded(text: str, is_error: bool, structured: object, limit: int) -> ToolResult:
    text = text.encode("utf-8", "replace").decode("utf-8")  # tokenizers cannot encode lone surrogates
    if len(text) <= limit:
        return ToolResult(text, is_error, structured)
    note = f"\n[cut here: these are the first {limit:,} of {len(text):,} characters]"
    return ToolResult(text[:limit] + note, is_error, structured, cut=True, whole=text)


def _masked(value: object, hide: Callable[[str], str]) -> object:
    """Mask the secrets in a JSON value's texts and keys. A number that is a secret becomes `***`."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "***" if hide(str(value)) == "***" else value
    if isinstance(value, list):
        return [_masked(item, hide) for item in cast(list[object], value)]
    if isinstance(value, dict):
        return {hide(key): _masked(item, hide) for key, item in cast(dict[str, object], value).items()}
    return value


def _structured_text(value: object) -> str:
    if isinstance(value, dict) and len(cast(dict[str, object], value)) == 1:
        [(key, inner)] = cast(dict[str, object], value).items()
        if key in _WRAPPERS:
            value = inner
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has_text(block: types.ContentBlock) -> bool:
    if isinstance(block, types.EmbeddedResource):
        return isinstance(block.resource, types.TextResourceContents)
    return isinstance(block, types.TextContent | types.ResourceLink)


def _block_text(block: types.ContentBlock) -> str:
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ResourceLink):
        return f"{block.name}: {block.uri}"
    if isinstance(block, types.EmbeddedResource):
        return _contents_text(block.resource)
    kind = "image" if isinstance(block, types.ImageContent) else "audio"
    return _refusal(kind, block.mime_type, len(block.data))


def _contents_text(contents: types.TextResourceContents | types.BlobResourceContents) -> str:
    if isinstance(contents, types.TextResourceContents):
        return contents.text
    return _refusal("binary resource", contents.mime_type, len(contents.blob))


def _refusal(kind: str, mime_type: str | None, base64_length: int) -> str:
    about = ", ".join(part for part in (mime_type, f"{base64_length * 3 // 4:,} bytes") if part)
    return f"[{kind} not shown ({about}): this model reads text only]"


class RolloutTools:
    """The tools of one rollout. Call them from any task of the pool's event loop.

    If any tool of a server may write, this rollout's calls to that server run one after the other, since some servers lose
    parallel writes.
    """

    def __init__(self, toolset: Toolset, sessions: Mapping[str, Session], folder: Path | None, limits: Limits) -> None:
        self.toolset = toolset
        self.sessions = sessions
        self.folder = folder
        self.limits = limits
        writing = {tool.tool.server for tool in toolset.tools if tool.tool.kind is not ToolKind.READ}
        self._locks = {name: asyncio.Lock() for name in writing}

    async def call(self, name: str, arguments: object) -> ToolResult:
        """Run a tool call of the model.

        `arguments` is a dict, or the JSON text that the model wrote. A mistake of the model is a result with `is_error` that
        explains it. Raises McpServerError.
        """
        tool = self.toolset.find(name)
        if tool is None:
            known = ", ".join(known_tool.name for known_tool in self.toolset.tools)
            reason = f" ({self.toolset.left_out[name]})" if name in self.toolset.left_out else ""
            return self._refused(f"there is no tool {one_line(name)!r}{reason}; there are {known}")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}")
            except ValueError as error:
                return self._refused(f"the arguments of {name} are not valid JSON: {error}")
        if not isinstance(arguments, dict):
            return self._refused(f"the arguments of {name} must be an object, not {type(arguments).__name__}")
        chosen = cast(dict[str, object], arguments)
        session = self.sessions[tool.tool.server]
        async with self._locks.get(tool.tool.server, nullcontext()):
            try:
                result = await session.call(
                    tool.tool.name, tool.arguments(chosen, str(self.folder) if self.folder else None)
                )
                return as_tool_result(result, self.limits.result_chars, session.hide)
            except MCPError as error:
                return self._refused(session.hide(error.message))

    def give_up(self, name: str) -> None:
        """Note that the caller stopped waiting for a call: the next rollout gets a new session with the tool's server."""
        if (tool := self.toolset.find(name)) is not None:
            self.sessions[tool.tool.server].give_up()

    def neutral(self, text: str) -> str:
        """Replace this rollout's folder in a text by `{rollout_dir}`, so that the texts of two rollouts can be compared."""
        return text.replace(str(self.folder), ROLLOUT_DIR) if self.folder is not None else text

    def neutral_result(self, result: ToolResult) -> ToolResult:
        """A result with this rollout's folder replaced by `{rollout_dir}`."""
        return replace(result, text=self.neutral(result.text), whole=self.neutral(result.whole))

    def with_folder(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Replace `{rollout_dir}` in a scenario's arguments by this rollout's folder: the inverse of `neutral`."""
        return cast(dict[str, object], with_folder(dict(arguments), str(self.folder) if self.folder else None))

    def _refused(self, text: str) -> ToolResult:
        return bounded_text(text, self.limits.result_chars, is_error=True)
