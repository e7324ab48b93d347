"""JSON for attributes of spans."""

from __future__ import annotations

import json

from pydantic_core import PydanticSerializationError, to_json

from offbook.base.types import Json


def as_text(value: Json) -> str:
    """Texts as they are, anything else as JSON."""
    return value if isinstance(value, str) else json_text(value)


def json_text(value: Json) -> str:
    """The value as JSON. What JSON cannot express becomes its `repr`; text that is not valid Unicode is escaped."""
    try:
        return to_json(value, fallback=repr).decode()
    except PydanticSerializationError:  # half of a surrogate pair
        return json.dumps(value, default=repr)
