"""Requests and responses of the endpoint with built-in tools, in OpenAI's format."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from offbook import History
from offbook.base.types import new_id
from offbook_mcp.rollouts.agent_loop import SYSTEM, AgentLoop
from offbook_mcp.rollouts.episode import EpisodeEnd, ToolEpisode


class SpokenMessage(BaseModel):
    """A message of the request. Clients send no tool messages, since the endpoint writes them."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, JsonValue]]

    def plain(self) -> dict[str, object]:
        """The message with its text parts joined. Raises ValueError for a part that is not text."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        if other := next((part for part in self.content if part.get("type") != "text"), None):
            raise ValueError(f"messages: this model reads text only, got a part of type {other.get('type')!r}")
        return {"role": role, "content": "".join(str(part.get("text", "")) for part in self.content)}


class ServedRequest(BaseModel):
    """The supported fields of OpenAI's request. `tools` are rejected, other fields ignored."""

    model_config = ConfigDict(extra="ignore")

    messages: list[SpokenMessage] = Field(min_length=1)
    model: str = ""
    stream: bool = False
    n: Literal[1] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    tools: list[JsonValue] | None = None

    def history(self) -> History:
        """The conversation, with the default system prompt if it has none. Raises ValueError."""
        if self.tools:
            raise ValueError("tools: this model has its tools built in; leave them out")
        if self.messages[-1].role != "user":
            raise ValueError(f"messages: the last one must be the user's, got one of role {self.messages[-1].role!r}")
        messages = [message.plain() for message in self.messages]
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": SYSTEM})
        return History(messages_and_choices=cast(list[object], messages))  # type: ignore[arg-type]  # pydantic takes dicts


def completion(model: str, episode: ToolEpisode, loop: AgentLoop) -> dict[str, object]:
    """The response body. The additional field `tool_calls` lists the tool calls that were made."""
    message = {"role": "assistant", "content": episode.answer, "refusal": None}
    tokens = {"prompt_tokens": loop.prompt_tokens, "completion_tokens": loop.completion_tokens}
    return {
        **_head(model, "chat.completion"),
        "choices": [{"index": 0, "message": message, "finish_reason": _reason(episode), "logprobs": None}],
        "usage": {**tokens, "total_tokens": loop.prompt_tokens + loop.completion_tokens},
        "tool_calls": [{**record.as_json(), "arguments": record.arguments} for record in loop.records],
    }


def chunks(whole: dict[str, object]) -> Iterator[bytes]:
    """The response as server-sent events. The text comes in one piece, since it is known only after all tool calls."""
    [choice] = cast(list[dict[str, object]], whole["choices"])
    text = cast(dict[str, object], choice["message"])["content"]
    head = {**{name: whole[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    for delta, reason in (
        ({"role": "assistant", "content": text}, None),
        (dict[str, object](), choice["finish_reason"]),
    ):
        event = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _reason(episode: ToolEpisode) -> str:
    return "stop" if episode.end is EpisodeEnd.ANSWERED else "length"


def _head(model: str, kind: str) -> dict[str, object]:
    return {"id": new_id("chatcmpl"), "object": kind, "created": int(time.time()), "model": model}
