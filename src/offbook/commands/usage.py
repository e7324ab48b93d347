"""The command `offbook usage`."""

from __future__ import annotations

import asyncio
import time
from json import dumps
from typing import Annotated

import typer

from offbook.base.terminal import echo
from offbook.base.wire import TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.tracing.rollout_reader import PAGE, pages
from offbook.tracing.usage import DAY, as_json, prices, table, usage_rows

from .directory import records_at
from .options import Dir, Server


def usage(
    model: Annotated[str | None, typer.Option(help="only this model")] = None,
    run: Annotated[str | None, typer.Option(help="only this run")] = None,
    days: Annotated[float | None, typer.Option(min=0, help="only the last DAYS days")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(help="price of a model as MODEL=INPUT/OUTPUT, in USD per million tokens; repeatable"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Show calls, tokens, latency and cost per app, model and day.

    Latency is the median (p50) and the 95th percentile (p95), in seconds.

    \b
    Example:
      offbook usage --days 7 --price agent-001=0.15/0.60
    """
    priced = prices(price or ())
    query = TrajectoryQuery(model=model, run=run, limit=PAGE)
    records = records_at(url, dir)
    rollouts = pages(records, query) if isinstance(records, Api) else records.rollouts(query)
    since = 0.0 if days is None else time.time() - days * DAY
    rows = asyncio.run(usage_rows(rollouts, since))
    echo(dumps(as_json(rows, priced), indent=1) if json else "\n".join(table(rows, priced)))
