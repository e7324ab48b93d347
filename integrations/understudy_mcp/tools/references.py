"""Resolves references to the environment in a server's settings, as editors write them in `mcp.json`.

`${env:NAME}`, `${NAME}`, `${NAME:-default}`, `${input:some-id}` (the variable SOME_ID), `${workspaceFolder}` (the folder of
the file) and `${userHome}`. They are resolved when a server starts. Whatever is stored, hashed or shown has the reference.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from understudy.integration import ConfigError

_REFERENCE = re.compile(r"\$\{(?:(env|input):)?([A-Za-z_][\w.-]*)(?::-([^}]*))?\}")
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth|cookie|_pat$", re.IGNORECASE)
_SHORTEST_SECRET = 6  # shorter values occur in ordinary text too often to mask them


def names_secret(name: str) -> bool:
    """Whether a setting of this name is probably a secret."""
    return _SECRET_NAME.search(name) is not None


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
            self._add(value, *value.split())
        return value

    def secrets(self) -> tuple[str, ...]:
        """The values to mask in messages and results, the longest first."""
        return tuple(sorted(self._secrets, key=len, reverse=True))

    def _add(self, *values: str) -> None:
        self._secrets.update(value for value in values if len(value) >= _SHORTEST_SECRET)

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
            self._add(value)
        return value


def without(text: str, secrets: tuple[str, ...]) -> str:
    """The text with every secret replaced by `***`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
