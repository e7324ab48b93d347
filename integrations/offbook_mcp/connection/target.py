"""The target of training: one or several MCP servers, from a command, a URL, an `mcp.json` or an object."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypedDict, cast

import httpx2
from mcp.server import Server as LowLevelServer
from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Unpack

from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook_mcp.tools.tool import ServerDescription
from offbook_mcp.tools.toolset import ModelTool, uses_folder

from .http_transport import client_credentials
from .servers import AnyServer, HttpServer, InProcess, InProcessServer, Limits, ServerFactory, StdioServer

logger = logging.getLogger("offbook")

_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)

TargetLike: TypeAlias = "Target | AnyServer | InProcess | ServerFactory | str | Path"
"""A command, a URL, the path of an `mcp.json`, a server object, or a function from a rollout's folder to a server object."""

Decide: TypeAlias = Callable[
    [Sequence[ServerDescription], Sequence[ModelTool], Mapping[str, bool]], Awaitable[Mapping[str, bool]]
]
"""The servers, their tools, and the decisions of `allow` and `deny` by name -> these decisions and further ones."""


class ConnectOptions(TypedDict, total=False):
    """Options of `Target.parse`; see the fields of `Target`."""

    only: tuple[str, ...]
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    allow_all: bool
    decide: Decide | None
    bind: Mapping[str, object]
    stateless: bool | None
    fixture: Path | None
    limits: Limits


@dataclass(frozen=True)
class Target:
    """MCP servers, and which of their tools the model sees.

    only: names of the tools to use, as `tool`, `server.tool` or the model's name for it; empty: all.
    allow: tools to call although their annotations do not say that they only read; one whose words do not suggest a write then
    counts as reading. allow_all: call all others too, except those that may show secrets. deny: tools that are never called or shown.
    decide: asked about the tools once the servers are listed.
    bind: values of arguments that are hidden from the model, by `argument` or `tool.argument`.
    stateless: whether rollouts share one session; None: only with servers of which every tool is read-only.
    fixture: the folder that is copied to every rollout's `{rollout_dir}`.
    limits: see `Limits`.

    Raises ConfigError for servers with equal names, or options that contradict each other.
    """

    servers: tuple[AnyServer, ...]
    only: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    allow_all: bool = False
    decide: Decide | None = field(default=None, repr=False)
    bind: Mapping[str, object] = field(default_factory=dict[str, object])
    stateless: bool | None = None
    fixture: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("target: at least one MCP server is needed")
        names = Counter(server.name for server in self.servers)
        if doubled := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"target: two servers are named {doubled[0]!r}; rename one")
        if both := set(self.allow) & set(self.deny):
            raise ConfigError(f"allow, deny: {min(both)!r} is in both; leave it in one")
        placed = [server.name for server in self.servers if server.uses_folder]
        if self.stateless and placed:
            raise ConfigError(
                f"stateless: rollouts cannot share {placed[0]!r}, whose command or environment has {{rollout_dir}}"
            )
        if self.fixture is not None:
            if not self.fixture.is_dir():
                raise ConfigError(f"fixture: {str(self.fixture)!r} is not a folder")
            if not self.uses_folder:
                raise ConfigError(
                    "fixture: nothing uses it; put {rollout_dir} into the command, an environment variable, or bind an "
                    "argument to it, as in bind={'repo_path': '{rollout_dir}'}"
                )

    @property
    def uses_folder(self) -> bool:
        """Whether every rollout needs its own folder."""
        return uses_folder(self.bind) or any(server.uses_folder for server in self.servers)

    def shown(self) -> str:
        """The servers on one line, without secrets."""
        return "; ".join(server.shown() for server in self.servers)

    @classmethod
    def parse(
        cls,
        target: TargetLike,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        env: Mapping[str, str] | None = None,
        read_only: bool = False,
        **options: Unpack[ConnectOptions],
    ) -> Target:
        """Build a target from any TargetLike. Raises ConfigError.

        `headers` and `auth` apply to URLs, `env` to commands. `read_only` says that all tools of the servers only read.
        """
        if isinstance(target, Target):
            if headers or auth or env or read_only or options:
                raise ConfigError("target: it is already a Target; pass the options to Target.parse")
            return target
        servers = _servers(target)
        if headers or auth:
            servers = tuple(_with_access(server, headers or {}, auth) for server in servers)
        if env:
            servers = tuple(_with_env(server, env) for server in servers)
        if read_only:
            servers = tuple(replace(server, read_only=True) for server in servers)
        return cls(servers, **options)


def _servers(target: AnyServer | InProcess | ServerFactory | str | Path) -> tuple[AnyServer, ...]:
    if isinstance(target, StdioServer | HttpServer | InProcessServer):
        return (target,)
    if isinstance(target, Path):
        return read_mcp_json(target)
    if isinstance(target, str):
        return _from_text(target.strip())
    if isinstance(target, MCPServer | LowLevelServer):
        server = cast(InProcess, target)
        return (InProcessServer(server.name or "server", server),)
    if callable(target):
        return (InProcessServer(getattr(target, "__name__", "server"), target),)
    raise ConfigError(
        f"target: a command, a URL, an mcp.json or a server object is needed, got {type(target).__name__} {target!r:.80}"
    )


