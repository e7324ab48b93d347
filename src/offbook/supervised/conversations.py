"""Reads training examples, one conversation a row, checked field by field: JSONL and JSON files, lists and Hugging Face data sets.

The format is that of OpenAI's supervised fine-tuning: `messages`, `tools`, `parallel_tool_calls`, and `weight` on a message of
the assistant. `prompt` with `completion`, and ShareGPT's `conversations` are converted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbook.base.errors import ConfigError
from offbook.base.text import one_line
from offbook.base.types import Json, Message, Tool
from offbook.base.user_values import as_list
from offbook.client.rollouts.dataset import UnpaddedRows, unpadded
from offbook.openai_dialect.chat_fields import ChatMessage, ChatTool, in_order_of_calls
from offbook.scenarios.file_rows import FileRow, json_rows, jsonl_rows, row_of

from .masking import Masking, TextFilter

Rows: TypeAlias = Iterable[Mapping[str, Json] | list[Message]]
"""Rows of a data set, or lists of messages."""
READERS = {".jsonl": (jsonl_rows, "line"), ".json": (json_rows, "row")}
"""By the ending of a file: its reader, and the word for a place in it."""
SHOWN_FAULTS = 20


@dataclass(frozen=True)
class Conversation:
    """One training example. `weights`: by index of a message of the assistant; a missing one is 1, and 0 is not trained.
    `source`: where it was read, such as "data.jsonl, line 12"."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None
    weights: Mapping[int, float]
    source: str


@dataclass(frozen=True)
class ConversationSet:
    """The examples that were read. `skipped`: rows that were left out, and `faults` those of the first of them;
    `redacted`: texts that the filter changed."""

    conversations: tuple[Conversation, ...]
    skipped: int = 0
    faults: tuple[str, ...] = ()
    redacted: int = 0


def read_conversations(
    what: str | Path | Rows, *, skip_bad: bool = False, filter: TextFilter | None = None
) -> ConversationSet:
    """Read a `.jsonl` or `.json` file, a list of dicts, or a `datasets.Dataset`, one conversation a row.

    `filter` replaces each text that may be trained; by default secrets that Offbook knows are masked, unless the environment
    variable OFFBOOK_REDACT is 0. Raises ConfigError that names each faulty row and field. With `skip_bad` such rows are left
    out and counted; it is still raised for a file that cannot be read and for a set without any conversation."""
    masking = Masking(filter)
    conversations: list[Conversation] = []
    faults: list[str] = []
    skipped = 0
    for row, source in _rows(what):
        try:
            if row.values is None:
                raise ConfigError(row.fault)
            read = read_row(row.values, source)
        except ConfigError as error:
            skipped += 1
            faults += [f"{source}: {error}"] if len(faults) < SHOWN_FAULTS else []
            continue
        messages = tuple(masking.message(message) for message in read.messages)
        conversations.append(replace(read, messages=messages, tools=masking.tools(read.tools)))
    if skipped > len(faults):
        faults.append(f"and {skipped - len(faults)} more")
    name = str(what) if isinstance(what, str | Path) else "train_sft"
    if skipped and not skip_bad:
        raise ConfigError("\n".join([*faults, "skip_bad=True (--skip-bad) leaves such rows out and counts them"]))
    if not conversations:
        raise ConfigError("\n".join([*faults, f"{name}: it holds no conversation that can be trained"]))
    return ConversationSet(tuple(conversations), skipped, tuple(faults), masking.count)


def _rows(what: str | Path | Rows) -> Iterator[tuple[FileRow, str]]:
    if isinstance(what, str | Path):
        file = Path(what)
        reader, word = READERS.get(file.suffix.lower(), (None, ""))
        if reader is None:
            raise ConfigError(
                f"{file}: a file that ends in {' or '.join(READERS)} is needed, or rows: datasets.load_dataset(...)"
            )
        try:
            for row in reader(file):
                yield row, f"{file.name}, {word} {row.place}"
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
        return
    rows = unpadded(what)
    items = rows if isinstance(rows, UnpaddedRows) else as_list(rows, "train_sft", "conversation")
    for place, item in enumerate(items):
        wrapped: object = {"messages": item} if isinstance(item, list) else item
        yield row_of(place, wrapped, "key"), f"row {place}"


SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
TEXT_PARTS = ("text", "refusal")


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ChatTool] | None = None
    parallel_tool_calls: bool | None = None


