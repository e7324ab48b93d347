"""Finds the server that runs on a directory of this machine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx

from offbook.base.json_files import read_json
from offbook.base.server_options import server_folder
from offbook.base.types import Json

from .backend import RemoteBackend
from .connection.http import Api


def server_at(url: str | None, folder: Path | None) -> Api | None:
    """The server at `url`, else the one running on the directory; None if there is none."""
    if url is not None:
        return asyncio.run(RemoteBackend(url).connect())
    return running_server(server_folder(folder))


def running_server(folder: Path) -> Api | None:
    """The server running on a directory; None if there is none.

    The key comes from `server.json`, else from OFFBOOK_API_KEY, else from the directory's `key` file.
    """
    try:
        facts: Json = read_json(folder / "server.json")
        answer = httpx.get(f"{facts['url']}/health", timeout=5, trust_env=False)
        if not answer.is_success or answer.json()["pid"] != facts["pid"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, httpx.TransportError):
        return None
    key_file = folder / "key"
    lines = key_file.read_text().split("\n") if key_file.exists() else []
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return Api(facts["url"], facts.get("key") or os.environ.get("OFFBOOK_API_KEY") or next(iter(keys), None))
