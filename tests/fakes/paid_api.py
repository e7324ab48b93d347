"""A paid provider that answers as OpenAI's, Anthropic's and Google's APIs do, whole and streamed, with text or a tool call."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from offbook.testing.asgi import Receive, Scope, Send

Json = dict[str, Any]
ARGUMENTS = '{"box": "4821"}'
CHAT_USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 7,
    "total_tokens": 37,
    "prompt_tokens_details": {"cached_tokens": 10, "audio_tokens": 0},
}
RESPONSE_USAGE = {
    "input_tokens": 30,
    "input_tokens_details": {"cached_tokens": 10},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 37,
}
GEMINI_USAGE = {
    "promptTokenCount": 30,
    "cachedContentTokenCount": 10,
    "candidatesTokenCount": 7,
    "totalTokenCount": 37,
}


@dataclass
class PaidApi:
    """`text`: what it says; with `tools` in a request it calls `look_up` instead. `status`: of all answers, if not 200.
    `cut`: streams break off after the first piece. `wait`: seconds before an answer. `usage`: what it says in place of its
    own numbers, in every API."""

    text: str = "It is on its way."
    status: int = 200
    cut: bool = False
    wait: float = 0.0
    usage: Any = None
    asked: list[tuple[str, dict[str, str], Json]] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        body: Json = json.loads(raw or b"{}")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path, query = scope["path"], scope["query_string"].decode()
        self.asked.append((path + (f"?{query}" if query else ""), headers, body))
        await asyncio.sleep(self.wait)
        if self.status != 200:
            error = {"error": {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}}
            return await self._send(send, self.status, [json.dumps(error).encode()], [(b"retry-after", b"7")])
        if path == "/v1/models":
            return await self._send(send, 200, [b'{"object": "list", "data": []}'])
        streamed = bool(body.get("stream")) or path.endswith(":streamGenerateContent")
        pieces = self.answer(path, body, streamed=streamed)
        await self._send(send, 200, pieces, [(b"x-request-id", b"req_1")], streamed=streamed)

    async def _send(
        self,
        send: Send,
        status: int,
        pieces: list[bytes],
        headers: list[tuple[bytes, bytes]] | None = None,
        *,
        streamed: bool = False,
    ) -> None:
        self.sent += [b"".join(pieces)]
        kind = b"text/event-stream; charset=utf-8" if streamed else b"application/json"
        own = [(b"content-type", kind), *(headers or [])]
        if not streamed:
            own.append((b"content-length", str(len(pieces[0])).encode()))
        await send({"type": "http.response.start", "status": status, "headers": own})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if self.cut:
                raise ConnectionError("cut")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def answer(self, path: str, body: Json, *, streamed: bool) -> list[bytes]:
        """The pieces of an answer."""
        tool = bool(body.get("tools"))
        if path.endswith("/chat/completions"):
            return self._chat(body, streamed=streamed, tool=tool)
        if path.endswith("/responses"):
            return self._response(body, streamed=streamed, tool=tool)
        if path.endswith("/messages"):
            return self._message(body, streamed=streamed, tool=tool)
        return self._gemini(streamed=streamed, tool=tool)

    def _chat(self, body: Json, *, streamed: bool, tool: bool) -> list[bytes]:
        function = {"name": "look_up", "arguments": ARGUMENTS}
        call = {"id": "call_1", "type": "function", "function": function}
        reason = "tool_calls" if tool else "stop"
        head = {"id": "chatcmpl-1", "created": 1, "model": "gpt-4.1-2025-04-14", "system_fingerprint": "fp_1"}
        if not streamed:
            message: Json = {"role": "assistant", "content": None if tool else self.text, "refusal": None}
            message |= {"annotations": []} | ({"tool_calls": [call]} if tool else {})
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": self.usage or CHAT_USAGE}
            return [json.dumps(whole, indent=2).encode()]
        deltas: list[Json] = [{"role": "assistant", "content": None if tool else "", "refusal": None}]
        if tool:
            deltas.append({"tool_calls": [{"index": 0, **call, "function": function | {"arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in halves(ARGUMENTS)]
        else:
            deltas += [{"content": part} for part in halves(self.text)]
        chunk = head | {"object": "chat.completion.chunk", "usage": None}
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason})
        events = [chunk | {"choices": [choice]} for choice in choices]
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(chunk | {"choices": [], "usage": self.usage or CHAT_USAGE})
        return [*map(event, events), b"data: [DONE]\n\n"]

    def _response(self, body: Json, *, streamed: bool, tool: bool) -> list[bytes]:
        item: Json = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1"}
        item |= {"name": "look_up", "arguments": ARGUMENTS}
        if not tool:
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": self.text}
            item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        whole = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "output": [item]}
        whole |= {
            "model": "gpt-4.1-2025-04-14",
            "usage": self.usage or RESPONSE_USAGE,
            "error": None,
            "incomplete_details": None,
        }
        whole |= {"instructions": None, "metadata": {}, "parallel_tool_calls": True, "tools": body.get("tools") or []}
        whole |= {"tool_choice": "auto", "temperature": 1.0, "top_p": 1.0}
        if not streamed:
            return [json.dumps(whole).encode()]
        begun = whole | {"status": "in_progress", "output": [], "usage": None}
        events = [
            {"type": "response.created", "response": begun, "sequence_number": 0},
            {"type": "response.output_item.done", "output_index": 0, "item": item, "sequence_number": 1},
            {"type": "response.completed", "response": whole, "sequence_number": 2},
        ]
        return [event(item, item["type"]) for item in events]

    def _message(self, body: Json, *, streamed: bool, tool: bool) -> list[bytes]:
        block: Json = {"type": "text", "text": self.text}
        if tool:
            block = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": json.loads(ARGUMENTS)}
        reason = "tool_use" if tool else "end_turn"
        usage = self.usage or {
            "input_tokens": 20,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 10,
            "output_tokens": 7,
        }
        whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": [block]}
        whole |= {"stop_reason": reason, "stop_sequence": None, "usage": usage}
        if not streamed:
            return [json.dumps(whole).encode()]
        begun = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 1}}
        empty = block | ({"input": {}} if tool else {"text": ""})
        kind, name = ("input_json_delta", "partial_json") if tool else ("text_delta", "text")
        deltas = [{"type": kind, name: part} for part in halves(ARGUMENTS if tool else self.text)]
        events: list[Json] = [{"type": "message_start", "message": begun}]
        events.append({"type": "content_block_start", "index": 0, "content_block": empty})
        events.append({"type": "ping"})
        events += [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": reason, "stop_sequence": None}
        events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": usage["output_tokens"]}})
        events.append({"type": "message_stop"})
        return [event(item, item["type"]) for item in events]

    def _gemini(self, *, streamed: bool, tool: bool) -> list[bytes]:
        parts: list[Json] = [{"text": part} for part in halves(self.text)]
        if tool:
            parts = [{"functionCall": {"name": "look_up", "args": json.loads(ARGUMENTS)}}]
        head = {"modelVersion": "gemini-2.5-flash", "responseId": "r1"}
        if not streamed:
            shown = parts if tool else [{"text": self.text}]
            candidate = {"content": {"parts": shown, "role": "model"}, "finishReason": "STOP", "index": 0}
            return [
                json.dumps({"candidates": [candidate], "usageMetadata": self.usage or GEMINI_USAGE, **head}).encode()
            ]
        chunks: list[Json] = [
            {"candidates": [{"content": {"parts": [part], "role": "model"}, "index": 0}], **head} for part in parts
        ]
        chunks[-1]["candidates"][0]["finishReason"] = "STOP"
        chunks[-1]["usageMetadata"] = self.usage or GEMINI_USAGE
        return list(map(event, chunks))


def event(value: Json, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]
