"""The three kinds of MCP server: a command, a URL, and an object in this process; and the limits on each."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import httpx2
from mcp.server import Server as LowLevelServer
from mcp.server.mcpserver import MCPServer

from offbook.base.errors import ConfigError
from offbook.base.redaction import keys_in

from .environment_references import names_secret, without

ROLLOUT_DIR = "{rollout_dir}"
"""Placeholder for the rollout's folder in a command, an environment variable or a bound argument."""
_ASSIGNED = re.compile(r"(-{1,2}[A-Za-z][\w.-]*(?==)|[A-Z][A-Z0-9_]*(?==)|[A-Z][\w-]*(?=:))[=:]\s*(.+)", re.DOTALL)
"""`--flag=value`, `VARIABLE=value` and `Header: value` in one word."""


@dataclass(frozen=True)
class StdioServer:
    """A command that speaks MCP over stdin and stdout.

    `env` is added to the few variables that the SDK passes on. `env_file` has further ones, one NAME=value per line.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    env_file: Path | None = None
    cwd: str | None = None
    workspace: Path | None = None  # the value of ${workspaceFolder}
    read_only: bool = False  # the user says that all its tools only read

    @property
    def uses_folder(self) -> bool:
        """Whether the command or environment contains `{rollout_dir}`, so that rollouts cannot share the server."""
        return any(ROLLOUT_DIR in text for text in (self.command, *self.args, *self.env.values(), self.cwd or ""))

    def shown(self) -> str:
        """The command line with unresolved references and masked secrets."""
        variables = [f"{name}={_shown_value(value)}" for name, value in self.env.items()]
        return " ".join([*variables, *(_quoted(word) for word in _masked([self.command, *self.args]))])


@dataclass(frozen=True)
class HttpServer:
    """An HTTP endpoint, streamable or of the older protocol with SSE. `auth` is an httpx2 authentication, such as the SDK's OAuth providers."""

    name: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    auth: httpx2.Auth | None = field(default=None, repr=False)
    workspace: Path | None = None
    read_only: bool = False

    uses_folder = False

    def shown(self) -> str:
        """The URL without user and password, with the values of secret parameters masked."""
        parts = urlsplit(self.url)
        query = [(name, "***" if names_secret(name) else value) for name, value in parse_qsl(parts.query)]
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=urlencode(query, safe="*{}$:")))


InProcess: TypeAlias = MCPServer | LowLevelServer[object]
"""A server object of the MCP SDK."""
ServerFactory: TypeAlias = Callable[[Path], InProcess]
"""A rollout's folder -> a server object for that rollout."""


@dataclass(frozen=True)
class InProcessServer:
    """A server object in this process, or a function that creates one for a rollout's folder."""

    name: str
    server: InProcess | ServerFactory = field(repr=False)
    read_only: bool = False

    @property
    def uses_folder(self) -> bool:
        return not isinstance(self.server, MCPServer | LowLevelServer)

    def shown(self) -> str:
        per_rollout = " of each rollout's own" if self.uses_folder else ""
        return f"{self.name} (in this process{per_rollout})"

    def object_for(self, folder: Path | None) -> InProcess:
        """The server object of one session."""
        if not self.uses_folder:
            return cast(InProcess, self.server)
        assert folder is not None, "a rollout of a server that uses a folder has one"
        return cast(ServerFactory, self.server)(folder)


AnyServer: TypeAlias = StdioServer | HttpServer | InProcessServer


def _shown_value(value: str) -> str:
    """The value if it is a reference or contains the rollout's folder; else `***`, since it could be a secret."""
    return value if "${" in value or ROLLOUT_DIR in value else "***"


def argument_secrets(words: Sequence[str]) -> list[str]:
    """The secrets among the words of a command line, by their flags, names or forms. A path of a file that exists is none."""
    found: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        if _secret_flag(before):
            found.append(word)
        elif (match := _ASSIGNED.fullmatch(word)) and names_secret(match[1]):
            found.append(match[2])
        found += keys_in(word)
    return [secret for secret in found if not os.path.exists(os.path.expanduser(secret))]


def url_secrets(url: str) -> list[str]:
    """The secrets among the parameters of a URL, and its password."""
    return [value for name, value in parse_qsl(urlsplit(url).query) if names_secret(name)] + keys_in(url)


def _masked(words: list[str]) -> list[str]:
    """Mask the secrets of a command line, as in `--api-key sk-1` and `TOKEN=sk-1`, unless they are references."""
    shown: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        match = _ASSIGNED.fullmatch(word)
        if "${" in word:
            shown.append(word)
        elif _secret_flag(before):
            shown.append("***")
        elif match and names_secret(match[1]):
            shown.append(word.removesuffix(match[2]) + "***")
        else:
            shown.append(without(word, tuple(keys_in(word))))
    return shown


def _secret_flag(word: str) -> bool:
    return word.startswith("-") and "=" not in word and names_secret(word)


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w@%+=:,./{}$*-]+", word) else shlex.quote(word)


@dataclass(frozen=True)
class Limits:
    """Limits per server and call. Raises ConfigError for a limit that is not above 0.

    start_seconds: until a server is ready. call_seconds: until a call has its response. explore_seconds: the same while the
    server is explored and scenarios are checked, which leave slower tools out. message_bytes: that a server may send before
    its response. result_chars: of a tool's result as the model reads it; the rest is cut.
    """

    start_seconds: float = 30.0
    call_seconds: float = 60.0
    explore_seconds: float = 5.0
    message_bytes: int = 8 * 2**20
    result_chars: int = 20_000

    def __post_init__(self) -> None:
        for name in ("start_seconds", "call_seconds", "explore_seconds", "message_bytes", "result_chars"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}: a number above 0 is needed, got {value!r}")