def read_row(row: Mapping[str, Json], source: str) -> Conversation:
    """Read a row. Raises ConfigError that names the field, without the place of the row."""
    _check_imitable(row)
    messages = [_without_empty_calls(message) for message in _messages_of(row)]
    weights = _weights(messages)
    fields = {"messages": messages, "tools": _tools_of(row), "parallel_tool_calls": row.get("parallel_tool_calls")}
    try:
        _Fields.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(_fault(error)) from error
    weights |= {index: 0.0 for index in _only_prompt(row, messages) if index not in weights}
    _check_parts(messages)
    trained = {
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and weights.get(index, 1.0) > 0
    }
    if not trained:
        weighted = any(message["role"] == "assistant" for message in messages)
        raise ConfigError(
            "messages: " + ("each assistant message has the weight 0" if weighted else "there is no assistant message")
        )
    tools: list[Tool] = fields["tools"] or []
    _check_trained(messages, trained, {tool["function"]["name"] for tool in tools})
    messages = in_order_of_calls(messages)
    _check_calls(messages)
    if fields["parallel_tool_calls"] is False:
        _check_single(messages, trained)
    kept = tuple(
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    )
    return Conversation(kept, tuple(tools) or None, weights, source)


# ---- formats


def _messages_of(row: Mapping[str, Json]) -> list[Json]:
    """The messages in OpenAI's form."""
    if "messages" in row:
        return _list(row["messages"], "messages")
    if "conversations" in row:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        turns = _list(row["conversations"], "conversations")
        return [*system, *map(_of_sharegpt, turns, range(len(turns)))]
    if "prompt" in row and "completion" in row:
        prompt, completion = (
            [{"role": role, "content": row[name]}] if isinstance(row[name], str) else _list(row[name], name)
            for name, role in (("prompt", "user"), ("completion", "assistant"))
        )
        return [*prompt, *completion]
    fields = ", ".join(map(repr, row)) or "none"
    raise ConfigError(
        f"messages: it is missing (the fields are {one_line(fields)}): write "
        '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    )


def _list(value: Json, name: str) -> list[Json]:
    if not isinstance(value, list):
        raise ConfigError(f"{name}: a list is needed (got {one_line(repr(value))})")
    return cast(list[Json], value)


def _of_sharegpt(turn: Json, index: int) -> Message:
    fields = cast(dict[str, Json], turn) if isinstance(turn, dict) else {}
    role = SHAREGPT.get(str(fields.get("from")))
    if role is None:
        raise ConfigError(
            f"conversations.{index}.from: one of {', '.join(SHAREGPT)} is needed (got {one_line(repr(cast(Json, turn)))}); write other "
            "turns in OpenAI's format, as `messages` with `tool_calls` and the role `tool`"
        )
    named = {name: fields[name] for name in ("weight",) if name in fields}
    return {"role": role, "content": fields.get("value"), **named}


def _only_prompt(row: Mapping[str, Json], messages: Sequence[Message]) -> list[int]:
    """The indices of the messages of the assistant in `prompt`: context of the completion, and not trained."""
    prompt = row.get("prompt") if "messages" not in row and "conversations" not in row else None
    count = len(cast(list[Json], prompt)) if isinstance(prompt, list) else 0
    return [index for index, message in enumerate(messages[:count]) if message["role"] == "assistant"]


def _tools_of(row: Mapping[str, Json]) -> list[Tool] | None:
    """The tools as OpenAI's: also those of a text of JSON, and functions without their `type`."""
    offered = row.get("tools")
    if isinstance(offered, str):  # columns of data sets, whose rows would need one schema for all tools
        try:
            offered = orjson.loads(offered or "null")
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"tools: not JSON: {error}") from error
    if offered is None:
        return None
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "name" in tool and "function" not in tool
        else tool
        for tool in _list(offered, "tools")
    ]


