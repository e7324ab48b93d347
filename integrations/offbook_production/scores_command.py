"""The command `offbook scores`: scores that people gave in Langfuse, as feedback."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from offbook.base.errors import ConfigError, OffbookError, ServerError
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.client.connection.http import Api
from offbook.commands.directory import server_needed
from offbook.commands.lazy_import import imported
from offbook.commands.options import Dir, Server

from .client import send_feedback
from .feedback import REWARDING, FeedbackRequest

NO_ROLLOUT = ("unknown_trajectory", "unknown_call", "unfinished_trajectory", "metadata_taken")
"""Codes of errors that are about one rollout: the feedback of others is stored."""


def scores(
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
      offbook scores --name user-feedback
    """
    api, numbers = server_needed(url, dir), _numbers(value or ())
    try:
        scored = imported("offbook_production.langfuse_scores", "langfuse").langfuse_feedback(name, feedback, numbers)
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
            changed += (await send_feedback(api, request)).changed
        except ServerError as error:
            if error.code not in NO_ROLLOUT:
                raise
            missing.append(f"trace {trace}: {error}")
    return changed, missing
