"""`serve --idle-exit`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.server.servers import RunningServer, until, without_engine


@pytest.mark.slow("a real server")
def test_a_server_ends_in_order_once_it_has_nothing_to_do_and_open_pages_keep_it_not(tmp_path: Path) -> None:
    with without_engine() as flags, RunningServer(tmp_path / "dir", *flags, "--idle-exit", "0.1") as server:
        server.http.post("/v1/chat/completions", json={})

        def ended() -> bool:
            with suppress(httpx.TransportError):
                server.http.get("/health")
            return server.process.poll() is not None

        until(ended, "the server ends")
        assert server.process.returncode == 0
        assert "Nothing to do for 0.1 minutes (--idle-exit)" in server.output()
