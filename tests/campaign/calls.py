"""A call of a model in each API: its request, and what its answer, whole or streamed, acknowledges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Wish:
    """A call to be made."""

    model: str
    text: str
    length: int  # tokens at most
    seed: int
    stream: bool


@dataclass(frozen=True)
class Door:
    """An API. `answered`: of the bodies of an answer (one, or the events of a stream): the call's id with its tokens, or with
    its text where the API has no tokens; None without the end that acknowledges a stream."""

    path: Callable[[Wish], str]
    body: Callable[[Wish], Body]
    answered: Callable[[list[Body]], Body | None]


def _sampled(wish: Wish) -> Body:
    return {"temperature": 1.0, "max_tokens": wish.length, "seed": wish.seed, "stream": wish.stream}


def _chat_body(wish: Wish) -> Body:
    said = [{"role": "user", "content": wish.text}]
    return {"model": wish.model, "messages": said, "return_token_ids": True} | _sampled(wish)


def _prompt_body(wish: Wish) -> Body:
    return {"model": wish.model, "prompt": wish.text, "return_token_ids": True} | _sampled(wish)


def _messages_body(wish: Wish) -> Body:
    said = [{"role": "user", "content": wish.text}]
    return {"model": wish.model, "messages": said} | {k: v for k, v in _sampled(wish).items() if k != "seed"}


def _responses_body(wish: Wish) -> Body:
    sampled: Body = {"temperature": 1.0, "max_output_tokens": max(16, wish.length), "stream": wish.stream}
    return {"model": wish.model, "input": wish.text} | sampled


def _gemini_body(wish: Wish) -> Body:
    config = {"temperature": 1.0, "maxOutputTokens": wish.length, "seed": wish.seed}
    return {"contents": [{"role": "user", "parts": [{"text": wish.text}]}], "generationConfig": config}


def _gemini_path(wish: Wish) -> str:
    return f"/v1beta/models/{wish.model}:" + ("streamGenerateContent?alt=sse" if wish.stream else "generateContent")


def _tokens(answers: list[Body]) -> Body | None:
    """A stream is acknowledged by its finishing chunk."""
    tokens: list[int] = []
    for answer in answers:
        for choice in answer["choices"]:
            tokens += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                return {"id": choice["offbook"]["call_id"], "tokens": tokens}
    return None


def _message(answers: list[Body]) -> Body | None:
    if answers[-1]["type"] == "message":
        return {"id": answers[-1]["id"][4:], "text": "".join(block["text"] for block in answers[-1]["content"])}
    if answers[-1]["type"] != "message_stop":
        return None
    deltas = (answer["delta"]["text"] for answer in answers if answer["type"] == "content_block_delta")
    return {"id": answers[0]["message"]["id"][4:], "text": "".join(deltas)}


def _response(answers: list[Body]) -> Body | None:
    response = answers[-1].get("response", answers[-1])
    if response.get("status") not in ("completed", "incomplete"):
        return None
    texts = (part["text"] for item in response["output"] for part in item["content"])
    return {"id": response["id"][5:], "text": "".join(texts)}


def _candidate(answers: list[Body]) -> Body | None:
    if not any("finishReason" in each for each in answers[-1]["candidates"]):
        return None
    each = (candidate for answer in answers for candidate in answer["candidates"])
    texts = (part.get("text", "") for one in each for part in one.get("content", {}).get("parts", ()))
    return {"id": answers[-1]["responseId"], "text": "".join(texts)}


DOORS = {
    "chat": Door(lambda _: "/v1/chat/completions", _chat_body, _tokens),
    "completions": Door(lambda _: "/v1/completions", _prompt_body, _tokens),
    "messages": Door(lambda _: "/v1/messages", _messages_body, _message),
    "responses": Door(lambda _: "/v1/responses", _responses_body, _response),
    "gemini": Door(_gemini_path, _gemini_body, _candidate),
}


def refusal(answers: list[Body]) -> Body | None:
    """The event of a stream that says why it failed, in any API."""
    return next((each for each in answers if each.get("error") or each.get("type") == "response.failed"), None)
