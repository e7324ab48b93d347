"""What each server that speaks OpenAI's chat completions answered before they shared a room, byte for byte.

    OFFBOOK_RECORD=1 pytest tests/openai_dialect

writes `recorded/` anew: only where an answer is meant to change.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

RECORDED = Path(__file__).parent / "recorded"
HELLO = [{"role": "user", "content": "hi"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a box.",
        "parameters": {"type": "object", "properties": {"box": {"type": "integer"}}, "required": ["box"]},
    },
}
Post = Callable[[str, Any], Awaitable[httpx.Response]]
Cases = dict[str, Any]
"""Name of a case -> the body of a chat completion; text: a path that is read, or with `{` a body as it is."""

VARYING = [
    (re.compile(r"\b(chatcmpl|call|open|tools|scenario)([-_])(?:[0-9a-f]{6,}|[0-9a-f-]{32,})"), r"\1\2ID"),
    (re.compile(r'"created":( ?)\d{9,}'), r'"created":\g<1>0'),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r'"seconds":( ?)[\d.]+'), r'"seconds":\g<1>0'),
    (re.compile(r'"logprob":( ?)(-?[\d.]+(?:e-?\d+)?)'), lambda m: f'"logprob":{m[1]}{float(m[2]):.3f}'),
]
"""Ids, times and the last digits of logprobs."""


def normalised(text: str) -> str:
    for pattern, stands_for in VARYING:
        text = pattern.sub(stands_for, text)
    return text


def told(name: str, request: Any, response: httpx.Response, more: str = "") -> str:
    """One case as text: the request, the status and type of the response, its body as it is."""
    asked = request if isinstance(request, str) else json.dumps(request)
    kind = response.headers.get("content-type", "")
    lines = [f"=== {name}", f">>> {asked}", f"<<< {response.status_code} {kind}", response.text]
    return normalised("\n".join([*lines, *([more] if more else [])]) + "\n")


async def responses(http: httpx.AsyncClient, cases: Cases, headers: dict[str, str] | None = None) -> str:
    """All cases, one after the other, as text."""
    texts: list[str] = []
    for name, request in cases.items():
        texts.append(told(name, request, await sent(http, request, headers)))
    return "".join(texts)


async def sent(http: httpx.AsyncClient, request: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    if isinstance(request, str) and request.startswith("/"):
        return await http.get(request, headers=headers)
    content = request if isinstance(request, str) else json.dumps(request)
    plain = {"content-type": "application/json", **(headers or {})}
    return await http.post("/v1/chat/completions", content=content, headers=plain)


def check(server: str, text: str) -> None:
    """Compare with the recording."""
    path = RECORDED / f"{server}.txt"
    if os.environ.get("OFFBOOK_RECORD"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
