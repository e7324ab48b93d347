"""Resolves references to the environment in a server's settings, as editors write them in `mcp.json`.

`${env:NAME}`, `${NAME}`, `${NAME:-default}`, `${input:some-id}` (the variable SOME_ID), `${workspaceFolder}` (the folder of
the file) and `${userHome}`. They are resolved when a server starts. Whatever is stored, hashed or shown has the reference.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.text import word_list

_REFERENCE = re.compile(r"\$\{(?:(env|input):)?([A-Za-z_][\w.-]*)(?::-([^}]*))?\}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORD = re.compile(
    r"auth(entication|orization)?|\w*(passw\w*|passphrase|secret|token|cookie|credential)s?"
    r"|(access|api|auth|master|private|secret)?keys?"
)
_SHORT_FORMS = frozenset(["pass", "pat", "pwd"])
"""Secrets only as the last of several words: PWD alone is the current folder."""
_ATTRIBUTES = frozenset(
    word_list(
        """count dir expiry file length lifetime limit max method min mode name path seconds size timeout ttl type uri url"""
    )
)
"""Last words of settings that are about a secret, such as TOKEN_LIMIT and AUTH_TYPE."""
_QUANTITIES = frozenset(["completion", "context", "input", "max", "min", "new", "num", "output", "prompt", "total"])
"""Words that make TOKENS a number, as in MAX_TOKENS."""
_SCHEME = re.compile(r"^(api-?key|basic|bearer|digest|dpop|negotiate|token)\s+(?=\S)", re.IGNORECASE)
"""The authentication scheme before the credential in a header."""
_SHORTEST_SECRET = 6  # shorter values occur in ordinary text too often to mask them


def names_secret(name: str) -> bool:
    """Whether a setting of this name is probably a secret: API_TOKEN and X-Api-Key are, GIT_AUTHOR_NAME and MAX_TOKENS not."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ATTRIBUTES:
        return False
    if len(words) > 1 and words[-1] in _SHORT_FORMS:
        return True
    counted = not _QUANTITIES.isdisjoint(words)
    return any(_SECRET_WORD.fullmatch(word) and not (counted and word == "tokens") for word in words)


@dataclass
class References:
    """Resolves the settings of one server, and collects the secret values."""

    server: str
    workspace: Path | None = None
    _secrets: set[str] = field(default_factory=set[str], repr=False)

    def resolve(self, text: str, name: str = "") -> str:
        """Replace the references in a text. If the setting's `name` is that of a secret, its value becomes one.

        Raises ConfigError for a variable that is not set.
        """
        value = _REFERENCE.sub(self._value, text)
        if names_secret(name):
            self.add_secret(value)
        return value

    def add_secret(self, value: str) -> None:
        """Add a value and its words to the secrets, unless they are too short. The scheme of a header is not a secret."""
        credential = _SCHEME.sub("", value)
        self._add(credential, *credential.split())

    def secrets(self) -> tuple[str, ...]:
        """The values to mask in messages and results, the longest first."""
        return tuple(sorted(self._secrets, key=len, reverse=True))

    def _add(self, *values: str) -> None:
        for value in values:
            if len(value) >= _SHORTEST_SECRET:
                in_json = (json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
                self._secrets.update((value, *in_json))

    def _value(self, match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        default: str | None = match[3]
        if kind is None and name == "workspaceFolder":
            return str(self.workspace or Path.cwd())
        if kind is None and name == "userHome":
            return str(Path.home())
        variable = re.sub(r"\W", "_", name).upper() if kind == "input" else name
        value = os.environ.get(variable, default)
        if value is None:
            raise ConfigError(
                f"MCP server {self.server!r}: {match[0]} needs the environment variable {variable}, which is not set"
            )
        if variable in os.environ and not value.startswith(("/", "~")):  # a path is not a secret, and occurs in results
            self._add(_SCHEME.sub("", value))
        return value


def without(text: str, secrets: tuple[str, ...]) -> str:
    """The text with every secret replaced by `***`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
