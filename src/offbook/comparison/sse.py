"""Converts a finished chat completion to the stream that an app requested."""

from __future__ import annotations

import json
from typing import Any

from offbook.base.types import Json

CHUNK_FIELDS = ("id", "created", "model")


def as_stream(completion: Json, usage: bool) -> bytes:
    """Server-sent events: per choice one delta with the message and one with the finish reason, then the requested usage."""
    common: dict[str, Any] = {name: completion[name] for name in CHUNK_FIELDS} | {"object": "chat.completion.chunk"}
    chunks: list[Json] = []
    for choice in completion["choices"]:
        delta: dict[str, Any] = dict(choice["message"])
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        mark = {"index": choice["index"], "offbook": choice["offbook"]}
        chunks.append({**common, "choices": [{**mark, "delta": delta, "finish_reason": None}]})
        chunks.append({**common, "choices": [{**mark, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if usage and "usage" in completion:
        chunks.append({**common, "choices": [], "usage": completion["usage"]})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()
