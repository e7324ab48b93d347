"""The command `offbook ui`: the dashboard of a directory, without an engine and without locking the directory."""

from __future__ import annotations

import logging
from typing import Annotated

import typer
import uvicorn

from offbook.base.http_access import KEY_VARIABLE, key_for_host, key_option
from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook.http_listener.config import listener_config
from offbook.server.http.auth import Guard
from offbook.server.http.viewer import build_viewer
from offbook.server.listening import listen, url_of
from offbook.server.records.database import open_records
from offbook.server.views.dashboard_source import DashboardSource

from .options import Dir, refuse_words


def ui(
    context: typer.Context,
    dir: Dir = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: a free one")] = 8001,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"key to sign in with, or @FILE; needed if --host is not loopback  [default: {KEY_VARIABLE}]"
        ),
    ] = None,
) -> None:
    """Show recorded runs in a browser, without a running server.

    Changes nothing in the directory. Serves until Ctrl-C."""
    refuse_words(context)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    folder = server_folder(dir)
    key = key_for_host(host, key_option(api_key))
    records = open_records(folder)
    try:
        guard = Guard(key)
        app = build_viewer(DashboardSource(records, folder), guard)
        with listen(host, port) as listener:
            link = guard.sessions.one_time_link() if guard.sessions is not None else ""
            echo(f"The dashboard of {folder} is at {url_of(host, listener)}{link} (Ctrl-C ends it)")
            uvicorn.Server(listener_config(app)).run(sockets=[listener])
    except KeyboardInterrupt:
        return
    finally:
        records.close()
