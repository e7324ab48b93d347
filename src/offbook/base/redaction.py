"""Removes secrets from everything that is shown or stored: errors, log records, cached answers, records of rollouts.

It knows the values of environment variables that are named like secrets, values registered with `protect`, and the forms of
well-known keys. What is trained on, token ids and messages, is never changed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from typing import Any, TypeVar, cast
from urllib.parse import quote

from pydantic import BaseModel

from .text import one_line

MARK = "[redacted key]"
METRIC = "redacted_keys"
"""Metric of a rollout: the number of marks in its record. Missing without any."""
SWITCH = "OFFBOOK_REDACT"
"""Environment variable: 0 keeps records of rollouts as they are."""
RECORD_FIELDS = ("metadata", "metrics", "logs", "exception", "tool_runs", "outside_calls")
"""Fields of a trajectory, of its record and of a group's that are texts of the app, and never trained."""
SHORTEST = 8
"""Shorter values, such as `none` or `EMPTY`, are not treated as secrets: replacing them would garble ordinary text."""
_NAMES = re.compile(
    r"(API_?KEYS?|_KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|_PASS|_PAT|_PWD|AUTHORIZATION|COOKIE|CREDENTIALS?)$",
    re.IGNORECASE,
)
_SECRET_FIELD = re.compile(
    r"(api_?key|access_?token|refresh_?token|client_?secret|password|authorization)$", re.IGNORECASE
)
"""Keys of JSON objects whose texts are secrets. Narrower than _NAMES: a game may have a `secret` or a `token`."""
_KEY = r"(?=[\w-]{0,200}\d)[\w-]{16,}"
_FORMS = {
    **dict.fromkeys(
        (name + sign for name in ["sk", "rk", "gsk", "xai", "pplx", "hf", "lsv2", "npm", "ob"] for sign in "-_"), _KEY
    ),
    **dict.fromkeys(
        ["gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "xapp-", "pypi-AgE"], r"[\w-]{10,}"
    ),
    **dict.fromkeys(("AKIA", "ASIA"), r"[A-Z0-9]{16}\b"),
    "xox": r"[a-z]-[\w-]{10,}",
    "AIza": r"[\w-]{30,}",
    "SG.": r"[\w-]{16,100}\.[\w-]{16,}",
    "eyJ": r"[\w-]{8,500}\.eyJ[\w-]{8,}\.[\w-]+",
    "Bearer": r"\s+[\w.~+/=-]{8,}",
    "Basic": r"\s+(?=[A-Za-z]{0,200}[\d+/=])[A-Za-z0-9+/]{12,}=*",
    "-----BEGIN ": r"[A-Z ]{0,20}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,20}PRIVATE KEY-----)?",
}
"""How keys begin and go on, as their issuers document them, for keys that were not registered with `protect`. Repetitions
in the middle are bounded, so that no text costs more than its length."""
_PATTERNS = [
    (start, re.compile(f"{re.escape(start)}(?<!\\w{'.' * len(start)}){rest}", re.DOTALL), MARK)
    for start, rest in _FORMS.items()
]
_PATTERNS.append(("://", re.compile(r"://[^\s/:@]*:[^\s/@]+@"), f"://{MARK}@"))
"""The start, the pattern and what replaces it. A pattern that begins with plain text is searched for as fast as that text."""
_ASSIGNED = re.compile(
    r"(?<![a-z])(password|passwd|pwd|passphrase|account_?key|shared_?access_?(key|signature)|api_?key|access_?token"
    r"|auth_?token|auth|client_?secret|secret)[\"']?\s{0,3}[:=]\s{0,3}[\"']?[^\s\"';&,{\[]{4}",
    re.IGNORECASE,
)
"""A secret by its name inside a value: connection strings as Azure, ODBC and libpq write them, query strings, JSON."""
LOGGERS = ("LiteLLM", "httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "openai._base_client")
"""Loggers of libraries that log URLs, headers or bodies."""

_secrets: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether an environment variable, header or parameter of this name holds a secret."""
    return _NAMES.search(name.replace("-", "_")) is not None


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable holds a secret, by its name or by the form of its value.

    >>> is_secret("DATABASE_URL", "postgres://shop:hunter2@db/shop"), is_secret("DATABASE_URL", "postgres://db/shop")
    (True, False)
    """
    return is_secret_name(name) or bool(keys_in(value)) or _ASSIGNED.search(value) is not None


def protect(values: Iterable[str]) -> None:
    """Register secrets that `redact` replaces from now on, also in URL-encoded form."""
    for value in values:
        if len(value) >= SHORTEST:
            _secrets.update((value, quote(value, safe="")))


def protect_environment() -> None:
    """Register the environment variables with names of secrets. A path of a file that has one is none."""
    named = (value for name, value in os.environ.items() if is_secret_name(name))
    protect(
        value for value in named if not (value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value)))
    )


