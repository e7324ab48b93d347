"""The items of OpenAI's Responses API, as chat messages and back.

A turn of the model is one chat message, but several items: its thoughts, its text, each of its tool calls. Their ids name the
recorded call, so that a turn is put together again, and an item that a client names by its id alone is read from the record.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import orjson

from offbook.base.types import Call, Json, Message
from offbook.openai_dialect.chat_answer import Answer
from offbook.openai_dialect.tool_arguments import arguments_object
from offbook.server.calls.sampled_calls import SampledCalls, TrajectoryCalls
from offbook.server.errors import ApiError, shortened

_ID = re.compile(r"(?P<kind>resp|msg|rs|fc)_(?P<call>call-[0-9a-f]+)(?:_(?P<rest>\d+|i))?")
_SEALED = "offbook-thought:"
"""How the encrypted content of a reasoning item begins. It hides nothing: the model's thoughts are the client's own."""


@dataclass
class Offered:
    """The tools of a request that a chat completion has in another form."""

    custom: set[str] = field(default_factory=set[str])
    """Names of tools that take free text: functions with one string, `input`."""
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Function name -> its namespace and its name there."""


# ---- the model's turn as items


def response_id(call_id: str, instructed: bool) -> str:
    """The id of a response. It says whether the call's first message is `instructions`, which no later response inherits."""
    return f"resp_{call_id}_i" if instructed else f"resp_{call_id}"


def output_items(message: Mapping[str, Json], call_id: str, offered: Offered, sealed: bool) -> list[Answer]:
    """The items of an answer. `sealed`: with the thoughts as encrypted content too, for clients that keep only this."""
    items: list[Answer] = []
    if thought := thought_of(message):
        items.append(reasoning_item(call_id, thought, sealed))
    calls: list[Answer] = message.get("tool_calls") or []
    if message.get("content") or not calls:
        items.append(text_item(f"msg_{call_id}", message.get("content") or ""))
    return items + [call_item(call, f"fc_{call_id}_{index}", offered) for index, call in enumerate(calls)]


def thought_of(message: Mapping[str, Json]) -> str | None:
    """The thoughts of a message or delta; engines name the field differently."""
    return message.get("reasoning") or message.get("reasoning_content")


def reasoning_item(call_id: str, thought: str, sealed: bool, status: str = "completed") -> Answer:
    """An item of thoughts."""
    content = [{"type": "reasoning_text", "text": thought}] if thought else []
    item = {"type": "reasoning", "id": f"rs_{call_id}", "summary": [], "content": content, "status": status}
    return item | {"encrypted_content": _SEALED + base64.b64encode(thought.encode()).decode()} if sealed else item


