"""Export recorded runs and conversations, or import scores from Langfuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError, OffbookError, ServerError
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.wire import REWARDING, FeedbackRequest, TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.tracing.export import export_run
from offbook.tracing.rollout_reader import StoredRecords, conversations, pages
from offbook.tracing.sink_registry import named_sinks, resolve_sinks

from .directory import records_at, server_needed
from .lazy_import import imported
from .options import Dir, Server

traces = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

NO_ROLLOUT = ("unknown_trajectory", "unknown_call", "unfinished_trajectory", "metadata_taken")
"""Codes of errors that are about one rollout: the feedback of others is stored."""


@traces.callback()
def traces_commands() -> None:
    """Export recorded runs and conversations, or import scores from Langfuse."""


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


@traces.command("scores")
def take_scores(
    name: Annotated[str, typer.Option(help="name of the score in Langfuse, such as user-feedback")],
    feedback: Annotated[
        str, typer.Option("--as", help=f"name of the feedback; {REWARDING} becomes the reward too")
    ] = REWARDING,
    value: Annotated[
        list[str] | None, typer.Option(help="number of a category as CATEGORY=NUMBER, such as good=1; repeatable")
    ] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Import the scores that people gave in Langfuse, as feedback.

    A score on a trace is feedback on its rollout, and a score on a generation is feedback on that model call. Run it again
    at any time: only new and changed scores are stored.

    \b
    Example:
      offbook traces scores --name user-feedback
    """
    api, numbers = server_needed(url, dir), _numbers(value or ())
    try:
        scored = imported("offbook_langfuse.feedback", "langfuse").langfuse_feedback(name, feedback, numbers)
    except ConnectionError as error:
        raise OffbookError(f"{error}: nothing was stored; run this again when Langfuse answers") from error
    changed, missing = asyncio.run(_stored(api, scored.requests))
    same = len(scored.requests) - changed - len(missing)
    echo(f"{name}: {counted(changed, 'score')} new or changed, {same} as before")
    for line in (*missing, *scored.left_out):
        echo(f"  left out: {line}")


def _numbers(texts: Sequence[str]) -> dict[str, float]:
    """Parse values such as `good=1`. Raises ConfigError."""
    numbers: dict[str, float] = {}
    for text in texts:
        category, _, number = text.rpartition("=")
        try:
            if not category:
                raise ValueError(text)
            numbers[category] = float(number)
        except ValueError as error:
            raise ConfigError(f"--value: {text!r} is not of the form CATEGORY=NUMBER, such as good=1") from error
    return numbers


async def _stored(api: Api, requests: Sequence[tuple[str, FeedbackRequest]]) -> tuple[int, list[str]]:
    """How much feedback was new or changed, and what the server has no finished rollout for. Raises ServerError."""
    changed, missing = 0, list[str]()
    for trace, request in requests:
        try:
            changed += (await api.feedback(request)).changed
        except ServerError as error:
            if error.code not in NO_ROLLOUT:
                raise
            missing.append(f"trace {trace}: {error}")
    return changed, missing
