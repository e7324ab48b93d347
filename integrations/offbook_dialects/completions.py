"""OpenAI's `/v1/completions`: a prompt that no chat template changes, as text or as token ids.

A completion is sampled and recorded as a chat completion is. Its one message has the role `prompt`, which no chat has:
nobody said it, and no template wrote its tokens. The sampler is asked at its own `/v1/completions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbook.base.server_sent_events import event
from offbook.base.types import Json, Message
from offbook.openai_dialect.chat_answer import CHUNK, DEFAULT_TOKENS, DONE, OF_CHATS, WHOLE, Answer, completion_of
from offbook.openai_dialect.chat_fields import ChatFields, SampledFields
from offbook.server.calls.chat_answer import Rendering
from offbook.server.calls.chat_request import ChatRequest
from offbook.server.calls.sampled_answer import TOKEN_IDS
from offbook.server.dialects import Dialect, DialectRequest, Translation
from offbook.server.errors import ApiError, bad_request
from offbook.server.sampler.transport import Quirks

PROMPT = "prompt"
"""The role of the message that is a prompt, and the field of a request."""
_PLACEHOLDER: list[Json] = [{"role": "user", "content": ""}]
"""Stands for the prompt while the other fields are validated as those of a chat."""
_REFUSED = {
    "echo": "the answer has the sampled tokens only; the prompt's are those of `return_token_ids`",
    "suffix": "the engines continue a prompt and fill nothing in: put both ends into the prompt",
    "best_of": "every choice is returned and recorded: use n, and choose among the answers",
}
_SHARED = (SampledFields.model_fields.keys() - OF_CHATS) | {
    "model",
    "stream_options",
    "logit_bias",
    "add_special_tokens",
    "user",
    "offbook",
}
"""Fields that mean the same for a prompt and for messages."""


class CompletionFields(BaseModel):
    """The fields of a request for a completion that chat completions do not have, or have in another form."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


@dataclass(frozen=True)
class PromptRequest(ChatRequest):
    """A validated request for a completion, in the form of a chat whose one message is the prompt."""

    @classmethod
    def of(
        cls,
        body: dict[str, Json],
        headers: Mapping[str, str],
        url_trajectory: str | None = None,
        quirks: Quirks | None = None,
        size: int = 0,
    ) -> Self:
        """Parse a body. Raises ApiError 400 or 413, naming the field."""
        try:
            fields = CompletionFields.model_validate(body)
        except ValidationError as error:
            raise bad_request(error, "body") from error
        _check(body, fields)
        prompt = prompt_message(fields.prompt)
        chat = {name: value for name, value in body.items() if name in _SHARED or name not in ChatFields.model_fields}
        for name in ("prompt", "logprobs", *_REFUSED):
            chat.pop(name, None)
        chat |= {"max_tokens": fields.max_tokens or DEFAULT_TOKENS, "messages": _PLACEHOLDER}
        if fields.logprobs is not None:
            chat |= {"logprobs": True, "top_logprobs": fields.logprobs}
        request = super().of(chat, headers, url_trajectory, quirks, size)
        return replace(request, body=request.body | {"messages": [prompt]})

    def payload(self, adapter: str, block: int | None = None) -> dict[str, Json]:
        """The sampler's request: a prompt instead of messages. Completions have no logprobs in a flat list."""
        chat = super().payload(adapter, block)
        (message,) = self.messages
        gone = ("messages", "logprobs", "top_logprobs", "vllm_xargs")
        sent = {name: value for name, value in chat.items() if name not in gone}
        if chat.get("logprobs"):
            sent["logprobs"] = chat.get("top_logprobs") or 0
        return sent | {PROMPT: message.get("token_ids") or message["content"]}

    def unlimited(self, payload: dict[str, Json]) -> dict[str, Json]:
        """A payload for an answer up to the end of the context. Without the field it would have 16 tokens."""
        return payload | {"max_tokens": None}

    def as_chat(self, answer: Answer) -> Answer:
        """The sampler's completion, or a chunk of one, as that of a chat. Its logprobs keep their form."""
        if "choices" not in answer:
            return answer
        items = cast(list[Answer], answer["choices"])
        choices = [_chat_choice(item, whole=not self.stream) for item in items]
        chat = answer | {"object": CHUNK if self.stream else WHOLE, "choices": choices}
        prompts = [item["prompt_token_ids"] for item in items if item.get("prompt_token_ids")]
        return chat | {"prompt_token_ids": prompts[0]} if prompts else chat


def _check(body: dict[str, Json], fields: CompletionFields) -> None:
    harmless = {"echo": False, "suffix": "", "best_of": fields.n or 1}
    for name, reason in _REFUSED.items():
        if body.get(name) not in (None, harmless[name]):
            raise ApiError(400, f"{name} is not supported: {reason}", name, "unsupported_field")
    own = CompletionFields.model_fields.keys() | _SHARED
    if of_chats := [name for name in body if name in ChatFields.model_fields and name not in own]:
        message = f"{of_chats[0]} is a field of chat completions: leave it out, or use /v1/chat/completions"
        raise ApiError(400, message, of_chats[0], "unsupported_field")


def prompt_message(prompt: str | list[str | int | list[int]]) -> Message:
    """How a prompt is recorded. Raises ApiError 400 for several prompts: a call has one.

    >>> prompt_message("one"), prompt_message([3, 5])
    ({'role': 'prompt', 'content': 'one'}, {'role': 'prompt', 'content': '2 token ids', 'token_ids': [3, 5]})
    """
    one = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int) else prompt
    if isinstance(one, str) and one:
        return {"role": PROMPT, "content": one}
    ids = [item for item in one if isinstance(item, int) and 0 <= item < TOKEN_IDS] if isinstance(one, list) else []
    if not ids or len(ids) < len(one):
        message = "prompt: one text, or one list of token ids, that is not empty; send one request for each prompt"
        raise ApiError(400, f"{message} (LangChain: batch_size=1)", PROMPT, "invalid_value")
    return {"role": PROMPT, "content": f"{len(ids)} token ids", "token_ids": ids}


def _chat_choice(choice: Answer, whole: bool) -> Answer:
    kept = {name: value for name, value in choice.items() if name not in ("text", "prompt_token_ids")}
    if whole:
        return kept | {"message": {"role": "assistant", "content": choice["text"]}}
    return kept | {"delta": {"content": choice["text"]}}


class Completions(Dialect):
    """The dialect. Its body is that of a `PromptRequest`."""

    paths: ClassVar[tuple[str, ...]] = ("/v1/completions/?",)

    async def translate(self, request: DialectRequest) -> Translation:
        """The request as it is."""
        return Translation(request.body, CompletionAnswer(), request=PromptRequest)

    def joined(self, events: Sequence[Answer]) -> Answer:
        """The last chunk with a usage."""
        return next((chunk for chunk in reversed(events) if chunk.get("usage")), events[-1])

    def next_turn(self, body: Answer, answer: Answer) -> Answer:
        """There is none."""
        raise ApiError(400, "a completion of a prompt is no conversation", code="no_conversation")


class CompletionAnswer(Rendering):
    """Chat completions in the format of completions, whole and as chunks of a stream."""

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """A complete answer. Its choices name the call."""
        return completion_of(completion)

    def feed(self, chunk: Answer) -> bytes:
        """A chunk of a stream."""
        return super().feed(completion_of(chunk))

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return event(orjson.dumps(self.refusal(error))) + DONE

    def refusal(self, error: ApiError) -> Answer:
        """The body of an error. The prompt of a completion is no field `messages`."""
        body = error.body()
        return {"error": body["error"] | {"param": PROMPT}} if error.param == "messages" else body
