"""JSON from LLMs: requested by schema or in the prompt, parsed strictly first, repaired only if nothing is lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from offbook.base.config import describe
from offbook.base.errors import MissingExtraError

Model = TypeVar("Model", bound=BaseModel)
Messages = Sequence[Mapping[str, Any]]

_FENCE = re.compile(r"```[\w-]*[^\S\n]*\n")
_MAX_REPAIRED = 20_000
"""Characters: json_repair takes a tenth of a millisecond for one."""
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
    """Parse an answer; returns the value and the number of repairs (0 or 1).

    Raises ValueError that says what is wrong, MissingExtraError without json_repair.
    """
    bare = _THOUGHT.sub("", text).strip()
    opening = _FENCE.match(bare)
    fenced = bare[opening.end() : -3].strip() if opening and bare.endswith("```") else None
    candidates = [bare, *([fenced] if fenced is not None else [])]
    for mended, candidate in enumerate(candidates):
        try:
            return _validated(_loads(candidate), schema), mended
        except json.JSONDecodeError:
            continue
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    return _in_prose(bare, schema), 1


def _in_prose(text: str, schema: type[Model]) -> Model:
    """The only JSON object in other text. Raises ValueError if several fit the schema."""
    values, broken = _objects(text)
    fitting: list[Model] = []
    faults: list[str] = []
    for value in values:
        try:
            fitting.append(_validated(value, schema))
        except ValueError as error:
            faults.append(str(error))
    if len(fitting) == 1 and not broken:
        return fitting[0]
    if fitting:
        raise ValueError("there are several JSON values in it; give one")
    if faults and not broken:
        raise ValueError(faults[0])
    return _validated(_repaired(text), schema)


def _objects(text: str) -> tuple[list[object], bool]:
    """The JSON objects in a text up to the first invalid one, and whether there is an invalid one."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
    values: list[object] = []
    position = text.find("{")
    while position >= 0:
        try:
            value, position = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError):
            return values, True
        values.append(value)
        position = text.find("{", position)
    return values, False


def _repaired(text: str) -> object:
    """Repair the JSON object in a text with json_repair. Raises ValueError for an incomplete object.

    json_repair completes a truncated object. The check appends text: if that becomes part of the value, the object was not
    complete.
    """
    begin, end = text.find("{"), text.rfind("}")
    if begin < 0 or end < begin:
        raise ValueError("there is no JSON object in it")
    if end - begin > _MAX_REPAIRED:
        raise ValueError("it is no valid JSON, and too long to repair")
    try:
        from json_repair import repair_json
    except ModuleNotFoundError as error:
        raise MissingExtraError("json_repair", "judge") from error
    inside = text[begin : end + 1]
    value: object = repair_json(inside, return_objects=True)
    if not isinstance(value, dict):
        raise ValueError("it is no valid JSON")
    after: dict[str, object] = {
        " and more": value,
        ' {"and": "more"}': [value, {"and": "more"}],
    }
    if any(repair_json(inside + more, return_objects=True) != whole for more, whole in after.items()):
        raise ValueError("the JSON is not complete")
    return cast(object, value)


def _validated(value: object, schema: type[Model]) -> Model:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("a number in it is not finite") from error
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise ValueError(describe(error, "answer")) from error


def _loads(text: str) -> object:
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = min(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r} comes twice in one object")
    return unique
