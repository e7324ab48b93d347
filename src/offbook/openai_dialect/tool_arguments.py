"""Arguments of a tool call as an object, for the APIs that have no text of them."""

from __future__ import annotations

import json
from typing import cast

import orjson

from offbook.base.json_files import too_deep
from offbook.base.types import Json

from .chat_answer import Answer

RAW = "__raw_arguments"
"""The only field of the object that stands for arguments that are not a JSON object."""


def arguments_object(raw: str) -> Answer:
    """The object that a client gets for the text that the model wrote.

    >>> arguments_object('{"a": 1}'), arguments_object('{"a": ')
    ({'a': 1}, {'__raw_arguments': '{"a": '})
    """
    try:
        value: Json = orjson.loads(raw or "{}")
    except orjson.JSONDecodeError:
        return {RAW: raw}
    plain = isinstance(value, dict) and not too_deep(
        value, raw.count("{") + raw.count("[")
    )  # serialisers refuse deep ones
    return cast(Answer, value) if plain else {RAW: raw}


def arguments_text(value: dict[str, Json]) -> str:
    """The text of an object that was not sampled here, as `json.dumps` writes it."""
    return (
        value[RAW] if value.keys() == {RAW} and isinstance(value[RAW], str) else json.dumps(value, ensure_ascii=False)
    )
