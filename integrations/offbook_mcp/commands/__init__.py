"""Inspect an MCP server, and train a model to use its tools."""

from __future__ import annotations

import asyncio
import json as json_format
from collections.abc import Iterator
from typing import Annotated

import typer

from offbook.base.terminal import echo
from offbook.base.text import one_line, printable
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target

from . import scenarios as scenario_commands
from .options import on_target
from .training import add_training_commands

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def tools(
    target: Target,
    json: Annotated[bool, typer.Option("--json", help="print JSON, with the schemas that the model gets")] = False,
) -> None:
    """List the server's tools as the model sees them, and which may be called."""
    echo(asyncio.run(_listing(target, json)))


async def _listing(target: Target, json: bool) -> str:
    async with ServerPool(target, ahead=0) as pool:
        return json_format.dumps(_as_json(pool), indent=1) if json else "\n".join(_lines(pool))


def _lines(pool: ServerPool) -> Iterator[str]:
    """The listing as text. Every text of the server is escaped."""
    for server in pool.servers:
        identity = " ".join(part for part in (server.title, server.version) if part)
        yield f"{one_line(server.name)}: {one_line(identity) or 'without a name'}, protocol {one_line(server.protocol)}"
    yield f"fingerprint {pool.fingerprint}; {pool.sharing()}"
    yield ""
    width = max(len(tool.name) for tool in pool.offered.tools)
    for tool in pool.offered.tools:
        kind = (pool.toolset.find(tool.name) or tool).tool.kind
        yield f"{tool.name:{width}}  {kind:7} {tool.shown_arguments()}"
        if tool.tool.description:
            yield f"{'':{width}}          {one_line(tool.tool.description, 100)}"
        for name, value in tool.bound.items():
            yield f"{'':{width}}          bound: {name} = {printable(str(value))}"
    if pool.toolset.left_out:
        yield ""
        yield "Not called:"
        yield from (f"  {one_line(name, 64)}: {one_line(reason)}" for name, reason in pool.toolset.left_out.items())
    if pool.toolset.changes:
        yield ""
        yield "Renamed for the model:"
        yield from (f"  {one_line(change)}" for change in pool.toolset.changes)


def _as_json(pool: ServerPool) -> dict[str, object]:
    """The listing as JSON: servers, fingerprint, and every tool with the schema that the model gets."""
    return {
        "servers": [
            {"name": server.name, "title": server.title, "version": server.version, "protocol": server.protocol}
            for server in pool.servers
        ],
        "fingerprint": pool.fingerprint,
        "shared": list(pool.shared),
        "tools": [
            tool.function()["function"] | {"server": tool.tool.server, "kind": tool.tool.kind.value}
            for tool in pool.offered.tools
        ],
        "left_out": dict(pool.toolset.left_out),
        "changes": list(pool.toolset.changes),
    }


app.command("tools")(on_target(tools, calls_tools=False))
app.command("explore")(on_target(scenario_commands.explore))
app.command("scenarios")(on_target(scenario_commands.scenarios))
add_training_commands(app)
