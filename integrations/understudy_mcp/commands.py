"""`understudy mcp ...`: argv -> a target -> one call."""

from __future__ import annotations

import asyncio
import json as json_format
from typing import Annotated

import typer

from .limits import Limits
from .pool import ServerPool
from .scenarios import commands as scenario_commands
from .target import Target
from .target_options import (
    Bind,
    Env,
    Fixture,
    Header,
    Only,
    Prompts,
    Resources,
    StartTimeout,
    Stateless,
    TargetArgument,
    target_from,
)
from .tools_page import as_json, lines
from .training.commands import add_training_commands

app = typer.Typer(
    help="Point at an MCP server: see its tools, and train a model to use them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def tools(
    target: TargetArgument,
    only: Only = [],  # noqa: B006  # typer reads it
    bind: Bind = [],  # noqa: B006
    header: Header = [],  # noqa: B006
    env: Env = [],  # noqa: B006
    fixture: Fixture = None,
    stateless: Stateless = None,
    resources: Resources = False,
    prompts: Prompts = False,
    start_timeout: StartTimeout = Limits().start_seconds,
    json: Annotated[bool, typer.Option("--json", help="as JSON, with the schemas that the model gets")] = False,
) -> None:
    """Start the server and list its tools, as the model will see them."""
    parsed = target_from(
        target,
        only=only,
        bind=bind,
        header=header,
        env=env,
        fixture=fixture,
        stateless=stateless,
        resources=resources,
        prompts=prompts,
        start_timeout=start_timeout,
    )
    typer.echo(asyncio.run(listing(parsed, json)))


async def listing(target: Target, json: bool) -> str:
    """The page of `understudy mcp tools`."""
    async with ServerPool(target, ahead=0) as pool:
        return json_format.dumps(as_json(pool), indent=1) if json else "\n".join(lines(pool))


app.command("explore")(scenario_commands.explore)
app.command("scenarios")(scenario_commands.scenarios)
add_training_commands(app)
