"""The commands `offbook verify` and `offbook backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.server import maintenance

from .options import Dir


def verify(
    dir: Dir = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="set damaged parts aside, rebuild model.json and start new records")
    ] = False,
) -> None:
    """Check the records, models and checkpoints of a directory.

    Exits with code 1 if any is damaged or could not be checked. Stop the
    directory's server first."""
    raise typer.Exit(maintenance.verify(_existing(dir), repair=repair))


def backup(
    output: Annotated[Path, typer.Option(help="new folder for the copy")],
    dir: Dir = None,
) -> None:
    """Copy the records, models and checkpoints of a directory, and verify the copy.

    Exits with code 1 if a part of the copy is damaged. The server may be running.
    """
    code = maintenance.backup(_existing(dir), output.expanduser().absolute())
    raise typer.Exit(code)


def _existing(folder: Path | None) -> Path:
    place = server_folder(folder)
    if not place.is_dir():
        raise ConfigError(f"{place}: no such directory; name the server's directory with --dir")
    return place
