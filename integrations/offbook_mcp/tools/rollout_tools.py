"""The tools of one rollout: sends the model's tool calls to the servers and converts the results to text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

from mcp import MCPError

from offbook.base.json_files import parse_json
from offbook.base.text import one_line
from offbook_mcp.connection.servers import ROLLOUT_DIR, Limits
from offbook_mcp.connection.session import Session

from .results import ToolResult, as_tool_result, bounded_text
from .tool import ToolKind
from .toolset import Toolset, with_folder


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
