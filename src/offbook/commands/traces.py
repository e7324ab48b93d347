"""Send recorded runs to trace sinks."""

from __future__ import annotations

from typing import Annotated

import typer

from offbook.base.terminal import echo
from offbook.tracing.export import export_run
from offbook.tracing.sink_registry import named_sinks, resolve_sinks

from .directory import records_at
from .options import Dir, Server

traces = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


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
    sinks = resolve_sinks(named_sinks(to, "--to"))
    export_run(records_at(url, dir), run, sinks, say=echo)
