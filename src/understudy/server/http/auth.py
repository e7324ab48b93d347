"""Who may call: a key beyond loopback, the Host header on loopback."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key, so that load balancers and starters can ask."""


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be reached from this machine."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Key:
    """The key in force. `made`: just now, so that it must be shown once; `kept`: the file that holds it."""

    text: str
    kept: Path | None = None
    made: bool = False


def key_for(host: str, given: str | None, folder: Path) -> Key | None:
    """The given key; beyond loopback the kept one, made if there is none (0600); else None. Raises ConfigError."""
    if given is not None:
        if not given.strip() or not given.isascii() or not given.isprintable():
            raise ConfigError("--api-key: must be printable ASCII and not empty")
        return Key(given)
    return None if is_loopback(host) else _kept_key(folder)


def _kept_key(folder: Path) -> Key:
    path = folder / "key"
    try:
        kept = path.read_text("ascii").strip()
    except FileNotFoundError:
        kept = ""
    if kept:
        path.chmod(0o600)
        return Key(kept, path)
    key = "us-" + secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(key + "\n")
    return Key(key, path, made=True)


class Guard:
    """Decides about one request from its path and headers (lower-case names)."""

    def __init__(self, key: str | None) -> None:
        self._key = key.encode() if key is not None else None

    def refusal(self, path: str, headers: Mapping[str, str]) -> tuple[int, str, str] | None:
        """None when the request may pass, else (status, code, message)."""
        if self._key is None:
            return self._host_refusal(headers.get("host", ""))
        if path in OPEN_PATHS:
            return None
        sent = _sent_key(headers.get("authorization", ""))
        if sent is None:
            return 401, "missing_api_key", "This server needs a key: send the header `Authorization: Bearer <key>`"
        if not hmac.compare_digest(sent, self._key):
            return (
                401,
                "invalid_api_key",
                "The key is wrong: send the one that the server was started with (one that it made itself is in the "
                "file `key` of its directory)",
            )
        return None

    def _host_refusal(self, host: str) -> tuple[int, str, str] | None:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if is_loopback(name):
            return None
        return (
            403,
            "host_not_allowed",
            f"Host {host!r} is not this machine: without a key only localhost, 127.0.0.1 and [::1] are answered "
            "(protection against DNS rebinding); start the server with --api-key to serve other names",
        )


def _sent_key(authorization: str) -> bytes | None:
    """The key of `Bearer <key>`, or the password of `Basic` (what a browser sends)."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip().encode()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2] or None
        except binascii.Error:
            return None
    return None
