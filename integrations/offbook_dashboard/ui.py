"""The command `offbook ui`: the dashboard of a directory, without an engine and without locking the directory."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from offbook.base.http_access import KEY_VARIABLE, key_for_host, key_option
from offbook.base.server_options import server_folder
from offbook.commands.options import Dir
from offbook.plugins import imported


def ui(
    dir: Dir = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: a free one")] = 8001,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"key, which browsers ask for as the password, or @FILE; needed if --host is not loopback  [default: {KEY_VARIABLE}]"
        ),
    ] = None,
) -> None:
    """Show recorded runs in a browser, without a running server.

    Changes nothing in the directory. Serves until Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    folder, key = server_folder(dir), key_for_host(host, key_option(api_key))
    imported("offbook_dashboard.viewer", "ui").view(folder, host, port, key)
