"""Tools as a server lists them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from mcp import types

from offbook.base.errors import ConfigError
from offbook_mcp.connection.servers import ROLLOUT_DIR

from .effects import ToolKind, suggested_kind

Schema = dict[str, object]


@dataclass(frozen=True)
class ServerTool:
    """One tool of one server, under the server's own name."""

    server: str
    name: str
    description: str
    input_schema: Schema = field(hash=False)
    output_schema: Schema | None = field(default=None, hash=False)
    kind: ToolKind = ToolKind.UNKNOWN
    read_only: bool = False  # its annotation or the user says so; `kind` may also come from its words
    open_world: bool = False  # depends on the outside world, so its results change over time
    needs_task: bool = False  # can only be called as an MCP task, which is not supported

    @property
    def properties(self) -> Mapping[str, object]:
        """The schemas of the tool's arguments, by name."""
        properties = self.input_schema.get("properties")
        return cast(dict[str, object], properties) if isinstance(properties, dict) else {}


@dataclass(frozen=True)
class ServerDescription:
    """A server's identity and offers, as it reported them at the start."""

    name: str
    title: str | None
    version: str | None
    protocol: str
    tools: tuple[ServerTool, ...]
    resources: bool
    instructions: str | None = None
    faulty: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # what is wrong, by unusable tool

    @property
    def read_only(self) -> bool:
        """Whether annotations or the user say that every tool only reads, so that rollouts can share the server."""
        return all(tool.read_only for tool in self.tools)


def as_server_tool(server: str, tool: types.Tool, *, read_only: bool = False) -> ServerTool:
    """Convert a tool of the SDK. `read_only`: the user says that all tools of the server only read."""
    hints = tool.annotations
    execution = tool.execution
    description = tool.description or tool.title or ""
    return ServerTool(
        server=server,
        name=tool.name,
        description=description,
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        kind=ToolKind.READ if read_only else suggested_kind(tool.name, description, hints),
        read_only=read_only or bool(hints and hints.read_only_hint),
        open_world=bool(hints and hints.open_world_hint),
        needs_task=bool(execution and execution.task_support == "required"),
    )


def named(tools: Mapping[str, ServerTool], wanted: Iterable[str], option: str) -> frozenset[str]:
    """The names, as the model has them, of the tools that an option names. `tools` has the tools by these names.

    The option may say `tool`, `server.tool`, or the model's `shop_search`. Raises ConfigError for an unknown name.
    """
    spellings = {name: {name, tool.name, f"{tool.server}.{tool.name}"} for name, tool in tools.items()}
    wanted = set(wanted)
    if unknown := wanted.difference(*spellings.values()):
        raise ConfigError(f"{option}: there is no tool {min(unknown)!r}; the tools are {', '.join(tools)}")
    return frozenset(name for name, known in spellings.items() if known & wanted)


def signature(tool: ServerTool, folder: str | None = None) -> str:
    """The parts of a tool that callers depend on, as one text: name, description and input schema.

    The rollout's `folder`, which some servers put into descriptions, is replaced by its placeholder.
    """
    text = json.dumps([tool.name, tool.description, tool.input_schema], sort_keys=True)
    return text if folder is None else text.replace(json.dumps(folder)[1:-1], ROLLOUT_DIR)


def fingerprint(servers: Iterable[ServerDescription], folder: str | None = None) -> str:
    """A hash of the servers' names, versions and tool signatures: 16 hex digits of a SHA-256."""
    facts = [[server.title, server.version, [signature(tool, folder) for tool in server.tools]] for server in servers]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
