"""Images for a base that reads text alone: refused in the form of each API, with the place of the image."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from offbook import LocalBackend, TrainableModel
from offbook.base.types import new_id

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PIXEL}"
BASE64 = {"type": "base64", "media_type": "image/png", "data": PIXEL}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat completions": (
        "v1/chat/completions",
        {"messages": user({"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": URL}})},
    ),
    "Messages": (
        "v1/messages",
        {"max_tokens": 8, "messages": user({"type": "text", "text": "what?"}, {"type": "image", "source": BASE64})},
    ),
    "Responses": (
        "v1/responses",
        {"input": user({"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": URL})},
    ),
    "Gemini": (
        "v1beta/models/{model}:generateContent",
        {
            "contents": [
                {
                    "role": "user",
                    "parts": [{"text": "what?"}, {"inlineData": {"mimeType": "image/png", "data": PIXEL}}],
                }
            ]
        },
    ),
}


@pytest.mark.parametrize("api", REQUESTS)
async def test_an_image_is_refused_where_the_base_reads_text_alone(local_backend: LocalBackend, api: str) -> None:
    model = TrainableModel(new_id("agent"), base_model="tiny", backend=local_backend)
    await model.register()
    server = await model.api()
    path, body = REQUESTS[api]
    trajectory = new_id("traj")
    headers = {"authorization": f"Bearer {server.key}"}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120, headers=headers) as http:
        for streamed in (False, True):
            place = path.format(model=model.name)
            sent = body | ({} if api == "Gemini" else {"model": model.name, "stream": streamed})
            if streamed and api == "Gemini":
                place = place.replace(":generateContent", ":streamGenerateContent?alt=sse")
            answer = await http.post(f"/t/{trajectory}/{place}", json=sent)
            said = answer.json()
            error = said["error"]
            assert answer.status_code == 400, answer.text
            assert error["message"].startswith(
                "messages.0.content.1: only text parts are supported (got one of type 'image_url'"
            )
            assert PIXEL not in error["message"]
            if api == "Messages":
                assert (said["type"], error["type"]) == ("error", "invalid_request_error")
            elif api == "Gemini":
                assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
            else:
                assert error["param"] == ("input" if api == "Responses" else "messages")
        recorded = await http.get(f"/api/trajectories/{trajectory}")
        calls = recorded.json()["calls"]
        assert [(call["status"], call["outputs"]) for call in calls] == [("failed", [])] * 2, calls
