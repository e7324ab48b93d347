"""Export recorded runs and conversations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.wire import TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.tracing.export import export_run
from offbook.tracing.rollout_reader import StoredRecords, conversations, pages
from offbook.tracing.sink_registry import named_sinks, resolve_sinks

from .directory import records_at
from .options import Dir, Server

traces = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@traces.callback()
def traces_commands() -> None:
    """Export recorded runs and conversations."""


@traces.command("export")
def export_run_traces(
    run: Annotated[str, typer.Option(help="id of the run, which the trainer prints and `offbook runs` lists")],
    to: Annotated[
        str, typer.Option(help="sinks to send to, comma-separated, such as langfuse or jsonl:FOLDER")
    ] = "langfuse",
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Send a recorded run to trace sinks.

    A sink that already has the run gets no second copy."""
    sinks = resolve_sinks(named_sinks(to, "--to"))
    export_run(records_at(url, dir), run, sinks, say=echo)


@traces.command("conversations")
def write_conversations_of_run(
    run: Annotated[str, typer.Option(help="id of the run; the threads of an app behind --route desk are route/desk")],
    output: Annotated[Path, typer.Option(help="file to write, such as good.jsonl; it must not exist")],
    min_reward: Annotated[
        float | None,
        typer.Option(help="lowest reward of a rollout  [default: all rollouts, also those without a reward]"),
    ] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Write the longest conversation of each rollout of a run.

    `offbook sft` reads the file.

    \b
    Example:
      offbook traces conversations --run route/desk --output good.jsonl --min-reward 1
    """
    lines = asyncio.run(_lines(records_at(url, dir), run, min_reward))
    if not lines:
        least = "" if min_reward is None else f" with a reward of at least {min_reward:g}"
        raise ConfigError(f"--run {run}: there is no rollout{least} with a conversation")
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    except FileExistsError as error:
        raise ConfigError(f"--output {output}: the file exists already; choose another, or delete it") from error
    echo(f"{counted(len(lines), 'conversation')} in {output}")


async def _lines(records: Api | StoredRecords, run: str, min_reward: float | None) -> list[str]:
    query = TrajectoryQuery(run=run)
    rollouts = pages(records, query) if isinstance(records, Api) else records.rollouts(query)
    lines: list[str] = []
    async for rollout in rollouts:
        reward = rollout.record.reward
        told = conversations(rollout)
        if (
            rollout.record.exception is None
            and told
            and (min_reward is None or (reward is not None and reward >= min_reward))
        ):
            row = {"messages": told[0].messages} | ({"tools": told[0].tools} if told[0].tools else {})
            lines.append(json.dumps(row, ensure_ascii=False))
    return list(dict.fromkeys(lines))
