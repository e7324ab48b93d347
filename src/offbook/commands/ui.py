"""`python -m offbook.server ui`: the dashboard of a directory, without an engine and without locking the
directory."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from offbook.base.config import default_dir
from offbook.base.errors import ConfigError
from offbook.base.http_access import key_for_host
from offbook.server.arguments import KEY_VARIABLE
from offbook.server.http.auth import Guard
from offbook.server.http.viewer import build_viewer, open_records
from offbook.server.serving import listen, url_of
from offbook.server.views.dashboard_source import DashboardSource


def run_viewer(argv: Sequence[str]) -> int:
    """Serve the dashboard until Ctrl-C, and return the exit code. Raises ConfigError, StoreError."""
    arguments = _parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    folder: Path = (arguments.dir or default_dir()).expanduser().absolute()
    key = key_for_host(arguments.host, arguments.api_key or os.environ.get(KEY_VARIABLE) or None)
    records = open_records(folder, arguments.store_url)
    try:
        guard = Guard(key)
        app = build_viewer(DashboardSource(records, folder), guard)
        with listen(arguments.host, arguments.port) as listener:
            link = guard.sessions.one_time_link() if guard.sessions is not None else ""
            print(
                f"The dashboard of {folder} is at {url_of(arguments.host, listener)}{link} (Ctrl-C ends it)", flush=True
            )
            config = uvicorn.Config(app, log_level="warning", lifespan="off", proxy_headers=False, server_header=False)
            uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        return 0
    finally:
        records.close()
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="offbook ui",
        description="Show the runs of a server's directory in a browser. Needs no running server, and changes nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("--dir", type=Path, help="directory of the server (default: ./.offbook)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on; 0 takes a free one (default: 8001)")
    parser.add_argument(
        "--api-key", help=f"key to sign in with (default: {KEY_VARIABLE}); needed if --host is not loopback"
    )
    parser.add_argument("--store-url", help="SQLAlchemy URL of the records, if the server has one")
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        raise ConfigError(
            f"{rest[0]!r} is no option here: see --help; a directory is given as --dir {rest[0].lstrip('-')}"
        )
    return arguments
