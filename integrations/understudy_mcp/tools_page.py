"""What `understudy mcp tools` shows. Every text of the server is made printable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from .connection.pool import ServerPool
from .printable import one_line, printable
from .tools.toolset import ModelTool


def lines(pool: ServerPool) -> Iterator[str]:
    """The page, line by line."""
    for server in pool.servers:
        identity = " ".join(part for part in (server.title, server.version) if part)
        yield f"{one_line(server.name)}: {one_line(identity) or 'without a name'}, protocol {one_line(server.protocol)}"
    yield f"fingerprint {pool.fingerprint}; {sharing(pool)}"
    yield ""
    width = max(len(tool.name) for tool in pool.toolset.tools)
    for tool in pool.toolset.tools:
        yield f"{tool.name:{width}}  {tool.tool.kind:6}  {arguments(tool)}"
        if tool.tool.description:
            yield f"{'':{width}}          {one_line(tool.tool.description, 100)}"
        for name, value in tool.bound.items():
            yield f"{'':{width}}          bound: {name} = {printable(str(value))}"
    if pool.toolset.changes:
        yield ""
        yield "Changed on the way to the model:"
        yield from (f"  {one_line(change)}" for change in pool.toolset.changes)


def sharing(pool: ServerPool) -> str:
    """Which servers rollouts share, in words."""
    if not pool.rollouts_need_sessions:
        why = "as asked" if pool.target.stateless else "every tool is annotated read-only"
        return f"rollouts share one session ({why})"
    if pool.shared:
        return f"rollouts share {', '.join(pool.shared)}, and have their own session of the others"
    return "each rollout has a session of its own"


def arguments(tool: ModelTool) -> str:
    """`(path, head?: number)`: names, `?` where optional, types other than text."""
    required = cast(list[str], tool.parameters.get("required", []))
    properties = cast(dict[str, dict[str, object]], tool.parameters["properties"])
    words: list[str] = []
    for name, schema in properties.items():
        kind = schema.get("type", "any")
        optional = "" if name in required else "?"
        words.append(f"{one_line(name)}{optional}" + ("" if kind == "string" else f": {one_line(str(kind))}"))
    return f"({', '.join(words)})"


def as_json(pool: ServerPool) -> dict[str, object]:
    """The same for programs: servers, fingerprint, and each tool with the schema that the model gets."""
    return {
        "servers": [
            {"name": each.name, "title": each.title, "version": each.version, "protocol": each.protocol}
            for each in pool.servers
        ],
        "fingerprint": pool.fingerprint,
        "shared": list(pool.shared),
        "tools": [
            tool.function()["function"] | {"server": tool.tool.server, "kind": tool.tool.kind.value}
            for tool in pool.toolset.tools
        ],
        "changes": list(pool.toolset.changes),
    }
