"""JSON from LLMs: requested by schema or in the prompt, and read out of the text around it. Nothing in it is repaired."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from offbook.base.config import describe

Model = TypeVar("Model", bound=BaseModel)
Messages = Sequence[Mapping[str, Any]]

_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


def response_format(schema: type[BaseModel]) -> dict[str, Any]:
    """The `response_format` for a schema, strict if OpenAI's strict mode supports the schema.

    It is a plain dict, since litellm rewrites a pydantic class so that every field is required.
    """
    plain = schema.model_json_schema()
    named = {"name": re.sub(r"\W", "_", schema.__name__)[:64], "schema": plain}
    return {"type": "json_schema", "json_schema": named | ({"strict": True} if _is_strict(plain) else {})}


def _is_strict(schema: object) -> bool:
    """Whether every object of a JSON schema is closed and requires all its properties."""
    if isinstance(schema, list):
        return all(map(_is_strict, cast(list[object], schema)))
    if not isinstance(schema, dict):
        return True
    node = cast(dict[str, Any], schema)
    if node.get("type") == "object":
        properties = set(cast(dict[str, Any], node.get("properties", {})))
        if node.get("additionalProperties") is not False or properties != set(node.get("required", [])):
            return False
    return "default" not in node and all(map(_is_strict, node.values()))


def with_schema(messages: Messages, schema: type[BaseModel]) -> list[Mapping[str, Any]]:
    """The messages with the schema written into the system message."""
    text = f"Answer with one JSON value and nothing else. It must fit this JSON schema:\n{_schema_text(schema)}"
    first, *rest = messages
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    content: object = first.get("content")
    if isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{text}"}, *rest]
    return [{**first, "content": [*cast(list[object], content or []), {"type": "text", "text": text}]}, *rest]


def with_fault(messages: Messages, text: str, fault: str, schema: type[BaseModel]) -> list[Mapping[str, Any]]:
    """The messages, followed by the invalid answer and what is wrong with it."""
    question = (
        f"This answer cannot be used: {fault}\nAnswer again, completely, with one JSON value and nothing else. It must fit this "
        f"JSON schema:\n{_schema_text(schema)}"
    )
    return [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": question}]


def _schema_text(schema: type[BaseModel]) -> str:
    return json.dumps(schema.model_json_schema(), ensure_ascii=False)


def read(text: str, schema: type[Model]) -> tuple[Model, int]:
    """Parse an answer; returns the value and the number of repairs: 1 if the JSON object stands in other text, else 0.

    Raises ValueError that says what is wrong.
    """
    bare = _THOUGHT.sub("", text).strip()
    begin, end = bare.find("{"), bare.rfind("}") + 1
    if begin < 0 or end <= begin:
        raise ValueError("there is no JSON object in it")
    try:
        value = json.loads(bare[begin:end], object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no valid JSON, or not one object: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError("a number in it is not finite, or it is nested too deeply") from error
    try:
        return schema.model_validate(value), int((begin, end) != (0, len(bare)))
    except ValidationError as error:
        raise ValueError(describe(error, "answer")) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(unique := dict(pairs)) < len(pairs):
        raise ValueError(f"a key comes twice in one object: {', '.join(name for name, _ in pairs)}")
    return unique
