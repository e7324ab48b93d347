"""The tools that the model sees, and the server requests behind them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from anyascii import anyascii

from offbook.base.errors import ConfigError
from offbook.base.text import one_line
from offbook.base.types import Tool
from offbook_mcp.connection.servers import ROLLOUT_DIR

from .result_values import with_scalars
from .schemas import simplified
from .tool import Schema, ServerDescription, ServerTool, ToolKind, named, properties_of, reads_secrets

_LONGEST_NAME = 64
_LONGEST_DESCRIPTION = 8_000
DENIED = "denied before; --allow TOOL permits it again"
LIKELY_READS = "its words suggest that it only reads, but nothing says so; --allow TOOL calls it"
_UNASKED = {
    ToolKind.READ: LIKELY_READS,
    ToolKind.WRITE: "it may write; --allow TOOL calls it",
    ToolKind.UNKNOWN: "nothing says that it only reads; --allow TOOL calls it",
}


@dataclass(frozen=True)
class ModelTool:
    """A tool with the name and arguments that the model sees. `bound` has the values of its hidden arguments."""

    name: str
    tool: ServerTool
    parameters: Schema = field(hash=False)
    bound: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)

    def function(self) -> Tool:
        """The tool in OpenAI's format."""
        about = {"name": self.name, "description": self.tool.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def shown_arguments(self) -> str:
        """The arguments such as `(path, head?: number)`: `?` marks optional ones, strings show no type."""
        required = cast(list[str], self.parameters.get("required", []))
        words: list[str] = []
        for name, schema in properties_of(self.parameters).items():
            kind = schema.get("type", "any")
            optional = "" if name in required else "?"
            words.append(f"{one_line(name)}{optional}" + ("" if kind == "string" else f": {one_line(str(kind))}"))
        return f"({', '.join(words)})"

    def objection(self, *, allow_all: bool = False) -> str:
        """Why the tool is called only if the user allows it; "" for one that says that it only reads. `allow_all` permits
        what may write, but not what may show secrets."""
        if reads_secrets(self.tool.name):
            return "it may show secrets; --allow TOOL calls it"
        if re.match(r"\W*deprecated\b", self.tool.description, re.IGNORECASE) or "DEPRECATED" in self.tool.description:
            return "it is deprecated; --allow TOOL calls it"
        return "" if self.tool.read_only or allow_all else _UNASKED[self.tool.kind]

    def arguments(self, chosen: Mapping[str, object], folder: str | None) -> dict[str, object]:
        """The arguments for the server: the model's and the bound ones, which take precedence."""
        return {**chosen, **{name: with_folder(value, folder) for name, value in self.bound.items()}}


@dataclass(frozen=True)
class Toolset:
    """The model's tools in the servers' order.

    `changes` has a line for every renamed tool, `left_out` the reason by tool that is not offered at all.
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

    def permitted(self, decisions: Mapping[str, bool], *, allow_all: bool = False) -> Toolset:
        """The tools that may be called; the others are left out with the reason. A tool of unknown kind that is allowed by its
        name counts as reading."""
        tools: list[ModelTool] = []
        left_out = dict(self.left_out)
        for tool in self.tools:
            decision = decisions.get(tool.name)
            reason = DENIED if decision is False else "" if decision else tool.objection(allow_all=allow_all)
            if reason:
                left_out[tool.name] = reason
            elif decision and tool.tool.kind is ToolKind.UNKNOWN:
                tools.append(replace(tool, tool=replace(tool.tool, kind=ToolKind.READ)))
            else:
                tools.append(tool)
        return replace(self, tools=tuple(tools), left_out=left_out)

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
    offered = [tool for name, tool in by_name.items() if name in chosen and not tool.needs_task]
    if not offered:
        names = ", ".join(server.name for server in servers)
        reasons = "".join(f"; {name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"no tools: {names} offers none that can be called{reasons}")
    bindings = _Bindings(bind or {})
    tools: list[ModelTool] = []
    for tool, name in zip(offered, _names(offered, changes), strict=True):
        bound = bindings.of(tool)
        about = replace(tool, description=tool.description[:_LONGEST_DESCRIPTION])
        tools.append(ModelTool(name, about, _hidden(simplified(tool.input_schema), bound), bound))
    bindings.check_used(offered)
    return Toolset(tuple(tools), tuple(changes), left_out)


def _unusable(servers: Iterable[ServerDescription]) -> dict[str, str]:
    """The tools that the servers list with a faulty definition, and what is wrong with it."""
    return {one_line(name, 64): reason for server in servers for name, reason in server.faulty.items()}


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
        for argument, schema in properties_of(tool.input_schema).items():
            for key in (argument, f"{tool.name}.{argument}"):  # the second, more specific key takes precedence
                if key in self._bind:
                    self._used.add(key)
                    bound[argument] = _typed(self._bind[key], schema)
        return bound

    def check_used(self, tools: list[ServerTool]) -> None:
        for key in self._bind:
            if key not in self._used:
                names = sorted({one_line(name) for tool in tools for name in properties_of(tool.input_schema)})
                raise ConfigError(
                    f"bind: no tool has an argument {key!r}; the arguments are {', '.join(names) or 'none'}"
                )


def _typed(value: object, schema: Schema) -> object:
    """Convert a text from the command line to the schema's type, such as `3` for an integer."""
    if not isinstance(value, str) or schema.get("type", "string") == "string" or ROLLOUT_DIR in value:
        return value
    try:
        return cast(object, json.loads(value))
    except ValueError:
        return value


def with_folder(value: object, folder: str | None) -> object:
    """Replace `{rollout_dir}` in all texts of a value by `folder`; None leaves it."""
    return with_scalars(
        value, lambda scalar: scalar.replace(ROLLOUT_DIR, folder or ROLLOUT_DIR) if isinstance(scalar, str) else scalar
    )


def uses_folder(bind: Mapping[str, object]) -> bool:
    """Whether a bound value contains `{rollout_dir}`."""
    return with_folder(dict(bind), ".") != dict(bind)


def _hidden(parameters: Schema, bound: Mapping[str, object]) -> Schema:
    if not bound:
        return parameters
    left = {name: schema for name, schema in properties_of(parameters).items() if name not in bound}
    kept: Schema = {**parameters, "properties": left}
    if isinstance(required := kept.pop("required", None), list):
        others = [name for name in cast(list[object], required) if name not in bound]
        kept |= {"required": others} if others else {}
    return kept
