"""Gemini's API: `/v1beta/models/{model}:generateContent`, `:streamGenerateContent` and `:countTokens`."""

from __future__ import annotations

from pydantic import ValidationError

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

from ..errors import ApiError, bad_request
from .dialect import DialectRequest, Translation
from .gemini_answers import GeminiRendering, error_body
from .gemini_fields import CountTokens, GenerateContent
from .gemini_requests import chat_body


class Gemini:
    """The dialect. A path names the model and the action, in the groups `named` and `action`."""

    async def translate(self, request: DialectRequest) -> Translation:
        """The chat completion of a request. Raises ApiError."""
        action, model = request.path.get("action"), request.path.get("named") or ""
        try:
            asked = _counted(request.body) if action == "countTokens" else GenerateContent.model_validate(request.body)
        except ValidationError as error:
            raise bad_request(error, "body") from error
        chat = chat_body(asked, request.said) | {"model": model}
        if action == "countTokens":
            return Translation(chat | {"max_tokens": 1, "n": 1}, GeminiCount(model), recorded=False)
        if action == "streamGenerateContent":
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return Translation(chat, GeminiRendering(model, events=request.query.get("alt") == "sse"))

    def refusal(self, error: ApiError) -> Answer:
        """An error in Google's format."""
        return error_body(error)


class GeminiCount(GeminiRendering):
    """The number of a prompt's tokens, by a call that samples a single token."""

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The number."""
        tokens: Json = completion["usage"]["prompt_tokens"]
        return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}


def _counted(body: dict[str, Json]) -> GenerateContent:
    """The request whose prompt is counted: a whole one, or turns alone."""
    count = CountTokens.model_validate(body)
    if count.generate_content_request is not None:
        return count.generate_content_request
    if not count.contents:
        raise ApiError(400, "countTokens needs contents or generateContentRequest", "contents", "invalid_value")
    return GenerateContent(contents=count.contents)
