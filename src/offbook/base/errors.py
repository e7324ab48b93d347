"""The errors that Offbook raises: one class per boundary.

OffbookError
├── ConfigError            an option, argument or file of the user's is wrong; names the field
├── MissingExtraError      an optional package is not installed; the message is the pip command
├── WrongLoopError         a sync method was called inside a running event loop; names its async twin
├── RolloutError           rollouts failed: timeout, too many exceptions, a return value of the wrong kind
├── CaptureError           a model call could not be captured; stops all rollouts, because all share the fault
│   ├── LeakError          a request to another LLM bypassed the capture
│   └── SharedStateError   two rollouts used the same thread or store namespace
├── BackendError           the local server could not be started, found or kept alive
├── ServerError            the server rejected or failed a request (carries status, code and field)
│   └── UnreachableError   no response: nothing listens, the connection broke, or it timed out
├── LlmError               another LLM (a judge, for example) gave no usable answer; carries its kind
├── BudgetExceeded         the next request to another LLM would exceed `max_cost`
├── TrainError             a train request was not applied; carries the reason
├── EngineError            the sampler or learner process failed
│   └── OutOfMemory        with the setting to lower
└── StoreError             records could not be written or read
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Literal
from urllib.parse import urlsplit


class OffbookError(Exception):
    """Base of all errors of this package."""


class ConfigError(OffbookError, ValueError):
    """An option, argument or file is wrong. The message names the field, the value and what is allowed."""


class MissingExtraError(OffbookError, ImportError):
    """An optional dependency is missing; the message is the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: {install_command(extra)}")
        self.package = package
        self.extra = extra


class WrongLoopError(OffbookError, RuntimeError):
    """A sync method was called inside a running event loop."""

    def __init__(self, method: str, twin: str) -> None:
        super().__init__(f"{method}() cannot run inside a running event loop (a notebook?): use `await {twin}(...)`")


class RolloutError(OffbookError, RuntimeError):
    """Rollouts failed: they timed out, too many raised, or one returned a value of the wrong type."""


class CaptureError(OffbookError, RuntimeError):
    """A model call was not captured, or cannot be."""


class LeakError(CaptureError):
    """A request to another LLM bypassed the capture. The message names its URL and the line that sent it."""


class SharedStateError(CaptureError):
    """Two rollouts used the same thread of a checkpointer, or the same namespace of a store."""


class BackendError(OffbookError, RuntimeError):
    """The local server could not be started, found or kept alive."""


class ServerError(OffbookError, RuntimeError):
    """The server rejected or failed a request. `status`: HTTP status; `code`: OpenAI's; `param`: the faulty field."""

    def __init__(
        self, message: str, *, status: int = 500, code: str = "server_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class UnreachableError(ServerError, ConnectionError):
    """The server did not respond: nothing listens, the connection broke, or it timed out."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, code="unreachable")


LlmErrorKind = Literal["refused", "filtered", "cut", "empty", "invalid", "failed", "timeout", "authentication", "quota"]


class LlmError(OffbookError, RuntimeError):
    """Another LLM gave no usable answer, after the retries that this kind of failure allows.

    refused: the model declined. filtered: the provider's content filter blocked it. cut: the answer reached its token
    limit. empty: no text. invalid: no JSON that fits the schema, even after a retry. failed: the provider rejected the
    request, or the retries ran out. timeout: no answer in time. authentication, quota: an account error, which every
    further request would repeat.
    """

    def __init__(self, message: str, *, kind: LlmErrorKind = "failed") -> None:
        super().__init__(message)
        self.kind: LlmErrorKind = kind

    @property
    def lasting(self) -> bool:
        """Whether every further request would fail with the same error."""
        return self.kind in ("authentication", "quota")


class BudgetExceeded(OffbookError, RuntimeError):
    """The budget `max_cost` for other LLMs is spent. Amounts are in USD."""

    def __init__(self, message: str, *, max_cost: float = 0.0, spent: float = 0.0) -> None:
        super().__init__(message)
        self.max_cost = max_cost
        self.spent = spent


class TrainError(OffbookError, RuntimeError):
    """A train request was not applied. `reason` is a short code; the message says what to do."""

    def __init__(self, message: str, *, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(OffbookError, RuntimeError):
    """The sampler process or the learner process failed."""


class OutOfMemory(EngineError, MemoryError):
    """The engine ran out of memory; the message names the setting to lower."""


class StoreError(OffbookError, RuntimeError):
    """Records could not be written or read."""


class NotFiniteError(OffbookError, ArithmeticError):
    """A loss or gradient is NaN or infinite."""


DISTRIBUTION = "offbook"
"""Name of the distribution. It has no release yet, so no command may install it from the package index."""


def install_command(extra: str) -> str:
    """`pip install ...` for an extra, from the checkout, wheel or repository of this installation; else from a checkout
    in the current folder."""
    return command_from(installation_origin(), extra)


def installation_origin() -> dict[str, object]:
    """Where this installation came from, as PEP 610 records it; empty if that is unknown."""
    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    return json.loads(origin) if origin else {}


def command_from(origin: Mapping[str, object], extra: str) -> str:
    """The command for an origin as PEP 610 records it (`direct_url.json`).

    >>> command_from({"url": "file:///srv/offbook", "dir_info": {"editable": True}}, "server")
    'pip install -e "/srv/offbook[server]"'
    """
    url = str(origin.get("url", ""))
    match origin:
        case {"dir_info": {"editable": True}}:
            return f'pip install -e "{origin_folder(url)}[{extra}]"'
        case {"dir_info": _}:
            return f'pip install "{origin_folder(url)}[{extra}]"'
        case {"vcs_info": {"vcs": str(vcs), "commit_id": str(commit)}}:
            return f'pip install "{DISTRIBUTION}[{extra}] @ {vcs}+{url}@{commit}"'
        case {"archive_info": _}:
            return f'pip install "{DISTRIBUTION}[{extra}] @ {url}"'
        case _:
            return f'pip install ".[{extra}]" in a checkout of Offbook'


def origin_folder(url: str) -> str:
    """The folder or file of a `file:` URL."""
    from urllib.request import url2pathname  # its own imports take longer than most commands' help

    return url2pathname(urlsplit(url).path)
