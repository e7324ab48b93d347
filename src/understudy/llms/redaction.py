"""Secrets are taken out of everything that is shown or stored: errors, log records, cached answers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from urllib.parse import quote

MARK = "[key]"
SHORTEST = 8
"""A shorter value, such as `none` or `EMPTY`, is no secret, and replacing it would garble plain words."""
_NAMES = re.compile(r"(API_?KEY|_KEY|TOKEN|SECRET|PASSWORD|AUTHORIZATION|CREDENTIALS?)$", re.IGNORECASE)
_SHAPES = re.compile(r"\b(?:Bearer\s+[\w.~+/=-]{8,}|(?:sk|gsk|xai|pplx|hf)[-_](?=[\w-]*\d)[\w-]{16,}|AIza[\w-]{30,})")
"""What looks like a key, also one that nobody told us."""
LOGGERS = ("LiteLLM", "httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "openai._base_client")
"""Loggers below the seam that show URLs, headers or bodies."""

_secrets: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether an environment variable, header or parameter of this name holds a secret."""
    return _NAMES.search(name.replace("-", "_")) is not None


def protect(values: Iterable[str]) -> None:
    """From now on these are replaced wherever `redact` is used, also URL-encoded."""
    for value in values:
        if len(value) >= SHORTEST:
            _secrets.update((value, quote(value, safe="")))


def protect_environment() -> None:
    """`protect` what the environment holds under names of secrets: litellm reads keys there."""
    protect(value for name, value in os.environ.items() if is_secret_name(name))


def redact(text: str) -> str:
    """The text with a mark in place of each secret."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MARK)
    return _SHAPES.sub(MARK, text)


_FORMATTER = logging.Formatter()


class RedactingFilter(logging.Filter):
    """Rewrites records; lets all pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        """The record's text, redacted before any handler formats it."""
        shown = record.getMessage()
        clean = redact(shown)
        if clean != shown:
            record.msg, record.args = clean, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(_FORMATTER.formatException(record.exc_info))
        return True


_FILTER = RedactingFilter()


def guard_logs() -> None:
    """Redact what the libraries below log. May be called again: a logger takes the same filter once."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)
