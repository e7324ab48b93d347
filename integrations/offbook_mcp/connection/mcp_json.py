"""Reads the `mcp.json` files of Claude Desktop, Claude Code and Cursor (`mcpServers`) and of VS Code (`servers`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json

from .oauth import client_credentials
from .servers import AnyServer, HttpServer, StdioServer

logger = logging.getLogger("offbook")


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
