"""Errors as HTTP responses in OpenAI's format, and the HTTP status of each of the package's errors."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.responses import JSONResponse  # fastapi's is this one; `offbook runs` needs no web framework

from offbook.base.errors import (
    ConfigError,
    EngineError,
    OffbookError,
    OutOfMemory,
    ServerError,
    StoreError,
    TrainError,
)
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import error_body, kind_of

logger = logging.getLogger(__name__)

_SHOWN = 5
"""Bad fields that a message names at most."""
_VALUE_SHOWN = 200
"""Characters of a value that a message shows at most."""


class ApiError(ServerError):
    """A request is rejected: HTTP status, message, the field at fault (`param`), and a short `code` for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """`code`: the error type of the status if omitted, such as "not_found_error"."""
        self.type = kind_of(status)
        super().__init__(message, status=status, code=code or self.type, param=param)

    def body(self) -> dict[str, Json]:
        """The JSON body, in the format of OpenAI and vLLM.

        >>> ApiError(404, "There is no model 'm'", "model", "model_not_found").body()["error"]["code"]
        'model_not_found'
        """
        return error_body(str(self), self.type, self.param, self.code)

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, headers=headers)


class StoreFullError(StoreError):
    """Records could not be written because the disk is full."""


def refusal_of(error: OffbookError, request: str) -> ApiError:
    """The error that answers a request.

    Errors of the server (5xx) are logged with `request`, its method and path.
    """
    api_error = as_api_error(error)
    if api_error.status >= 500:
        logger.error("%s: %s", request, api_error)
    return api_error


def internal_error(error: Exception) -> ApiError:
    """The response to an unexpected exception. It names only the type, so the caller must log the traceback."""
    message = f"{type(error).__name__} in the server; the traceback is in its log"
    return ApiError(500, message, code="internal_error")


def bad_request(error: ValidationError, where: str) -> ApiError:
    """Convert a validation error to a 400 with one line per bad field, and its value.

    `param` is the first bad field. `where` stands for the whole input in errors that concern no single field.
    """
    faults = error.errors(include_url=False, include_context=False)
    fields = [".".join(str(part) for part in fault["loc"]) for fault in faults]
    lines = [
        f"{field or where}: {fault['msg']} (got {shortened(fault['input'])})"
        for field, fault in zip(fields, faults, strict=True)
    ]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return ApiError(400, "\n".join([*lines[:_SHOWN], *more]), fields[0] or None, "invalid_value")


def shortened(value: object) -> str:
    """The `repr` of a value, cut for a message.

    >>> shortened("a" * 300) == "'" + "a" * 199 + "..."
    True
    """
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"a {type(value).__name__} with too long a number"
    return text if len(text) <= _VALUE_SHOWN else f"{text[:_VALUE_SHOWN]}..."


def as_api_error(error: OffbookError) -> ApiError:
    """Convert an error of this package: 4xx if the request is at fault, 5xx if the server is.

    >>> as_api_error(StoreFullError("no space left")).status, as_api_error(ConfigError("bad option")).status
    (507, 400)
    """
    match error:
        case ApiError():
            return error
        case ServerError():
            return ApiError(error.status, str(error), error.param, error.code)
        case StoreFullError():
            return ApiError(507, str(error), code="disk_full")
        case StoreError():
            return ApiError(503, str(error), code="store_failed")
        case OutOfMemory():
            return ApiError(503, str(error), code="out_of_memory")
        case EngineError():
            return ApiError(502, str(error), code="engine_failed")
        case TrainError():
            return ApiError(409, str(error), code=error.reason)
        case ConfigError():
            return ApiError(400, str(error), code="invalid_value")
        case _:
            return ApiError(500, f"{type(error).__name__}: {error}")


def shown(error: Exception) -> str:
    """An error for the log: one of this package as it is, of another the type and the place, since its message may have a text
    of a call, or a key."""
    if isinstance(error, OffbookError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ is not None else None
    place = f" in {frame.filename.rpartition('/')[2]}:{frame.lineno}" if frame is not None else ""
    return f"{type(error).__name__}{place}"
