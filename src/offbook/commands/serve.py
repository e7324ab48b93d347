"""The commands `offbook serve`, `offbook ui`, `offbook runs` and `offbook show`."""

from __future__ import annotations

import typer

from offbook.client.commands import run_server


def serve(context: typer.Context) -> None:
    """Serve a model with OpenAI's API, record its calls, train it."""
    run_server(context.args)


def ui(context: typer.Context) -> None:
    """Show recorded runs in a browser, without a running server."""
    run_server(["ui", *context.args])


def runs(context: typer.Context) -> None:
    """List recorded runs, without a running server."""
    run_server(["runs", *context.args])


def show_records(context: typer.Context) -> None:
    """Show the steps of a run, or the conversation of a trajectory."""
    run_server(["show", *context.args])
