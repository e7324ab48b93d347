"""The commands `offbook verify` and `offbook backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.client.commands import run_server, server_folder

from .options import Dir


def verify(
    dir: Dir = None,
    repair: Annotated[bool, typer.Option("--repair", help="move damaged parts aside and rebuild model.json")] = False,
) -> None:
    """Check the records, models and checkpoints of a directory.

    Exits with code 1 if any is damaged. No server may run on the directory."""
    run_server(["verify", "--dir", str(server_folder(dir)), *(["--repair"] if repair else [])])


def backup(output: Annotated[Path, typer.Option(help="new folder for the copy")], dir: Dir = None) -> None:
    """Copy the records, models and checkpoints of a directory.

    Its server may be running."""
    run_server(["backup", "--dir", str(server_folder(dir)), "--output", str(output.expanduser().absolute())])