def redact(text: str) -> str:
    """Replace every secret in a text by a mark."""
    if len(text) < SHORTEST:
        return text
    for secret in sorted((secret for secret in _secrets if secret in text), key=len, reverse=True):
        text = text.replace(secret, MARK)
    for start, pattern, mark in _PATTERNS:
        if start in text:
            text = pattern.sub(mark, text)
    return text


def error_text(error: BaseException, limit: int = 500) -> str:
    """An exception's type and message on one line, without keys; of a group, its first one's.

    Messages show errors of other libraries by this, never by their repr: aiohttp's holds the headers of a request."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    try:
        message = one_line(redact(str(error)[: 10 * limit]), limit)
    except Exception:  # noqa: BLE001  # a class whose own str() raises
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def keys_in(text: str) -> list[str]:
    """What has the form of a key in a text, and the passwords of its URLs."""
    matched: list[str] = [match[0] for _, pattern, _ in _PATTERNS for match in pattern.finditer(text)]
    return [key[3:-1].partition(":")[2] if key.startswith("://") else key for key in matched]


Record = TypeVar("Record", bound=BaseModel)


def redacted_record(record: Record) -> Record:
    """A trajectory, its record or a group's without the secrets in its RECORD_FIELDS, and with their number as METRIC.

    The same object if it has none, or if SWITCH is 0. Marks of an earlier redaction count too."""
    redaction = Redaction()
    fields = (name for name in RECORD_FIELDS if name in type(record).model_fields)
    clean: dict[str, Any] = {name: redaction.value(getattr(record, name)) for name in fields}
    if not redaction.marks:
        return record
    return record.model_copy(update=clean | {"metrics": clean["metrics"] | {METRIC: float(redaction.marks)}})


class Redaction:
    """Replaces the secrets in JSON values and models. `marks`: how many marks the values have afterwards."""

    def __init__(self) -> None:
        self.marks = 0
        self._on = os.environ.get(SWITCH) != "0"

    def text(self, text: str) -> str:
        """The text without secrets."""
        clean = redact(text) if self._on else text
        self.marks += clean.count(MARK)
        return clean

    def value(self, value: Any, name: str = "") -> Any:
        """A copy of the value without secrets in its texts and keys. `name`: its key in the object around it."""
        if isinstance(value, str):
            if self._on and len(value) >= SHORTEST and _SECRET_FIELD.search(name) and value != MARK:
                value = MARK
            return self.text(value)
        if isinstance(value, dict):
            pairs = cast(dict[Any, Any], value).items()
            return {self.value(key): self.value(item, key if isinstance(key, str) else "") for key, item in pairs}
        if isinstance(value, list | tuple):
            items = [self.value(item) for item in cast(list[Any], value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, BaseModel):
            return value.model_copy(update={key: self.value(item, key) for key, item in value})
        return value


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


def guard_own_log() -> None:
    """Redact whatever this process logs, with its tracebacks: for a process whose log is ours."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_FILTER)


_EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.])")
_SSN = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
_PHONE = re.compile(r"(?<![\w+.])(?:\+\d{1,3}|\(\d{2,5}\)|0\d{1,4}(?=[ /-]))(?:[ ()/-]{0,2}\d){6,12}(?![\w.])")
_IP = re.compile(r"(?<![\d.])(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\d.])")


def mask_personal(text: str) -> str:
    """The text with marks in place of personal data. Numbers count as a card or an account only if their check digits fit.

    >>> mask_personal("Box 4821 for ann@example.com, +44 20 7946 0958, card 4111 1111 1111 1111, 2026-11-26")
    'Box 4821 for [email], [phone], card [card], 2026-11-26'
    """
    if "@" in text:
        text = _EMAIL.sub("[email]", text)
    if not any(digit in text for digit in "0123456789"):
        return text
    text = _IBAN.sub(lambda match: "[account]" if _is_iban(match[0]) else match[0], text)
    text = _CARD.sub(lambda match: "[card]" if _fits_luhn(match[0]) else match[0], text)
    text = _SSN.sub("[ssn]", text)
    text = _IP.sub("[ip]", text)
    return _PHONE.sub("[phone]", text)


def _fits_luhn(text: str) -> bool:
    """Whether the last digit checks the others: ISO/IEC 7812-1, annex B."""
    digits = [int(char) for char in reversed(text) if char.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """Whether the check digits fit: ISO 13616-1, modulo 97."""
    plain = text.replace(" ", "")
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1
