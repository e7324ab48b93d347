"""The three kinds of MCP server: a command, a URL, and an object in this process; the limits on each; and the references to the
environment in their settings, as editors write them in `mcp.json`.

`${env:NAME}`, `${NAME}`, `${NAME:-default}`, `${input:some-id}` (the variable SOME_ID), `${workspaceFolder}` (the folder of
the file) and `${userHome}`. They are resolved when a server starts. Whatever is stored, hashed or shown has the reference.
"""

from __future__ import annotations

import json
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
from offbook.base.text import word_list

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


def _secret_of(before: str, word: str) -> str:
    """The secret in a word of a command line, by the flag before it or the name in it; "" if none is named."""
    if before.startswith("-") and "=" not in before and names_secret(before):
        return word
    match = _ASSIGNED.fullmatch(word)
    return match[2] if match and names_secret(match[1]) else ""


def argument_secrets(words: Sequence[str]) -> list[str]:
    """The secrets among the words of a command line, by their flags, names or forms. A path of a file that exists is none."""
    secrets: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        named = _secret_of(before, word)
        secrets += [*([named] if named else []), *keys_in(word)]
    return [secret for secret in secrets if not os.path.exists(os.path.expanduser(secret))]


def url_secrets(url: str) -> list[str]:
    """The secrets among the parameters of a URL, and its password."""
    return [value for name, value in parse_qsl(urlsplit(url).query) if names_secret(name)] + keys_in(url)


def _masked(words: list[str]) -> list[str]:
    """Mask the secrets of a command line, as in `--api-key sk-1` and `TOKEN=sk-1`, unless they are references."""
    shown: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        if "${" in word:
            shown.append(word)
        elif secret := _secret_of(before, word):
            shown.append(word.removesuffix(secret) + "***")
        else:
            shown.append(without(word, tuple(keys_in(word))))
    return shown


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