def _from_text(text: str) -> tuple[AnyServer, ...]:
    if not text:
        raise ConfigError("target: it is empty; a command, a URL or an mcp.json is needed")
    if re.match(r"https?://", text):
        return (HttpServer(re.sub(r"\W+", "-", text.split("//", 1)[1].split("/")[0].rpartition("@")[2]), text),)
    if text.endswith(".json") and (" " not in text or os.path.isfile(os.path.expanduser(text))):
        return read_mcp_json(Path(text))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"target: {text!r} is not a command line: {error}; check the quotes") from error
    env: dict[str, str] = {}
    while words and (match := _VARIABLE.fullmatch(words[0])):
        env[match[1]] = match[2]
        words.pop(0)
    if not words:
        raise ConfigError(f"target: {text!r} has no command, only variables: add the command after them")
    return (StdioServer(_name_of(words), words[0], tuple(words[1:]), env),)


def _name_of(words: list[str]) -> str:
    """A short name for a command: its program, or the script or module that an interpreter runs."""
    candidates = [word for word in words[1:] if not word.startswith("-")]
    program = Path(words[0]).name
    if re.fullmatch(r"(python[\d.]*|node|npx|uvx|uv|bunx|deno)(\.exe)?", program) and candidates:
        parts = [part for part in Path(candidates[0]).parts if part not in ("dist", "build", "src")]
        if parts[-1].startswith("index."):
            parts.pop()
        return re.sub(r"[^\w-]+", "-", Path(parts[-1]).stem) if parts else program
    return program


def _with_access(server: AnyServer, headers: Mapping[str, str], auth: httpx2.Auth | None) -> AnyServer:
    if not isinstance(server, HttpServer):
        raise ConfigError(f"headers, auth: they are for a URL, and {server.name!r} is not one: leave them out")
    return replace(server, headers={**server.headers, **headers}, auth=auth or server.auth)


def _with_env(server: AnyServer, env: Mapping[str, str]) -> AnyServer:
    if not isinstance(server, StdioServer):
        raise ConfigError(f"env: it is for a command, and {server.name!r} is not one: leave it out")
    return replace(server, env={**server.env, **env})


class _Auth(BaseModel):
    """Cursor's static OAuth client, and the authorization server that issued it."""

    client_id: Annotated[str, Field(alias="CLIENT_ID")]
    client_secret: Annotated[str, Field(alias="CLIENT_SECRET")]
    scopes: list[str] = []
    issuer: str | None = None


class _Entry(BaseModel):
    """One server. Keys that only concern the editor are ignored."""

    model_config = ConfigDict(extra="allow")

    type: Literal["stdio", "http", "streamable-http", "streamableHttp", "sse"] | None = None
    command: str | None = None
    args: list[str] = []
    env: dict[str, str | int | float | bool | None] = {}
    env_file: Annotated[str | None, Field(alias="envFile")] = None
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    auth: _Auth | None = None
    disabled: bool = False
    read_only: Annotated[bool, Field(alias="readOnly")] = False


class _File(BaseModel):
    mcp_servers: Annotated[dict[str, _Entry] | None, Field(alias="mcpServers")] = None
    servers: dict[str, _Entry] | None = None


def read_mcp_json(path: Path) -> tuple[AnyServer, ...]:
    """Read the servers of a file that are not disabled.

    References such as `${env:TOKEN}` stay, and are resolved when a server starts. Raises ConfigError, naming the place in
    the file.
    """
    path = path.expanduser().absolute()
    try:
        file = _File.model_validate(read_json(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place}: {first['msg']}") from None  # the cause would print the values
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON (comments are not): {error}") from error
    entries = file.mcp_servers if file.mcp_servers is not None else file.servers
    if entries is None:
        raise ConfigError(f"{path}: it has neither `mcpServers` nor `servers`")
    servers = tuple(_server(name, entry, path) for name, entry in entries.items() if not entry.disabled)
    if not servers:
        raise ConfigError(f"{path}: all its servers are disabled, or it has none")
    return servers


def _server(name: str, entry: _Entry, path: Path) -> AnyServer:
    where = f"{path}: server {name!r}"
    if (entry.command is None) == (entry.url is None):
        raise ConfigError(f"{where} needs either `command` or `url`")
    if entry.model_extra and entry.model_extra.get("sandboxEnabled"):
        logger.warning("%s asks for a sandbox, which only VS Code has: it runs without one", where)
    if entry.command is not None:
        env = {key: str(value) for key, value in entry.env.items() if value is not None}
        env_file = path.parent / entry.env_file.replace("${workspaceFolder}/", "") if entry.env_file else None
        return StdioServer(
            name, entry.command, tuple(entry.args), env, env_file, entry.cwd, path.parent, entry.read_only
        )
    assert entry.url is not None
    auth = _auth(entry.url, entry.auth, where)
    return HttpServer(name, entry.url, entry.headers, auth, path.parent, entry.read_only)


def _auth(url: str, auth: _Auth | None, where: str) -> httpx2.Auth | None:
    if auth is None:
        return None
    if auth.issuer is None:
        raise ConfigError(
            f"{where}: `auth` needs `issuer`, the URL of the authorization server; without it the MCP server would decide who "
            "gets the client's secret"
        )
    return client_credentials(url, auth.client_id, auth.client_secret, issuer=auth.issuer, scopes=auth.scopes)
