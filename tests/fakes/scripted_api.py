"""The training API, answered by script: for what a real server cannot be made to do on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = Any


@dataclass(frozen=True)
class Asked:
    """One request as it arrived; header names in lower case. A compressed body stays bytes."""

    method: str
    path: str
    headers: dict[str, str]
    body: Json


@dataclass(frozen=True)
class Reply:
    """`json`, or `text` as it is, or `events`: server-sent events, after which the stream ends. `location`: of a redirect.
    `cut`: the connection ends without an answer."""

    status: int = 200
    json: Json = None
    text: str | None = None
    location: str | None = None
    events: tuple[Json, ...] | None = None
    cut: bool = False
    wait_for: threading.Event | None = None


Script = Callable[[Asked], Reply | None]
"""None: the plain answer of a server that takes everything."""


@dataclass
class ScriptedApi:
    url: str
    asked: list[Asked] = field(default_factory=list)

    def bodies(self, path: str) -> list[Json]:
        """The bodies that arrived at a path, in order."""
        return [request.body for request in self.asked if request.path == path]


def result(request: Asked, step: int = 1) -> Json:
    """The event that ends a train request well."""
    done = {"model": request.body["model"], "step": step, "applied": True, "request_id": request.body["id"]}
    return {"kind": "result", "result": done}


def plain(request: Asked) -> Reply:
    """What a server answers that takes everything."""
    model = {"project": "default", "base_model": "tiny", "step": 0, "lora": {}, "checkpoint": None}
    if request.path == "/api/models" and request.method == "POST":
        return Reply(json=model | {"name": request.body["name"]})
    if request.path == "/api/trajectories":
        return Reply(json={"calls": {record["id"]: 1 for record in request.body["trajectories"]}})
    if request.path == "/api/train":
        return Reply(events=(result(request),))
    return Reply(404, {"error": {"message": f"no such path {request.path}", "code": "not_found", "param": None}})


@contextmanager
def scripted_api(script: Script = lambda request: None) -> Iterator[ScriptedApi]:
    """Serve on a free port until the block ends."""
    state = ScriptedApi("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length) or None
            if body is not None and "content-encoding" not in self.headers:
                body = json.loads(body)
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Asked(self.command, self.path, headers, body)
            state.asked.append(request)
            reply = script(request) or plain(request)
            if reply.wait_for is not None:
                reply.wait_for.wait(30)
            if reply.cut and reply.events is None:
                self.close_connection = True
                return
            self.send_response(reply.status)
            if reply.events is None:
                content = (json.dumps(reply.json) if reply.text is None else reply.text).encode()
                if reply.location is not None:
                    self.send_header("location", reply.location)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                return
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for event in reply.events:
                self.wfile.write(f": ping\n\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode())
                self.wfile.flush()
            self.close_connection = True

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
