"""Bodies of errors."""

from __future__ import annotations

from pydantic import BaseModel

from offbook.base.types import Json

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorFacts(BaseModel):
    """Why a request was rejected, in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorFacts


def kind_of(status: int) -> str:
    """OpenAI's type of error for an HTTP status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> dict[str, Json]:
    """The body of an error response, and the error event of a stream. `param` names the field at fault.

    OpenAI's `code` is a word for programs; vLLM's is the HTTP status.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
