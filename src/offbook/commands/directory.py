"""What a command works on: a running server, or the records of a directory on which none runs."""

from __future__ import annotations

from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.client.connection.http import Api
from offbook.client.local import server_at
from offbook.plugins import imported
from offbook.tracing.rollout_reader import StoredRecords


def server_needed(url: str | None, folder: Path | None, start: str = "offbook serve") -> Api:
    """The server at `url`, else the one that runs on the directory. Raises ConfigError without one: `start` is the command."""
    api = server_at(url, folder)
    if api is None:
        raise ConfigError(f"no server is running here: start one with `{start}`, or name one with --url")
    return api


def records_at(url: str | None, folder: Path | None) -> Api | StoredRecords:
    """The records of the server at `url`, else of the one that runs on the directory, else of the directory itself.

    Raises MissingExtraError for a directory without the packages of the extra `ui`.
    """
    api = server_at(url, folder)
    if api is not None:
        return api
    return imported("offbook.server.stored_models", "ui").DirectoryRecords(server_folder(folder))
