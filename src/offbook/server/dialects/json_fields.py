"""Checks of JSON values that a dialect reads one by one."""

from __future__ import annotations

from typing import cast

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

from ..errors import ApiError, shortened


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
