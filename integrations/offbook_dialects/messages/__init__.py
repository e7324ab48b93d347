"""Anthropic's Messages API: `/v1/messages`, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import orjson

from offbook.openai_dialect.chat_answer import Answer
from offbook.server.dialects import Dialect, DialectRequest, Translation
from offbook.server.errors import ApiError

from .answer import MessagesAnswer, MessagesCount, error_body
from .request import chat_body, read_request, settings


class Messages(Dialect):
    """The dialect."""

    paths: ClassVar[tuple[str, ...]] = (
        "/messages/?",  # Vercel's provider: its base URL has the version
        "/v1/messages(?P<count>/count_tokens)?/?",
    )
    error_paths: ClassVar[tuple[str, ...]] = ("/v1/messages/.*",)

    async def translate(self, request: DialectRequest) -> Translation:
        """The chat completion of a request. Raises ApiError."""
        body = read_request(request.body)
        model = body.model or request.path.get("model")
        if not model:
            raise ApiError(400, "model: name one", "model", "invalid_value")
        chat = chat_body(body, model, request.sampled)
        if request.path.get("count"):
            return Translation(chat | {"max_tokens": 1}, MessagesCount(model), recorded=False)
        return Translation(chat | settings(body), MessagesAnswer(model))

    def refusal(self, error: ApiError) -> Answer:
        """An error in Anthropic's format."""
        return error_body(error)

    def joined(self, events: Sequence[Answer]) -> Answer:
        """https://docs.claude.com/en/docs/build-with-claude/streaming: deltas of text, thoughts and the JSON of inputs."""
        whole: Answer = {}
        blocks: dict[int, Answer] = {}
        inputs: dict[int, str] = {}
        for event in events:
            kind, index = event.get("type"), event.get("index", 0)
            if kind == "message_start":
                whole = dict(event["message"])
            elif kind == "content_block_start":
                blocks[index] = dict(event["content_block"])
            elif kind == "content_block_delta":
                delta = cast(Answer, event["delta"])
                inputs[index] = inputs.get(index, "") + (delta.get("partial_json") or "")
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        blocks[index][name] = (blocks[index].get(name) or "") + delta[name]
            elif kind == "message_delta":
                newer = cast(Answer, event.get("usage") or {})  # cumulative; some servers send 0 for what came first
                usage = {
                    **cast(Answer, whole.get("usage") or {}),
                    **{name: count for name, count in newer.items() if count},
                }
                whole |= {**event["delta"], "usage": usage}
        for index, block in blocks.items():
            if block.get("type") == "tool_use":
                block["input"] = orjson.loads(inputs.get(index) or "{}")
        return whole | {"content": [blocks[index] for index in sorted(blocks)]}

    def next_turn(self, body: Answer, answer: Answer) -> Answer:
        """The messages with the answer's."""
        return {"messages": [*body["messages"], {"role": "assistant", "content": answer["content"]}]}
