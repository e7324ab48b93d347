"""A scripted OpenAI-compatible endpoint on loopback, for tests of what asks other LLMs.

    with scripted_llm([says('{"score": 1}'), fails(429, headers={"retry-after": "1"}), hangs()]) as endpoint:
        llm = Llm("openai/judge", api_base=endpoint.url, cache=None)

Real HTTP: what is tested includes litellm and the provider's client.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class LlmRequest:
    """One request as it arrived; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: Any

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a chat completion."""
        return self.body["messages"]


@dataclass(frozen=True)
class LlmReply:
    """What the endpoint does with one request. `seconds`: wait first. `reset`: break the connection instead of answering.
    `until`: wait for this event first, 60 s at most."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0
    reset: bool = False
    until: threading.Event | None = None


Script = Sequence[LlmReply] | Callable[[LlmRequest], LlmReply]
"""Replies in the order of requests, the last of them for all that follow; or a function, called in the request's thread."""


def says(
    text: str | None,
    *,
    finish_reason: str = "stop",
    usage: tuple[int, int] | None = (10, 5),
    model: str = "scripted",
    seconds: float = 0.0,
    until: threading.Event | None = None,
    **message: Any,
) -> LlmReply:
    """An answer with this text. `usage`: prompt and completion tokens; None: none are told. `message`: more of its fields."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": text, **message},
    }
    return _completion([choice], usage, model, seconds, until)


def cuts(text: str) -> LlmReply:
    """An answer that reached its token limit."""
    return says(text, finish_reason="length")


def refuses(reason: str) -> LlmReply:
    """A refusal as OpenAI sends it: no content, finish_reason `stop`."""
    return says(None, refusal=reason)


def filters() -> LlmReply:
    """An answer that the content filter withheld."""
    return says(None, finish_reason="content_filter")


def chooses_nothing() -> LlmReply:
    """An answer without choices."""
    return _completion([], (10, 0), "scripted", 0.0, None)


def fails(
    status: int, message: str = "scripted failure", *, code: str | None = None, headers: Mapping[str, str] | None = None
) -> LlmReply:
    """An error as OpenAI sends it."""
    error = {"error": {"message": message, "type": code or "scripted", "code": code, "param": None}}
    return LlmReply(json.dumps(error).encode(), status, dict(headers or {}))


def sends(text: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> LlmReply:
    """A body as it is, such as a proxy's page."""
    return LlmReply(text.encode(), status, {"content-type": "text/html", **(headers or {})})


def hangs(seconds: float = 60.0) -> LlmReply:
    """No answer for so long."""
    return LlmReply(b"{}", seconds=seconds)


def resets() -> LlmReply:
    """A connection that breaks."""
    return LlmReply(reset=True)


def _completion(
    choices: list[Any], usage: tuple[int, int] | None, model: str, seconds: float, until: threading.Event | None
) -> LlmReply:
    body: dict[str, Any] = {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": choices,
    }
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return LlmReply(json.dumps(body).encode(), seconds=seconds, until=until)


class ScriptedLlm:
    """A running endpoint. `url` is for `api_base=`; `requests` has what arrived, in order; `most_at_once` is the largest
    number of requests that were answered side by side."""

    def __init__(self, script: Script) -> None:
        self.url = ""
        self.requests: list[LlmRequest] = []
        self.most_at_once = 0
        self.closing = threading.Event()
        self._script = script
        self._at_once = 0
        self._lock = threading.Lock()

    def reply(self, request: LlmRequest) -> LlmReply:
        """The script's reply to the next request."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
        if callable(self._script):
            return self._script(request)
        return self._script[min(number, len(self._script) - 1)]

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count a request that is being answered."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    endpoint: ScriptedLlm

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client gave up
            self.close_connection = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"null")
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.endpoint.counted():
            reply = self.endpoint.reply(LlmRequest(self.path, headers, body))
            self.endpoint.closing.wait(reply.seconds)
            if reply.until is not None:
                reply.until.wait(60)
        if reply.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in {"content-type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(reply.content)))
        self.end_headers()
        self.wfile.write(reply.content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@contextmanager
def scripted_llm(script: Script) -> Generator[ScriptedLlm]:
    """Serve on a free port until the block ends."""
    endpoint = ScriptedLlm(script)
    handler = type("Handler", (_Handler,), {"endpoint": endpoint})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
