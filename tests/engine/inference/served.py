"""The engine over HTTP, as tests speak to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import torch
import uvicorn

from offbook.base.types import Json
from offbook.engine.inference.app import build_app
from offbook.engine.inference.decoding.model import ModelRunner
from offbook.engine.inference.service import SamplingService
from tests.engine.inference.engines import DEADLINE, until_healthy

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"size": {"type": "string", "enum": ["small", "large"]}},
                "required": ["size"],
            },
        },
    }
    for name in ("open_box", "close_box")
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@contextmanager
def served(policy: ModelRunner) -> Iterator[str]:
    """A real server of the real app, in a thread; its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    service = SamplingService(policy, name="base", max_batch=4)
    server = uvicorn.Server(uvicorn.Config(build_app(service), log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    until_healthy(address)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        listener.close()


def body(**fields: Json) -> dict[str, Json]:
    return {"model": "base", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, **fields}


def chat(http: httpx.Client, **fields: Json) -> Json:
    answer = http.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, **fields: Json) -> list[Json]:
    answer = http.post("/v1/chat/completions", json=body(stream=True, **fields))
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(http: httpx.Client, status: int = 400, **fields: Json) -> Json:
    answer = http.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def says(policy: ModelRunner, patched: pytest.MonkeyPatch, text: str) -> None:
    """The model answers the next call with this text and ends."""
    rest = iter([*policy.tokenizer.encode(text, add_special_tokens=False), *policy.eos])

    def surely(*_: object) -> torch.Tensor:
        return torch.full((1, policy.vocabulary), -50.0).index_fill_(1, torch.tensor([next(rest)]), 50.0)

    patched.setattr(policy, "prefill", surely)
    patched.setattr(policy, "decode", surely)


def until_idle(http: httpx.Client) -> None:
    until = time.monotonic() + DEADLINE
    while http.get("/health").json()["running"]:
        assert time.monotonic() < until, "a slot was not freed in time"
