"""The commands `offbook verify` and `offbook backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.base.config import server_folder
from offbook.base.errors import ConfigError
from offbook.server import maintenance

from .options import Dir


def verify(
    dir: Dir = None,
    repair: Annotated[bool, typer.Option("--repair", help="move damaged parts aside and rebuild model.json")] = False,
) -> None:
    """Check the records, models and checkpoints of a directory.

    Exits with code 1 if any is damaged. No server may run on the directory."""
    raise typer.Exit(maintenance.verify(_existing(dir), repair=repair))


def backup(output: Annotated[Path, typer.Option(help="new folder for the copy")], dir: Dir = None) -> None:
    """Copy the records, models and checkpoints of a directory.

    Its server may be running."""
    maintenance.backup(_existing(dir), output.expanduser().absolute())


def _existing(folder: Path | None) -> Path:
    place = server_folder(folder)
    if not place.is_dir():
        raise ConfigError(f"{place}: there is no such directory")
    return place
