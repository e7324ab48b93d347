"""Chat completions in the format of OpenAI's `/v1/completions`."""

from __future__ import annotations

from typing import cast

import orjson

from offbook.base.server_sent_events import EVENT_STREAM, event
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import DONE, Answer
from offbook.openai_dialect.completions import COMPLETION, completion_logprobs


class CompletionAnswer:
    """Chat completions in the format of completions, whole and as chunks of a stream."""

    media_type = EVENT_STREAM

    def whole(self, completion: Answer, call_id: str | None) -> Answer:
        """A complete answer. Its choices name the call."""
        return _completion(completion)

    def start(self, call_id: str | None) -> bytes:
        """The beginning of a stream: none."""
        return b""

    def feed(self, chunk: Answer) -> bytes:
        """A chunk of a stream."""
        return event(orjson.dumps(_completion(chunk)))

    def end(self) -> bytes:
        """The end of a stream."""
        return DONE

    def broken(self, error: Answer, status: int) -> bytes:
        """The end of a stream that failed."""
        return event(orjson.dumps(self.refusal(error, status))) + DONE

    def refusal(self, error: Answer, status: int) -> Answer:
        """The body of an error, in OpenAI's format as it is. The prompt of a completion is no field `messages`."""
        return {"error": error | {"param": "prompt"} if error["param"] == "messages" else error}


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
