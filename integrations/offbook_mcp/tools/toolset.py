"""The tools that the model sees, and the server requests behind them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast

from anyascii import anyascii

from offbook.base.errors import ConfigError
from offbook.base.text import one_line
from offbook.base.types import Tool
from offbook_mcp.connection.servers import ROLLOUT_DIR

from .effects import ToolKind
from .schemas import simplified
from .tool import Schema, ServerDescription, ServerTool, named

_LONGEST_NAME = 64
_LONGEST_DESCRIPTION = 8_000
DENIED = "denied before; --allow TOOL permits it again"

Request: TypeAlias = Literal["tool", "list_resources", "read_resource", "list_prompts", "get_prompt"]
"""The MCP request that a call of a model's tool sends."""


@dataclass(frozen=True)
class ModelTool:
    """A tool with the name and arguments that the model sees. `bound` has the values of its hidden arguments."""

    name: str
    tool: ServerTool
    parameters: Schema = field(hash=False)
    bound: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    request: Request = "tool"

    def function(self) -> Tool:
        """The tool in OpenAI's format."""
        about = {"name": self.name, "description": self.tool.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def arguments(self, chosen: Mapping[str, object], folder: str | None) -> dict[str, object]:
        """The arguments for the server: the model's and the bound ones, which take precedence."""
        return {**chosen, **{name: with_folder(value, folder) for name, value in self.bound.items()}}


@dataclass(frozen=True)
class Toolset:
    """The model's tools in the servers' order.

    `changes` has a line for everything renamed or removed, `left_out` the reason by tool that is not offered at all.
    """

    tools: tuple[ModelTool, ...]
    changes: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def functions(self) -> list[Tool]:
        """The tools in OpenAI's format, for a request's `tools`."""
        return [tool.function() for tool in self.tools]

    def find(self, name: str) -> ModelTool | None:
        """The tool of this name; None if there is none."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def named(self, wanted: Iterable[str], option: str) -> frozenset[str]:
        """The names of the tools that an option names. Raises ConfigError for an unknown one."""
        return named({tool.name: tool.tool for tool in self.tools}, wanted, option)

    def decided(self, decisions: Mapping[str, bool]) -> Toolset:
        """Apply decisions by name: True allows calling a tool, and one of unknown kind then counts as reading; False leaves
        the tool out. Raises ConfigError if none is left."""
        kept = tuple(
            replace(tool, tool=_allowed(tool.tool)) if tool.name in decisions else tool
            for tool in self.tools
            if decisions.get(tool.name, True)
        )
        denied = {tool.name: DENIED for tool in self.tools if not decisions.get(tool.name, True)}
        if not kept:
            raise ConfigError(f"no tools: {', '.join(denied)} may not be called ({DENIED})")
        return replace(self, tools=kept, left_out={**self.left_out, **denied})

    def shown(self, expected: Iterable[str], max_tools: int | None, seed: int) -> Toolset:
        """At most `max_tools` of the tools, in the same order; None keeps all.

        The expected tools are always included; others are drawn with `seed`. Raises ConfigError for an expected tool that
        does not exist, or for more expected tools than `max_tools`.
        """
        if max_tools is None:
            return self
        names = set(expected)
        if missing := names - {tool.name for tool in self.tools}:
            raise ConfigError(f"expected: there is no tool {min(missing)!r}")
        if len(names) > max_tools:
            raise ConfigError(f"max_tools: {len(names)} tools are expected, {max_tools} may be shown")
        others = [tool.name for tool in self.tools if tool.name not in names]
        names |= set(random.Random(seed).sample(others, min(len(others), max_tools - len(names))))
        return replace(self, tools=tuple(tool for tool in self.tools if tool.name in names))


def make_toolset(
    servers: Iterable[ServerDescription],
    *,
    only: Iterable[str] = (),
    bind: Mapping[str, object] | None = None,
    resources: bool = False,
    prompts: bool = False,
) -> Toolset:
    """Convert the tools of these servers. Raises ConfigError for an unknown name in `only` or `bind`, or if there is no tool."""
    servers = tuple(servers)
    changes: list[str] = []
    all_tools = [tool for server in servers for tool in server.tools]
    by_name = dict(zip(_names(all_tools, []), all_tools, strict=True))
    chosen = named(by_name, only, "only") or frozenset(by_name)
    left_out = _unusable(servers)
    left_out |= {
        name: "it can only run as a task" for name, tool in by_name.items() if tool.needs_task and name in chosen
    }
    listed = [tool for name, tool in by_name.items() if name in chosen and not tool.needs_task]
    offered: list[tuple[ServerTool, Request]] = [(tool, "tool") for tool in listed]
    for server in servers:
        offered += _resource_tools(server) if resources and server.resources else []
        offered += _prompt_tools(server) if prompts and server.prompts else []
    if not offered:
        names = ", ".join(server.name for server in servers)
        reasons = "".join(f"; {name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"no tools: {names} offers none that can be called{reasons}")
    bindings = _Bindings(bind or {})
    tools: list[ModelTool] = []
    for (tool, request), name in zip(offered, _names([tool for tool, _ in offered], changes), strict=True):
        simple = simplified(tool.input_schema)
        changes += [f"{name}: {change}" for change in simple.changes]
        bound = bindings.of(tool)
        about = replace(tool, description=tool.description[:_LONGEST_DESCRIPTION])
        tools.append(ModelTool(name, about, _hidden(simple.parameters, bound), bound, request))
    bindings.check_used([tool for tool, _ in offered])
    return Toolset(tuple(tools), tuple(changes), left_out)


def _unusable(servers: Iterable[ServerDescription]) -> dict[str, str]:
    """The tools that the servers list with a faulty definition, and what is wrong with it."""
    return {one_line(name, 64): reason for server in servers for name, reason in server.faulty.items()}


def _allowed(tool: ServerTool) -> ServerTool:
    return replace(tool, kind=ToolKind.READ) if tool.kind is ToolKind.UNKNOWN else replace(tool, allowed=True)


def _names(tools: list[ServerTool], changes: list[str]) -> list[str]:
    """A unique name per tool, of letters, digits, `_` and `-`: its own, with the server's as prefix if two are equal.

    Other alphabets are transliterated: `größe` becomes `grosse`.
    """
    counts = Counter(tool.name for tool in tools)
    names: list[str] = []
    for tool in tools:
        wanted = tool.name if counts[tool.name] == 1 else f"{tool.server}_{tool.name}"
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", anyascii(wanted))[:_LONGEST_NAME]
        name = name if re.search(r"[a-zA-Z0-9]", name) else "tool"
        number = 2
        while name in names:
            name = f"{name[: _LONGEST_NAME - 3]}_{number}"
            number += 1
        if name != tool.name:
            changes.append(f"{name}: is {one_line(tool.name)} of {one_line(tool.server)}")
        names.append(name)
    return names


class _Bindings:
    """The `bind` option: a key is an `argument` of every tool that has it, or `tool.argument`."""

    def __init__(self, bind: Mapping[str, object]) -> None:
        self._bind = bind
        self._used: set[str] = set()

    def of(self, tool: ServerTool) -> dict[str, object]:
        bound: dict[str, object] = {}
        for argument, schema in tool.properties.items():
            for key in (argument, f"{tool.name}.{argument}"):  # the second, more specific key takes precedence
                if key in self._bind:
                    self._used.add(key)
                    bound[argument] = _typed(self._bind[key], schema)
        return bound

    def check_used(self, tools: list[ServerTool]) -> None:
        for key in self._bind:
            if key not in self._used:
                names = sorted({one_line(name) for tool in tools for name in tool.properties})
                raise ConfigError(
                    f"bind: no tool has an argument {key!r}; the arguments are {', '.join(names) or 'none'}"
                )


def _typed(value: object, schema: object) -> object:
    """Convert a text from the command line to the schema's type, such as `3` for an integer."""
    kind = cast(Schema, schema).get("type", "string") if isinstance(schema, dict) else "string"
    if not isinstance(value, str) or kind == "string" or ROLLOUT_DIR in value:
        return value
    try:
        return cast(object, json.loads(value))
    except ValueError:
        return value


def with_folder(value: object, folder: str | None) -> object:
    """Replace `{rollout_dir}` in all texts of a value by `folder`; None leaves it."""
    if isinstance(value, str):
        return value.replace(ROLLOUT_DIR, folder or ROLLOUT_DIR)
    if isinstance(value, list):
        return [with_folder(item, folder) for item in cast(list[object], value)]
    if isinstance(value, dict):
        return {key: with_folder(item, folder) for key, item in cast(dict[str, object], value).items()}
    return value


def uses_folder(bind: Mapping[str, object]) -> bool:
    """Whether a bound value contains `{rollout_dir}`."""
    return with_folder(dict(bind), ".") != dict(bind)


def _hidden(parameters: Schema, bound: Mapping[str, object]) -> Schema:
    """Remove the bound arguments from the schema."""
    if not bound:
        return parameters
    properties = cast(dict[str, object], parameters.get("properties", {}))
    kept: Schema = {**parameters, "properties": {key: value for key, value in properties.items() if key not in bound}}
    if isinstance(required := kept.pop("required", None), list):
        left = [name for name in cast(list[object], required) if name not in bound]
        kept |= {"required": left} if left else {}
    return kept


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name != "arguments"],
    }


def _resource_tools(server: ServerDescription) -> list[tuple[ServerTool, Request]]:
    uri: Schema = {"type": "string", "description": "as list_resources shows it"}
    return [
        (
            _reading(server, "list_resources", "Lists the resources that can be read, with their URIs.", _object()),
            "list_resources",
        ),
        (_reading(server, "read_resource", "Reads a resource.", _object(uri=uri)), "read_resource"),
    ]


def _prompt_tools(server: ServerDescription) -> list[tuple[ServerTool, Request]]:
    name: Schema = {"type": "string", "description": "as list_prompts shows it"}
    arguments: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
    schema = _object(name=name, arguments=arguments)
    return [
        (_reading(server, "list_prompts", "Lists the prompts that the server offers.", _object()), "list_prompts"),
        (_reading(server, "get_prompt", "Fills in a prompt and returns its messages.", schema), "get_prompt"),
    ]


def _reading(server: ServerDescription, name: str, description: str, schema: Schema) -> ServerTool:
    return ServerTool(server.name, name, description, schema, kind=ToolKind.READ, annotated_read_only=True)
