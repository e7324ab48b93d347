"""Access control of the server: a key or a session opened with one; on loopback without a key, the Host header."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.http_access import (
    OPEN_PATHS,
    READING,
    Refusal,
    checked_key,
    host_refusal,
    is_loopback,
    same,
    sent_key,
)

from .key_file import KeyFile
from .sessions import CSRF_HEADER, Access, Sessions

SIGN_IN = "/sign-in"
SIGN_OUT = "/sign-out"
STATIC = "/pages/static/"
PAGE_ACTIONS = "/pages/"
"""Prefix of requests by the dashboard's pages. Below it, every request that changes something needs the CSRF token."""


@dataclass(frozen=True)
class Key:
    """The server's key. `kept` is the file that stores it; `is_new` means generated just now, so it must be shown once."""

    text: str
    kept: Path | None = None
    is_new: bool = False


def key_for(host: str, configured: str | None, folder: Path) -> Key | None:
    """The key that the server requires; None on loopback without a configured key.

    Beyond loopback without a configured key, it is read from `folder`, or generated and stored there with mode 0600. Raises
    ConfigError for a key that no header can carry.
    """
    if configured is not None:
        return Key(checked_key(configured))
    return None if is_loopback(host) else _kept_key(folder)


def _kept_key(folder: Path) -> Key:
    path = folder / "key"
    try:
        lines = path.read_text("ascii").split("\n")
    except FileNotFoundError:
        lines = []
    kept = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if kept:
        path.chmod(0o600)
        return Key(kept[0], path)
    key = "ob-" + secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(key + "\n")
    return Key(key, path, is_new=True)


class Guard:
    """Decides whether a request may pass, from its method, path and headers (lower-case names).

    Holders of `viewer_keys` may only read.
    """

    def __init__(self, key: str | None, viewer_keys: Sequence[str] = (), file: KeyFile | None = None) -> None:
        """`file` holds keys that can change while the server runs; without it, `key` is the only one."""
        only = frozenset({key.encode()} if key is not None else ())
        owners = file.keys if file is not None else lambda: only
        self.sessions = Sessions(owners, viewer_keys) if key is not None else None
        self._local = Access("owner", secrets.token_urlsafe(24))

    def refusal(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Refusal | None:
        """The rejection of a request; None if it may pass."""
        decided = self.decide(path, headers, method)
        return decided if isinstance(decided, tuple) else None

    def decide(self, path: str, headers: Mapping[str, str], method: str) -> Refusal | Access | None:
        """The access that a request has; None for a path that is open to everybody; or its rejection."""
        if self.sessions is None:
            return host_refusal(headers.get("host", "")) or self._checked(self._local, path, headers, method)
        if path in OPEN_PATHS or path == SIGN_IN or path.startswith(STATIC):
            return None
        sent = sent_key(headers.get("authorization", ""))
        if sent is None:
            access = self.sessions.access(headers.get("cookie", ""))
            if access is not None:
                return self._checked(access, path, headers, method)
            return 401, "missing_api_key", "This server needs a key: send the header `Authorization: Bearer <key>`"
        role = self.sessions.role_of_key(sent)
        if role is None:
            return (
                401,
                "invalid_api_key",
                "The key is wrong: send the one that the server was started with (one that it made itself is in the "
                "file `key` of its directory)",
            )
        return self._checked(Access(role, self._local.csrf), path, headers, method)

    def _checked(self, access: Access, path: str, headers: Mapping[str, str], method: str) -> Refusal | Access:
        if method in READING or path == SIGN_OUT:
            return access
        if access.role == "viewer":
            return 403, "read_only_key", f"This key may only read: {method} {path} needs the server's own key"
        if (access.session or path.startswith(PAGE_ACTIONS)) and not same(headers.get(CSRF_HEADER, ""), access.csrf):
            return (
                403,
                "csrf_token_missing",
                f"{method} {path} was sent by a browser without the token of its page (header {CSRF_HEADER}): load the "
                "page again, or send a key",
            )
        return access
