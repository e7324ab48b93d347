"""Earlier responses of OpenAI's Responses API, read from the record: a response by its id, and its input items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from offbook.base.types import Call, CallStatus, Json, Message
from offbook.openai_dialect.chat_answer import Answer, usage

from ..calls.sampled_calls import SampledCalls
from .json_fields import unsupported
from .response_events import ResponseAnswer
from .response_items import Offered, output_items, recorded_response

_ENDED = {CallStatus.CANCELLED: "cancelled", CallStatus.FAILED: "failed"}
_ROLES = ("user", "system", "developer")


async def stored_response(name: str, recorded: SampledCalls, *, sealed: bool) -> Answer:
    """The response `name`. Tools have the names that the model saw. Raises ApiError 404 if it is not recorded."""
    call, instructed = await _found(name, recorded)
    body: Answer = {
        "instructions": call.messages[0].get("content") if instructed else None,
        "temperature": call.sampling.temperature,
        "top_p": call.sampling.top_p,
        "tools": [_tool(tool["function"]) for tool in call.tools or ()],
    }
    output = call.outputs[0]
    choice = {"message": output.message, "finish_reason": output.finish_reason}
    used = usage(len(call.prompt_ids), sum(len(output.token_ids) for output in call.outputs))
    answer = ResponseAnswer(body, call.model, Offered(), sealed=sealed)
    response = answer.whole({"choices": [choice], "usage": used}, call.id) | {"created_at": int(call.started_at)}
    if "completed_at" in response:
        response["completed_at"] = int(call.ended_at)
    if (status := _ENDED.get(call.status)) is not None:
        error = {"code": "server_error", "message": call.error or "the call failed"} if status == "failed" else None
        response |= {"status": status, "error": error}
    return response


async def stored_input(
    name: str, recorded: SampledCalls, *, order: Literal["asc", "desc"], limit: int, after: str | None
) -> Answer:
    """A page of the items of a response's prompt, without its instructions. Raises ApiError 404 if it is not recorded."""
    call, instructed = await _found(name, recorded)
    messages = call.messages[1:] if instructed else call.messages
    items = [item for index, message in enumerate(messages) for item in _items(message, f"in_{call.id}_{index}")]
    if order == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if after is not None and after not in names:
        raise unsupported(f"after: the response has no input item {after!r}", "after", 404, "item_not_found")
    first = 0 if after is None else names.index(after) + 1
    page = items[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(items),
    }


async def _found(name: str, recorded: SampledCalls) -> tuple[Call, bool]:
    found = await recorded_response(name, recorded)
    if found is None:
        message = f"Response with id {name!r} not found: it is not among the recorded calls"
        raise unsupported(message, "response_id", 404, "response_not_found")
    return found


def _tool(function: Mapping[str, Json]) -> Answer:
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function"} | {field: function.get(field) for field in fields}


def _items(message: Message, mark: str) -> list[Answer]:
    """A message as items. `mark`: ends their ids, which are not those of the call that sampled the message."""
    role = message["role"]
    if role == "assistant":
        return output_items(message, mark, Offered(), sealed=False)
    parts = _parts(message.get("content"))
    if role == "tool":
        text = "".join(part.get("text") or "" for part in parts)
        result = {"call_id": message.get("tool_call_id"), "output": text, "status": "completed"}
        return [{"type": "function_call_output", "id": f"fco_{mark}"} | result]
    shown = role if role in _ROLES else "user"
    return [{"type": "message", "id": f"msg_{mark}", "role": shown, "status": "completed", "content": parts}]


def _parts(content: Json) -> list[Answer]:
    parts: list[Answer] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return [
        {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        if part["type"] == "image_url"
        else {"type": "input_text", "text": part.get("text") or ""}
        for part in parts
    ]
