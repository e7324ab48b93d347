"""The commands `offbook traces` and `offbook usage`."""

from __future__ import annotations

import time
from json import dumps
from typing import Annotated

import typer

from offbook.base.wire import TrajectoryQuery
from offbook.tracing.export import export_traces
from offbook.tracing.usage import as_json as usage_json
from offbook.tracing.usage import prices, server_usage
from offbook.tracing.usage import table as usage_table

from .options import Dir, Server

traces = typer.Typer(help="Send recorded runs to trace sinks.", no_args_is_help=True, rich_markup_mode=None)


@traces.callback()
def traces_commands() -> None:
    """Send recorded runs to trace sinks."""


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

    A sink that has the run already keeps one copy."""
    export_traces(run, to, url, dir, typer.echo)


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
    typer.echo(dumps(usage_json(rows, priced), indent=1) if json else "\n".join(usage_table(rows, priced)))
