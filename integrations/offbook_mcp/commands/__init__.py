"""Inspect an MCP server, and train a model to use its tools."""

from __future__ import annotations

import asyncio
import json as json_format
from typing import Annotated

import typer

from offbook.base.terminal import echo
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target
from offbook_mcp.tools_page import as_json, lines

from . import scenarios as scenario_commands
from .improve import improve
from .target_command import on_target
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
    """List the server's tools as the model sees them."""
    echo(asyncio.run(listing(target, json)))


async def listing(target: Target, json: bool) -> str:
    """The output of `offbook mcp tools`, as text or JSON."""
    async with ServerPool(target, ahead=0) as pool:
        return json_format.dumps(as_json(pool), indent=1) if json else "\n".join(lines(pool))


app.command("tools")(on_target(tools, calls_tools=False))
app.command("explore")(on_target(scenario_commands.explore))
app.command("scenarios")(on_target(scenario_commands.scenarios))
add_training_commands(app)
app.command("improve")(on_target(improve))
