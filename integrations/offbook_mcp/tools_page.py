"""The output of `offbook mcp tools`. Every text of the server is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from offbook.base.text import one_line, printable

from .connection.pool import ServerPool
from .tools.toolset import ModelTool


def lines(pool: ServerPool) -> Iterator[str]:
    """The output as text, line by line."""
    for server in pool.servers:
        identity = " ".join(part for part in (server.title, server.version) if part)
        yield f"{one_line(server.name)}: {one_line(identity) or 'without a name'}, protocol {one_line(server.protocol)}"
    yield f"fingerprint {pool.fingerprint}; {sharing(pool)}"
    yield ""
    width = max(len(tool.name) for tool in pool.toolset.tools)
    for tool in pool.toolset.tools:
        yield f"{tool.name:{width}}  {tool.tool.kind:7} {arguments(tool)}"
        if tool.tool.description:
            yield f"{'':{width}}          {one_line(tool.tool.description, 100)}"
        for name, value in tool.bound.items():
            yield f"{'':{width}}          bound: {name} = {printable(str(value))}"
    if pool.toolset.left_out:
        yield ""
        yield "Left out:"
        yield from (f"  {one_line(name, 64)}: {one_line(reason)}" for name, reason in pool.toolset.left_out.items())
    if pool.toolset.changes:
        yield ""
        yield "Changed on the way to the model:"
        yield from (f"  {one_line(change)}" for change in pool.toolset.changes)


def sharing(pool: ServerPool) -> str:
    """Describe which servers rollouts share."""
    if not pool.rollouts_need_sessions:
        why = "as asked" if pool.target.stateless else "every tool is annotated read-only"
        return f"rollouts share one session ({why})"
    if pool.shared:
        return f"rollouts share {', '.join(pool.shared)}, and have their own session of the others"
    return "each rollout has a session of its own"


def arguments(tool: ModelTool) -> str:
    """A tool's arguments such as `(path, head?: number)`: `?` marks optional ones, strings show no type."""
    required = cast(list[str], tool.parameters.get("required", []))
    properties = cast(dict[str, dict[str, object]], tool.parameters["properties"])
    words: list[str] = []
    for name, schema in properties.items():
        kind = schema.get("type", "any")
        optional = "" if name in required else "?"
        words.append(f"{one_line(name)}{optional}" + ("" if kind == "string" else f": {one_line(str(kind))}"))
    return f"({', '.join(words)})"


def as_json(pool: ServerPool) -> dict[str, object]:
    """The output as JSON: servers, fingerprint, and every tool with the schema that the model gets."""
    return {
        "servers": [
            {"name": server.name, "title": server.title, "version": server.version, "protocol": server.protocol}
            for server in pool.servers
        ],
        "fingerprint": pool.fingerprint,
        "shared": list(pool.shared),
        "tools": [
            tool.function()["function"] | {"server": tool.tool.server, "kind": tool.tool.kind.value}
            for tool in pool.toolset.tools
        ],
        "left_out": dict(pool.toolset.left_out),
        "changes": list(pool.toolset.changes),
    }
