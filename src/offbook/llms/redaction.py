"""Removes secrets from everything that is shown or stored: errors, log records, cached answers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from urllib.parse import quote

MARK = "[key]"
SHORTEST = 8
"""Shorter values, such as `none` or `EMPTY`, are not treated as secrets: replacing them would garble ordinary text."""
_NAMES = re.compile(r"(API_?KEY|_KEY|TOKEN|SECRET|PASSWORD|AUTHORIZATION|CREDENTIALS?)$", re.IGNORECASE)
_SHAPES = re.compile(r"\b(?:Bearer\s+[\w.~+/=-]{8,}|(?:sk|gsk|xai|pplx|hf)[-_](?=[\w-]*\d)[\w-]{16,}|AIza[\w-]{30,})")
"""Patterns of keys, for keys that were not registered with `protect`."""
LOGGERS = ("LiteLLM", "httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "openai._base_client")
"""Loggers of libraries that log URLs, headers or bodies."""

_secrets: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether an environment variable, header or parameter of this name holds a secret."""
    return _NAMES.search(name.replace("-", "_")) is not None


def protect(values: Iterable[str]) -> None:
    """Register secrets that `redact` replaces from now on, also in URL-encoded form."""
    for value in values:
        if len(value) >= SHORTEST:
            _secrets.update((value, quote(value, safe="")))


def protect_environment() -> None:
    """Register the environment variables with names of secrets, where litellm reads keys."""
    protect(value for name, value in os.environ.items() if is_secret_name(name))


def redact(text: str) -> str:
    """Replace every secret in a text by a mark."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MARK)
    return _SHAPES.sub(MARK, text)


_FORMATTER = logging.Formatter()


class RedactingFilter(logging.Filter):
    """A logging filter that redacts records and drops none."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record's message and traceback before any handler formats them."""
        shown = record.getMessage()
        clean = redact(shown)
        if clean != shown:
            record.msg, record.args = clean, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(_FORMATTER.formatException(record.exc_info))
        return True


_FILTER = RedactingFilter()


def guard_logs() -> None:
    """Redact the log records of the libraries in LOGGERS. Idempotent: a logger adds the same filter once."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)
