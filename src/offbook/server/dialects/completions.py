"""OpenAI's `/v1/completions`: a prompt that no chat template changes."""

from __future__ import annotations

from typing import cast

import orjson

from offbook.base.server_sent_events import event
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import COMPLETION, DONE, Answer, completion_logprobs

from ..calls.chat_answer import ChatRendering
from ..calls.prompt_request import PromptRequest
from ..errors import ApiError
from .dialect import DialectRequest, Translation


class Completions:
    """The dialect. Its body is that of a `PromptRequest`."""

    async def translate(self, request: DialectRequest) -> Translation:
        """The request as it is."""
        return Translation(request.body, CompletionAnswer(), request=PromptRequest)

    def refusal(self, error: ApiError) -> Answer:
        """An error in OpenAI's format."""
        return error.body()


class CompletionAnswer(ChatRendering):
    """Chat completions in the format of completions, whole and as chunks of a stream."""

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """A complete answer. Its choices name the call."""
        return _completion(completion)

    def feed(self, chunk: Answer) -> bytes:
        """A chunk of a stream."""
        return super().feed(_completion(chunk))

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return event(orjson.dumps(self.refusal(error))) + DONE

    def refusal(self, error: ApiError) -> Answer:
        """The body of an error in OpenAI's format. The prompt of a completion is no field `messages`."""
        body = error.body()
        return {"error": body["error"] | {"param": "prompt"}} if error.param == "messages" else body


def _completion(chat: Answer) -> Answer:
    ids: Json = chat.get("prompt_token_ids")
    kept = {name: value for name, value in chat.items() if name != "prompt_token_ids"}
    choices = [_choice(item) | ({} if ids is None else {"prompt_token_ids": ids}) for item in chat["choices"]]
    return kept | {"object": COMPLETION, "choices": choices}


def _choice(choice: Answer) -> Answer:
    content = cast(Answer, choice.get("message") or choice.get("delta") or {})
    kept = {name: value for name, value in choice.items() if name not in ("message", "delta", "logprobs")}
    return kept | {"text": content.get("content") or "", "logprobs": _logprobs(choice.get("logprobs"))}


def _logprobs(logprobs: Answer | None) -> Answer | None:
    """Logprobs in the form of completions. Those of a replayed call have the form of chats."""
    if logprobs is None or "content" not in logprobs:
        return logprobs
    content = cast(list[Answer], logprobs["content"])
    return completion_logprobs((item["token"], item["logprob"], {}) for item in content)
