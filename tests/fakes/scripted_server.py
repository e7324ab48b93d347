"""An OpenAI-compatible endpoint that answers by script: for clients under test, without a model."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Script = Callable[[Body], Body]
"""A request's body -> the assistant's message (`content` or `tool_calls`)."""


def says(text: str) -> Body:
    """A message of text."""
    return {"role": "assistant", "content": text}


def calls(name: str, arguments: str, call_id: str | None = None) -> Body:
    """A message with one tool call, its arguments as raw text."""
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id or f"call-{uuid.uuid4().hex[:8]}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@dataclass
class Received:
    """One request as it arrived; header names in lower case."""

    body: Body
    headers: dict[str, str]


@dataclass
class ScriptedServer:
    """`url` ends in /v1; `received` fills up in order of arrival."""

    url: str
    received: list[Received] = field(default_factory=list)


class Server(ThreadingHTTPServer):
    """Room for many connections at once."""

    daemon_threads = True
    request_queue_size = 256


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """Serve `script` on a free port until the block ends."""
    state = ScriptedServer("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.received.append(Received(body, {name.lower(): value for name, value in self.headers.items()}))
            answer = _answer(body, script(body))
            if body.get("stream"):
                lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(answer)] + ["data: [DONE]\n\n"]
                self._send("".join(lines).encode(), "text/event-stream")
            else:
                self._send(json.dumps(answer).encode(), "application/json")

        def _send(self, payload: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(body: Body, message: Body) -> Body:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    mark = {"trajectory_id": "scripted", "call_id": uuid.uuid4().hex, "index": 0, "step": 0}
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None, "understudy": mark}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**head, "choices": [choice], "usage": usage}


def _chunks(answer: Body) -> list[Body]:
    """The answer in small pieces: text in two halves, tool arguments in two halves, then the finishing chunk."""
    choice = answer["choices"][0]
    message = choice["message"]
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning", "content"):
        text = message.get(name) or ""
        deltas += [{name: part} for part in (text[: len(text) // 2], text[len(text) // 2 :]) if part]
    for index, call in enumerate(message.get("tool_calls") or []):
        raw = call["function"]["arguments"]
        first = {"name": call["function"]["name"], "arguments": raw[: len(raw) // 2]}
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": first}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": raw[len(raw) // 2 :]}}]})
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "understudy": choice["understudy"]}
    return [*chunks, {**head, "choices": [last]}]