def text_item(item_id: str, text: str | None, status: str = "completed") -> Answer:
    """An item of text; None: its part has not begun."""
    content = [] if text is None else [text_part(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> Answer:
    """The only part of a text item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: Answer, item_id: str, offered: Offered, status: str = "completed") -> Answer:
    """An item of a tool call."""
    raw: str = call["function"]["arguments"]
    space, name = offered.spaces.get(call["function"]["name"], (None, call["function"]["name"]))
    item: Answer = {"id": item_id, "call_id": call["id"], "name": name, "status": status}
    if call["function"]["name"] in offered.custom:
        value = arguments_object(raw)
        plain = value.keys() == {"input"} and isinstance(value["input"], str)
        item |= {"type": "custom_tool_call", "input": value["input"] if plain else raw}
    else:
        item |= {"type": "function_call", "arguments": raw}
    return item if space is None else item | {"namespace": space}


# ---- items as messages


async def earlier_messages(response: str, recorded: SampledCalls) -> list[Message]:
    """The conversation up to and with a response, without its instructions. Raises ApiError 404 if it is not recorded."""
    recorded_call = await recorded_response(response, recorded)
    if recorded_call is None:
        raise unsupported(
            f"Previous response with id {response!r} not found: it is not among the recorded calls",
            "previous_response_id",
            404,
            "previous_response_not_found",
        )
    call, instructed = recorded_call
    return [*call.messages[1 if instructed else 0 :], call.outputs[0].message]


async def recorded_response(response: str, recorded: SampledCalls) -> tuple[Call, bool] | None:
    """The call behind a response's id, and whether its first message is `instructions`; None if it is not recorded."""
    match = _ID.fullmatch(response)
    call = None if match is None or match["kind"] != "resp" else await recorded.call(match["call"])
    return None if match is None or call is None or not call.outputs else (call, match["rest"] == "i")


async def input_messages(items: Sequence[Json], sampled: TrajectoryCalls, recorded: SampledCalls) -> list[Answer]:
    """The messages of input items. Raises ApiError for an item that has no place in a chat."""
    reader = _Reader(sampled)
    calls: dict[str, Call | None] = {}
    for index, value in enumerate(items):
        where = f"input[{index}]"
        item = an_object(value, where)
        if _is_reference(item):
            await _refer(item, where, recorded, calls, reader)
        else:
            reader.add(item, where)
    reader.end_results()
    return reader.messages


def results_beside_calls(messages: Sequence[Answer]) -> list[Answer]:
    """The messages with each result behind its call. This API pairs both by id, whatever stands between them, such as what a
    hook of Codex adds; a chat has nothing there. A result without a call stays where it is.

    >>> call, result = {"role": "assistant", "tool_calls": [{"id": "a"}]}, {"role": "tool", "tool_call_id": "a"}
    >>> results_beside_calls([call, {"role": "user"}, result]) == [call, result, {"role": "user"}]
    True
    """
    calls: dict[str, int] = {}
    behind: dict[int, list[Answer]] = {}
    moved: set[int] = set()
    for index, message in enumerate(messages):
        calls |= {call["id"]: index for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and (at := calls.pop(message["tool_call_id"], None)) is not None:
            behind.setdefault(at, []).append(message)
            moved.add(index)
    kept = (index for index in range(len(messages)) if index not in moved)
    return [item for index in kept for item in (messages[index], *behind.get(index, ()))]


def _is_reference(item: Answer) -> bool:
    return item.get("type") == "item_reference" or (item.get("type") is None and set(item) == {"id"})


async def _refer(
    item: Answer, where: str, recorded: SampledCalls, calls: dict[str, Call | None], reader: _Reader
) -> None:
    name = a_text(item.get("id"), f"{where}.id")
    match = _ID.fullmatch(name)
    call_id = "" if match is None else match["call"]
    if call_id and call_id not in calls:
        calls[call_id] = await recorded.call(call_id)
    call = calls.get(call_id)
    if match is None or call is None or not call.outputs:
        raise unsupported(
            f"Item with id {name!r} not found: it is not in a recorded call", where, 404, "item_not_found"
        )
    message = call.outputs[0].message
    number = int(match["rest"] or 0) if match["rest"] != "i" else 0
    tool_calls: list[Answer] = message.get("tool_calls") or []
    match match["kind"]:
        case "rs":
            reader.turn(call_id, "reasoning", thought_of(message) or "")
        case "fc" if number < len(tool_calls):
            reader.turn(call_id, "tool_calls", tool_calls[number])
        case "msg":  # a later text item of a turn is in the first one's text
            reader.turn(call_id, "content", "" if number else message.get("content") or "")
        case _:
            raise unsupported(
                f"Item with id {name!r} not found: the call has no such item", where, 404, "item_not_found"
            )


class _Reader:
    """Items in order. The items of a turn of the model become one message."""

    def __init__(self, sampled: TrajectoryCalls) -> None:
        self.messages: list[Answer] = []
        self._sampled = sampled
        self._turn: Answer | None = None
        self._of: str | None = None  # the recorded call of the open turn, if its items say so
        self._images: list[Answer] = []  # of results: they follow all results

    def add(self, item: Answer, where: str) -> None:
        kind = item.get("type") or "message"
        match kind:
            case "message" if item.get("role") == "assistant":
                self.turn(_call_of(item), "content", _plain(item.get("content"), f"{where}.content"))
            case "message":
                self._message(item, where)
            case "reasoning":
                if thought := _thought(item, where):
                    self.turn(_call_of(item), "reasoning", thought)
            case "function_call" | "custom_tool_call":
                self.turn(_call_of(item), "tool_calls", self._call(item, where))
            case "function_call_output" | "custom_tool_call_output":
                self._result(item, where)
            case _:
                raise unsupported(f"{where}: an item of type {kind!r} is not supported here", where)

    def turn(self, call_id: str | None, name: str, value: Json) -> None:
        """Add thoughts, text or a tool call of the model. Items of one recorded call are one turn, in whatever order."""
        self.end_results()
        turn = self._turn
        if turn is not None and call_id is not None and self._of is not None:
            ended = call_id != self._of
        else:
            ended = turn is None or (name != "tool_calls" and (turn["content"] is not None or "tool_calls" in turn))
        if turn is None or ended:
            turn = self._turn = {"role": "assistant", "content": None}
            self._of = None
            self.messages.append(turn)
        self._of = call_id or self._of
        if name == "tool_calls":
            turn.setdefault(name, []).append(value)
        else:
            turn[name] = (turn.get(name) or "") + value

    def end_results(self) -> None:
        """Show the images of the results so far."""
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
            self._images = []

    def _message(self, item: Answer, where: str) -> None:
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise unsupported(
                f"{where}.role must be user, assistant, system or developer, got {role!r}", f"{where}.role"
            )
        self.end_results()
        self._turn = None
        parts = _parts(item.get("content"), f"{where}.content")
        plain = len(parts) == 1 and parts[0]["type"] == "text"
        self.messages.append({"role": role, "content": parts[0]["text"] if plain else parts})

    def _result(self, item: Answer, where: str) -> None:
        self._turn = None
        call_id = a_text(item.get("call_id"), f"{where}.call_id")
        parts = _parts(item.get("output"), f"{where}.output")
        self._images += [part for part in parts if part["type"] != "text"]
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _call(self, item: Answer, where: str) -> Answer:
        call_id, name = a_text(item.get("call_id"), f"{where}.call_id"), a_text(item.get("name"), f"{where}.name")
        if (space := item.get("namespace")) is not None:
            name = spaced(a_text(space, f"{where}.namespace"), name)
        if item["type"] == "function_call":
            text = a_text(item.get("arguments"), f"{where}.arguments")
            values = [arguments_object(text)]
        else:  # the text is the only field, or all that the model wrote
            shown = a_text(item.get("input"), f"{where}.input")
            text = orjson.dumps({"input": shown}).decode()
            values = [{"input": shown}, arguments_object(shown)]
        restored = (self._sampled.restore(call_id, name, value) for value in values)
        arguments = next((pair[1] for pair in restored if pair is not None), text)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def spaced(space: str, name: str) -> str:
    """The name of a namespace's tool in a chat completion."""
    return f"{space}__{name}"


def _call_of(item: Answer) -> str | None:
    match = _ID.fullmatch(name) if isinstance(name := item.get("id"), str) else None
    return None if match is None else match["call"]


def _thought(item: Answer, where: str) -> str:
    """The thoughts of a reasoning item: its content, else what is sealed in it, else its summary."""
    if text := _plain(item.get("content") or [], f"{where}.content"):
        return text
    sealed = item.get("encrypted_content")
    if sealed is None:
        return _plain(item.get("summary") or [], f"{where}.summary")
    try:
        marked = a_text(sealed, f"{where}.encrypted_content")
        if not marked.startswith(_SEALED):
            raise ValueError
        return base64.b64decode(marked.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        message = f"{where}.encrypted_content is not of this server; leave the item out"
        raise unsupported(message, f"{where}.encrypted_content", code="invalid_encrypted_content") from None


def _plain(content: Json, where: str) -> str:
    parts = _parts(content, where)
    if any(part["type"] != "text" for part in parts):
        raise unsupported(f"{where}: only text can stand here", where)
    return "".join(part["text"] for part in parts)


def _parts(content: Json, where: str) -> list[Answer]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        _part(an_object(item, f"{where}[{index}]"), f"{where}[{index}]")
        for index, item in enumerate(a_list(content, where))
    ]


def _part(part: Answer, where: str) -> Answer:
    match kind := part.get("type"):
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return {"type": "text", "text": a_text(part.get("text"), f"{where}.text")}
        case "refusal":
            return {"type": "text", "text": a_text(part.get("refusal"), f"{where}.refusal")}
        case "input_image" if part.get("file_id") is None:
            return {"type": "image_url", "image_url": {"url": a_text(part.get("image_url"), f"{where}.image_url")}}
        case "input_image":
            raise unsupported(f"{where}: no files are kept here; send the image as image_url", f"{where}.file_id")
        case _:
            raise unsupported(f"{where}: a part of type {kind!r} is not supported here", where)


def unsupported(message: str, field: str | None = None, status: int = 400, code: str = "unsupported_field") -> ApiError:
    """The refusal of what cannot be served. `field`: what is at fault."""
    return ApiError(status, message, field, code)


def an_object(value: Json, where: str) -> Answer:
    """The value, if it is a JSON object. Raises ApiError, naming `where`."""
    if not isinstance(value, dict):
        raise _wrong("an object", value, where)
    return cast(Answer, value)


def a_list(value: Json, where: str) -> list[Json]:
    """The value, if it is a list. Raises ApiError, naming `where`."""
    if not isinstance(value, list):
        raise _wrong("a list", value, where)
    return cast(list[Json], value)


def a_text(value: Json, where: str) -> str:
    """The value, if it is a string. Raises ApiError, naming `where`."""
    if not isinstance(value, str):
        raise _wrong("a string", value, where)
    return value


def _wrong(wanted: str, value: Json, where: str) -> ApiError:
    return ApiError(400, f"{where} must be {wanted}, got {shortened(value)}", where, "invalid_value")