def _without_empty_calls(message: Json) -> Json:
    """A copy of a message, or what stands in its place: that is rejected with the other types."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in cast(Message, message).items() if name != "tool_calls" or value}


def _weights(messages: Sequence[Json]) -> dict[int, float]:
    """Take `weight` out of the messages: by index, without those that are null."""
    weights: dict[int, float] = {}
    for index, item in enumerate(messages):
        message = cast(Message, item) if isinstance(item, dict) else {}
        weight = message.pop("weight", None)
        if weight is None:
            continue
        where, role = f"messages.{index}.weight", message.get("role")
        if role != "assistant":
            raise ConfigError(f"{where}: only a message of the assistant has a weight, this one is of {role!r}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"{where}: a number from 0 (not trained) is needed (got {one_line(repr(weight))})")
        weights[index] = float(weight)
    return weights


def _fault(error: ValidationError) -> str:
    """The first fault, with its field and value. Names of types in the place are left out."""
    fault = error.errors(include_url=False, include_context=False)[0]
    parts = [str(part) for part in fault["loc"]]
    place = ".".join(part for part in parts if (part.islower() and "[" not in part and part != "str") or part.isdigit())
    return f"{place}: {fault['msg']} (got {one_line(repr(fault['input']))})"


# ---- checks


def _check_imitable(row: Mapping[str, Json]) -> None:
    """Refuse preferences (DPO's pairs, KTO's `label`), and rows about more than text (as LLaMA-Factory writes them)."""
    if "rejected" in row:
        raise ConfigError(
            "rejected: a pair of answers is no conversation; write the chosen one as the last of `messages`"
        )
    if row.get("label") is False:
        raise ConfigError("label: false marks an answer that must not be imitated; leave the row out")
    if row.get("functions"):
        raise ConfigError("functions: write OpenAI's older functions as `tools`, and their calls as `tool_calls`")
    for name in ("images", "videos", "audios"):
        if row.get(name):
            raise ConfigError(f"{name}: only text is trained (got {one_line(repr(row[name]))})")


def _check_parts(messages: Sequence[Message]) -> None:
    """Check that every message of others has a content, and that each part of a content is a text."""
    for index, message in enumerate(messages):
        content: Json = message.get("content")
        if message.get("function_call"):
            raise ConfigError(f"messages.{index}.function_call: write it as `tool_calls`")
        if content is None and message["role"] != "assistant":
            raise ConfigError(f"messages.{index}.content: text is needed, since the role is {message['role']!r}")
        for place, item in enumerate(cast(list[Json], content) if isinstance(content, list) else []):
            part: dict[str, Json] = {"type": "text", "text": item} if isinstance(item, str) else item
            where, kind = f"messages.{index}.content.{place}", part["type"]
            if kind not in TEXT_PARTS:
                raise ConfigError(f"{where}: only text is trained (got a part of type {one_line(repr(kind))})")
            if not isinstance(part.get(kind), str):
                raise ConfigError(f"{where}.{kind}: text is needed (got {one_line(repr(part))})")


def _check_trained(messages: Sequence[Message], trained: set[int], offered: set[str]) -> None:
    """Check that each trained message answers something, says something, and calls tools that are offered."""
    for index in sorted(trained):
        message, where = messages[index], f"messages.{index}"
        if index == 0:
            raise ConfigError(
                f"{where}: the assistant speaks first, so there is no prompt to train it on: give it the weight 0"
            )
        calls: list[Json] = message.get("tool_calls") or []
        content: Json = message.get("content") or message.get("refusal")
        if not calls and not (content.strip() if isinstance(content, str) else content):
            raise ConfigError(f"{where}: the assistant says nothing: neither `content` nor `tool_calls`")
        for place, call in enumerate(calls):
            name = call["function"]["name"]
            if offered and name not in offered:
                raise ConfigError(
                    f"{where}.tool_calls.{place}.function.name: {name!r} is not among the tools "
                    f"{one_line(', '.join(sorted(offered)))}"
                )


def _check_calls(messages: Sequence[Message]) -> None:
    for index, message in enumerate(messages):
        for place, call in enumerate(cast(list[Json], message.get("tool_calls") or [])):
            _check_arguments(
                call["function"].get("arguments"), f"messages.{index}.tool_calls.{place}.function.arguments"
            )


def _check_arguments(arguments: Json, where: str) -> None:
    if isinstance(arguments, str) and arguments:
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON: {error} (got {one_line(repr(arguments))})") from error
        if not isinstance(arguments, dict):
            raise ConfigError(f"{where}: a JSON object is needed (got {one_line(json.dumps(arguments))})")


def _check_single(messages: Sequence[Message], trained: set[int]) -> None:
    for index in sorted(trained):
        if (count := len(messages[index].get("tool_calls") or [])) > 1:
            raise ConfigError(f"messages.{index}.tool_calls: {count} calls, but parallel_tool_calls is false")
