"""The command `offbook usage`."""

from __future__ import annotations

import time
from json import dumps
from typing import Annotated

import typer

from offbook.base.wire import TrajectoryQuery
from offbook.tracing.usage import as_json, prices, server_usage, table

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

    Latency is the median (p50) and the 95th percentile (p95), in seconds."""
    priced = prices(price or ())
    rows = server_usage(url, dir, TrajectoryQuery(model=model, run=run), days, time.time())
    typer.echo(dumps(as_json(rows, priced), indent=1) if json else "\n".join(table(rows, priced)))
