"""Gemini's API: `/v1beta/models/{model}:generateContent`, `:streamGenerateContent` and `:countTokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from pydantic import ValidationError

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer
from offbook.server.dialects import Dialect, DialectRequest, Translation
from offbook.server.errors import ApiError, bad_request

from .answer import GeminiAnswer, GeminiCount, error_body
from .fields import CountTokens, GenerateContent
from .request import chat_body


class Gemini(Dialect):
    """The dialect. A path names the model and the action, in the groups `named` and `action`."""

    paths: ClassVar[tuple[str, ...]] = (
        "/v1(?:alpha|beta)?/models/(?P<named>.+):(?:(?P<count>countTokens)|(?P<action>(?:streamG|g)enerateContent))",
    )
    error_paths: ClassVar[tuple[str, ...]] = ("/v1(?:alpha|beta)/.*", "/v1/models/.+:[a-zA-Z]+")

    async def translate(self, request: DialectRequest) -> Translation:
        """The chat completion of a request. Raises ApiError."""
        count, model = request.path.get("count"), request.path.get("named") or ""
        try:
            body = _counted(request.body) if count else GenerateContent.model_validate(request.body)
        except ValidationError as error:
            raise bad_request(error, "body") from error
        chat = chat_body(body, request.sampled) | {"model": model}
        if count:
            return Translation(chat | {"max_tokens": 1, "n": 1}, GeminiCount(model), recorded=False)
        if request.path.get("action") == "streamGenerateContent":
            if request.query.get("alt") != "sse":
                raise ApiError(
                    400, "streams are server-sent events here: add ?alt=sse to the URL", "alt", "invalid_value"
                )
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return Translation(chat, GeminiAnswer(model))

    def refusal(self, error: ApiError) -> Answer:
        """An error in Google's format."""
        return error_body(error)

    def joined(self, events: Sequence[Answer]) -> Answer:
        """The parts of the first candidate, how it ended, and the usage."""
        parts: list[Answer] = []
        reason: Json = None
        usage: Json = None
        for chunk in events:
            usage = chunk.get("usageMetadata") or usage
            for candidate in cast(list[Answer], chunk.get("candidates") or [])[:1]:
                reason = candidate.get("finishReason") or reason
                parts += cast(Answer, candidate.get("content") or {}).get("parts") or []
        content = {"role": "model", "parts": parts}
        return {"candidates": [{"content": content, "finishReason": reason}], "usageMetadata": usage}

    def next_turn(self, body: Answer, answer: Answer) -> Answer:
        """The contents with the first candidate's."""
        parts = answer["candidates"][0]["content"].get("parts") or [{"text": ""}]
        return {"contents": [*body["contents"], {"role": "model", "parts": parts}]}


def _counted(body: dict[str, Json]) -> GenerateContent:
    count = CountTokens.model_validate(body)
    if count.generate_content_request is not None:
        return count.generate_content_request
    if not count.contents:
        raise ApiError(400, "countTokens needs contents or generateContentRequest", "contents", "invalid_value")
    return GenerateContent(contents=count.contents)
