"""The commands `understudy traces` and `understudy usage`."""

from __future__ import annotations

import time
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .tracing.commands import export_traces, prices, server_usage
from .tracing.usage import as_json as usage_json
from .tracing.usage import table as usage_table
from .wire import TrajectoryQuery

Server = Annotated[str | None, typer.Option(help="URL of a running server; none: one on this machine")]
Dir = Annotated[Path | None, typer.Option(help="directory of the server's records; none: ./.understudy")]

traces = typer.Typer(help="Deliver runs to trace sinks again.", no_args_is_help=True, rich_markup_mode=None)


@traces.callback()
def traces_commands() -> None:
    """Deliver runs to trace sinks again."""


@traces.command("export")
def export_run_traces(
    run: Annotated[str, typer.Option(help="id of the run, as the trainer and the server show it")],
    to: Annotated[str, typer.Option(help="names of sinks, such as langfuse or jsonl:FOLDER")] = "langfuse",
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Deliver a run to trace sinks from the server's records; what is there already stays once."""
    export_traces(run, to, url, dir, typer.echo)


def usage(
    model: Annotated[str | None, typer.Option(help="of one model; none: all")] = None,
    run: Annotated[str | None, typer.Option(help="of one run; none: all")] = None,
    days: Annotated[float | None, typer.Option(min=0, help="the last days; none: all")] = None,
    price: Annotated[list[str] | None, typer.Option(help="MODEL=INPUT/OUTPUT in USD per million tokens")] = None,
    json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Show calls, tokens, latency (p50, p95) and cost per app, model and day."""
    priced = prices(price or ())
    rows = server_usage(url, dir, TrajectoryQuery(model=model, run=run), days, time.time())
    typer.echo(dumps(usage_json(rows, priced), indent=1) if json else "\n".join(usage_table(rows, priced)))
