"""The commands `offbook push` and `offbook pull`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook.client.connection.http import checked_name
from offbook.commands.options import Dir, Model
from offbook.plugins import imported

Mirror = Annotated[
    str,
    typer.Option(help="place of the copies: s3://, gs:// or az://BUCKET/PATH, or file:///FOLDER"),
]


def push(model: Model, mirror: Mirror, dir: Dir = None) -> None:
    """Upload the checkpoints of a model that a mirror does not have.

    The server may be running. Credentials come from the provider's environment variables."""
    uploads = imported("offbook_cloud.uploads", "ui")
    for step in asyncio.run(uploads.push(server_folder(dir), mirror, checked_name(model, "model"))):
        echo(f"step {step}")


def pull(model: Model, mirror: Mirror, dir: Dir = None) -> None:
    """Download a model's newest checkpoint from a mirror, if the directory's is older.

    Stop the directory's server first."""
    pulls = imported("offbook_cloud.pulls", "ui")
    written = asyncio.run(pulls.pull_model(server_folder(dir), mirror, checked_name(model, "model")))
    for path in written:
        echo(str(path))
    if not written:
        echo(f"model {model!r}: the directory's newest step is not older than the mirror's", err=True)
