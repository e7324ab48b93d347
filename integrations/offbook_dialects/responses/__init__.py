"""OpenAI's Responses API: `/v1/responses`. The recorded calls are the store of earlier responses and items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from offbook.openai_dialect.chat_answer import Answer
from offbook.server.dialects import Dialect, DialectRequest, Translation
from offbook.server.errors import ApiError

from .answer import ResponseAnswer, error_body
from .items import Offered, a_list, a_text
from .request import chat_body

SEALED = "reasoning.encrypted_content"


class Responses(Dialect):
    """The dialect."""

    paths: ClassVar[tuple[str, ...]] = ("/v1/responses/?",)

    async def translate(self, request: DialectRequest) -> Translation:
        """The chat completion of a request. Raises ApiError, also where an earlier response or item is not recorded."""
        body, offered = request.body, Offered()
        model = request.path.get("model") or a_text(body.get("model"), "model")
        chat = await chat_body(request, model, offered)
        sealed = SEALED in a_list(body.get("include") or [], "include")
        if chat.get("stream"):
            chat["stream_options"] = {"include_usage": True}
        return Translation(chat, ResponseAnswer(body, model, offered, sealed=sealed))

    def refusal(self, error: ApiError) -> Answer:
        """An error in OpenAI's format, with the field of this API."""
        return error_body(error)

    def joined(self, events: Sequence[Answer]) -> Answer:
        """The response of the last event that has one."""
        return next(event["response"] for event in reversed(events) if "response" in event)

    def next_turn(self, body: Answer, answer: Answer) -> Answer:
        """The input with the answer's items."""
        sent = body["input"]
        items = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
        return {"input": [*items, *answer["output"]]}
