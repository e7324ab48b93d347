"""Completions of a prompt (`/v1/completions`), by what answers chat completions."""

from __future__ import annotations

import json

from offbook.base.server_sent_events import event
from offbook.server.dialects.completions import CompletionAnswer

from .asgi import Body, Send

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def as_chat(body: Body) -> Body:
    """The request as that of a chat whose only message is the prompt."""
    prompt = body["prompt"]
    shown = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"
    messages = [{"role": "prompt", "content": shown}]
    return body | {"messages": messages, "logprobs": body.get("logprobs") is not None}


def as_completions(send: Send) -> Send:
    """Send the chat completions, and the chunks of one, that are sent with the returned function as completions of a prompt."""

    def written(raw: bytes) -> bytes:
        answer: Body = json.loads(raw)
        return json.dumps(CompletionAnswer().whole(answer, "") if "choices" in answer else answer).encode()

    async def rewriting_send(message: Body) -> None:
        raw: bytes = message.get("body") or b""
        if raw.startswith(b"data: {"):
            message = {**message, "body": event(written(raw.removeprefix(b"data: ")))}
        elif raw.startswith(b"{") and not message.get("more_body"):  # neither [DONE] nor a body that breaks off
            message = {**message, "body": written(raw)}
        await send(message)

    return rewriting_send
