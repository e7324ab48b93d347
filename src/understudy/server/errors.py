"""Errors as HTTP answers: one class, OpenAI's shape, and the table from the package's errors to statuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from ..errors import ConfigError, EngineError, OutOfMemory, ServerError, StoreError, TrainError, UnderstudyError

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN = 5
_VALUE_SHOWN = 200


class ApiError(ServerError):
    """A request is refused: HTTP status, what is wrong, the field (`param`) and a short `code`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.type = _TYPES.get(status, default)
        super().__init__(message, status=status, code=code or self.type, param=param)

    def body(self) -> dict[str, dict[str, str | None]]:
        """{"error": {"message", "type", "param", "code"}}, as OpenAI and vLLM answer."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The answer to send."""
        return JSONResponse(self.body(), self.status, headers=headers)


class StoreFullError(StoreError):
    """Records could not be written because there is no space left."""


def refused(error: UnderstudyError, request: str) -> JSONResponse:
    """The answer to `request` (method and path); a fault of the server is logged."""
    answer = as_api_error(error)
    if answer.status >= 500:
        log.error("%s: %s", request, answer)
    return answer.response()


def internal_error(error: Exception) -> ApiError:
    """A defect of ours, by its kind only; whoever answers with it logs the traceback."""
    message = f"{type(error).__name__} in the server; the traceback is in its log"
    return ApiError(500, message, code="internal_error")


def bad_request(error: ValidationError, where: str) -> ApiError:
    """A 400 with one line for each bad field of `where`, its value shortened; `param` is the first of them."""
    faults = error.errors(include_url=False, include_context=False)
    fields = [".".join(str(part) for part in fault["loc"]) for fault in faults]
    lines = [
        f"{field or where}: {fault['msg']} (got {shortened(fault['input'])})"
        for field, fault in zip(fields, faults, strict=True)
    ]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return ApiError(400, "\n".join([*lines[:_SHOWN], *more]), fields[0] or None, "invalid_value")


def shortened(value: object) -> str:
    """The value as it is shown in a message."""
    text = repr(value)
    return text if len(text) <= _VALUE_SHOWN else f"{text[:_VALUE_SHOWN]}..."


def as_api_error(error: UnderstudyError) -> ApiError:
    """Any error of this package as an answer: 4xx where the request is at fault, 5xx where the server is."""
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
