"""What the doctor asks over HTTP: the server on a directory."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.commands.doctor import server_checks

Answers = dict[str, tuple[int, Any]]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """`serve({path: (status, body)})`: a server of these answers; its URL."""
    with ExitStack() as stack:

        def start(answers: Answers) -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    status, body = answers.get(self.path, (404, {}))
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(json.dumps(body).encode())

                def log_message(self, format: str, *args: Any) -> None:
                    return

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL at which nothing listens: its port is taken, and stays so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def announced(folder: Path, url: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """`server.json` of a server at `url`; what its /health tells."""
    (folder / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid(), "base_model": "b", "key": None}))
    health = {"status": "ok", "version": "0.1.0", "base_model": "b", "engine": "vllm", "pid": os.getpid()}
    return url, health | more


async def test_the_server_that_runs_on_the_directory_tells_what_it_is(local_backend: offbook.LocalBackend) -> None:
    await offbook.TrainableModel(name="examined", base_model="tiny", backend=local_backend).register()
    server, sampler, *_ = server_checks(local_backend.dir, {})
    assert server.status == "ok" and "base tiny, engine embedded" in server.found
    assert sampler.status == "ok" and "0 restarts" in sampler.found


def test_restarts_loader_and_the_mask_probes_verdict_are_shown(tmp_path: Path, serve: Callable[..., str]) -> None:
    answers: Answers = {}
    learner = {"loader": "unsloth 2026.10.9", "device": "cpu", "mask_probe": "refused: differs by 3.1e-01 nats"}
    _, health = announced(tmp_path, serve(answers), restarts=2, in_flight=5, learner=learner, unknown="later")
    answers["/health"] = (200, health)
    _, sampler, told, probe = server_checks(tmp_path, {})
    assert (sampler.status, sampler.found) == ("warn", "ok, 5 calls in flight, 2 restarts")
    assert told.found == "loader unsloth 2026.10.9, device cpu"
    assert (probe.name, probe.status, probe.found) == ("mask probe", "warn", "refused: differs by 3.1e-01 nats")


def test_a_directory_without_a_server_and_one_whose_server_is_gone_say_so(tmp_path: Path, nobody: str) -> None:
    announced(tmp_path, nobody)
    (check,) = server_checks(tmp_path, {})
    assert check.found == f"none runs on {tmp_path}"


def test_the_server_at_offbook_url_is_asked_too(tmp_path: Path, serve: Callable[..., str], nobody: str) -> None:
    gone, _ = server_checks(tmp_path, {"OFFBOOK_URL": nobody})
    assert gone.status == "warn" and f"{nobody} does not answer" in gone.found
    other, _ = server_checks(tmp_path, {"OFFBOOK_URL": serve({"/health": (200, {"hello": 1})})})
    assert other.status == "warn" and "is not a server of Offbook (HTTP 200)" in other.found
