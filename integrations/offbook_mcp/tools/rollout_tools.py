"""The tools of one rollout: sends the model's tool calls to the servers and converts the results to text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from mcp import Client, MCPError

from offbook.base.json_files import parse_json
from offbook.base.text import one_line
from offbook_mcp.connection.limits import Limits
from offbook_mcp.connection.servers import ROLLOUT_DIR
from offbook_mcp.connection.session import Session

from .results import ToolResult, as_tool_result, bounded_text, resource_text
from .tool import ToolKind
from .toolset import ModelTool, Toolset, with_folder


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
            return self._refused(f"there is no tool {one_line(name)!r}; there are {known}")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}")
            except ValueError as error:
                return self._refused(f"the arguments of {name} are not valid JSON: {error}")
        if not isinstance(arguments, dict):
            return self._refused(f"the arguments of {name} must be an object, not {type(arguments).__name__}")
        chosen = cast(dict[str, object], arguments)
        async with self._in_turn(tool.tool.server):
            try:
                return await self._answer(tool, tool.arguments(chosen, str(self.folder) if self.folder else None))
            except MCPError as error:
                text = self.sessions[tool.tool.server].hide(error.message)
                return bounded_text(text, self.limits.result_chars, is_error=True)

    def give_up(self, name: str) -> None:
        """Note that the caller stopped waiting for a call: the next rollout gets a new session with the tool's server."""
        if (tool := self.toolset.find(name)) is not None:
            self.sessions[tool.tool.server].give_up()

    def neutral(self, text: str) -> str:
        """Replace this rollout's folder in a text by `{rollout_dir}`, so that the texts of two rollouts can be compared."""
        return text.replace(str(self.folder), ROLLOUT_DIR) if self.folder is not None else text

    def with_folder(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Replace `{rollout_dir}` in a scenario's arguments by this rollout's folder: the inverse of `neutral`."""
        return cast(dict[str, object], with_folder(dict(arguments), str(self.folder) if self.folder else None))

    @asynccontextmanager
    async def _in_turn(self, server: str) -> AsyncGenerator[None]:
        if server not in self._locks:
            yield
            return
        async with self._locks[server]:
            yield

    def _refused(self, text: str) -> ToolResult:
        return bounded_text(text, self.limits.result_chars, is_error=True)

    async def _answer(self, tool: ModelTool, arguments: dict[str, object]) -> ToolResult:
        session = self.sessions[tool.tool.server]
        if tool.request == "tool":
            return as_tool_result(await session.call(tool.tool.name, arguments), self.limits.result_chars, session.hide)
        if tool.request == "read_resource":
            uri = str(arguments.get("uri", ""))
            read = await session.ask(f"reading {uri!r}", lambda client: client.read_resource(uri))
            return resource_text(read.contents, self.limits.result_chars, session.hide)
        if tool.request == "get_prompt":
            prompt = str(arguments.get("name", ""))
            values = {key: str(value) for key, value in _mapping(arguments.get("arguments")).items()}
            text = await session.ask(f"the prompt {prompt!r}", lambda client: _prompt_text(client, prompt, values))
            return bounded_text(session.hide(text), self.limits.result_chars)
        listing = _resource_lines if tool.request == "list_resources" else _prompt_lines
        lines = await session.ask(f"the request {tool.request}", listing)
        return bounded_text(session.hide("\n".join(lines)) or "there are none", self.limits.result_chars)


def _mapping(value: object) -> dict[str, object]:
    return cast(dict[str, object], value) if isinstance(value, dict) else {}


async def _prompt_text(client: Client, name: str, arguments: dict[str, str]) -> str:
    prompt = await client.get_prompt(name, arguments)
    return "\n".join(f"{message.role}: {getattr(message.content, 'text', '[no text]')}" for message in prompt.messages)


async def _resource_lines(client: Client) -> list[str]:
    """One line per resource, then per resource template; the first page of each."""
    resources = (await client.list_resources()).resources
    templates = (await client.list_resource_templates()).resource_templates
    return [_line(item.uri, item.name, item.description) for item in resources] + [
        _line(item.uri_template, item.name, item.description) for item in templates
    ]


async def _prompt_lines(client: Client) -> list[str]:
    prompts = (await client.list_prompts()).prompts
    return [
        _line(
            f"{prompt.name}({', '.join(argument.name for argument in prompt.arguments or ())})",
            None,
            prompt.description,
        )
        for prompt in prompts
    ]


def _line(what: str, name: str | None, description: str | None) -> str:
    about = ": ".join(part for part in (name, description) if part)
    return f"{what} - {about}" if about else what
