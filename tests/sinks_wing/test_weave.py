"""Weave's `@weave.op` on a rollout: Offbook records as without it, and Weave gets its calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offbook.testing import Action, scripted_server
from offbook.testing.asgi import Body
from tests.paths import ROOT

CALLS = "/v2/me/agents/calls/complete"


class WeaveServer(BaseHTTPRequestHandler):
    """What `weave.init` asks of W&B and of its trace server, over real HTTP; keeps the calls that it is sent."""

    protocol_version = "HTTP/1.1"
    calls: list[dict[str, Any]]

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer({"min_required_weave_python_version": "0.0.1", "trace_server_version": "99.0.0"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == CALLS:
            self.calls += json.loads(body)["batch"]
        if self.path == "/graphql":
            viewer = {"username": "me", "defaultEntity": {"name": "me"}}
            return self._answer({"data": {"viewer": viewer, "project": {"name": "agents"}}})
        self._answer({"digest": "d" * 43})

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def weave_server() -> Generator[tuple[str, list[dict[str, Any]]]]:
    """Its URL, and the calls that arrive."""
    calls: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (WeaveServer,), {"calls": calls}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", calls
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def echo(body: Body) -> Action:
    return Action(f"I {body['messages'][-1]['content']}")


@pytest.mark.skipif(find_spec("weave") is None, reason="it is no requirement of ours: pip install weave")
def test_rollouts_that_are_ops_of_weave_are_recorded_and_weave_gets_its_calls(tmp_path: Path) -> None:
    """In a process of its own: `weave.init` patches OpenAI's client and sets OpenTelemetry's global provider."""
    with scripted_server(echo, tmp_path) as served, weave_server() as (url, calls):
        own = {"WANDB_BASE_URL": url, "WF_TRACE_SERVER_URL": url, "WANDB_API_KEY": "k" * 40, "OPENAI_API_KEY": "unused"}
        own |= {"OFFBOOK_DIR": str(tmp_path), "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
        command = [
            sys.executable,
            str(ROOT / "tests/sinks_wing/weave_app.py"),
            served.url,
            str(tmp_path / "found.json"),
        ]
        done = subprocess.run(
            command, env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "found.json").read_text())
        recorded = {
            name: served.http.get("/api/trajectories", params={"model": name}).json()["trajectories"] for name in found
        }
    assert found == {"plain": [0, 1.0, 0, []], "wrapped": [0, 1.0, 0, []]}
    assert [len(several) for several in recorded.values()] == [2, 2]
    assert recorded["plain"][0]["calls"] is not None  # by the choices
    by_name: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        by_name.setdefault(call["op_name"].split("/op/")[1].split(":")[0], []).append(call)
    assert {name: len(by_name[name]) for name in ("rollout", "agent")} == {"rollout": 2, "agent": 2}
    assert [call["output"] for call in by_name["agent"]] == [1.0, 1.0]
    assert {call["inputs"]["scenario"]["id"] for call in by_name["rollout"]} == {"blue", "teal"}
    asked = by_name["openai.chat.completions.create"]  # patched by Weave, inside the rollouts
    assert {call["id"] for call in by_name["rollout"]} <= {call["parent_id"] for call in asked}
