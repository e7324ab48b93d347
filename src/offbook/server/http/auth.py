"""Access control of the server: a key, which browsers ask for and send as a password; on loopback without a key, the Host header."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.http_access import (
    OPEN_PATHS,
    READING,
    TRAJECTORY_KEY,
    Refusal,
    checked_key,
    host_refusal,
    is_loopback,
    sent_key,
    trajectory_key,
)

from .model_paths import trajectory_of


@dataclass(frozen=True)
class Access:
    """The access that a request has. `trajectory` is the only one whose calls a program may make and read."""

    trajectory: str | None = None


@dataclass(frozen=True)
class Key:
    """The server's key. `kept` is the file that stores it; `is_new` means generated just now, so it must be shown once."""

    text: str
    kept: Path | None = None
    is_new: bool = False


def key_for(host: str, configured: str | None, folder: Path) -> Key | None:
    """The key that the server requires; None on loopback without a configured key.

    Beyond loopback without a configured key, it is read from `folder`, or generated and stored there with mode 0600. Raises
    ConfigError for a key that no header can carry, and for a file that cannot be read or written.
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
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the key cannot be read ({error}); delete the file for a new key") from error
    kept = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if kept:
        path.chmod(0o600)
        return Key(kept[0], path)
    key = "ob-" + secrets.token_urlsafe(32)
    try:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(key + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); free space there, or set --api-key") from error
    return Key(key, path, is_new=True)


class Guard:
    """Decides whether a request may pass, from its method, path and headers (lower-case names).

    Holders of `viewer_keys` may only read.
    """

    def __init__(self, key: str | None, viewer_keys: Sequence[str] = ()) -> None:
        self.key = key
        self._viewer_keys = [viewer.encode() for viewer in viewer_keys]

    def refusal(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Refusal | None:
        """The rejection of a request; None if it may pass."""
        decided = self.decide(path, headers, method)
        return decided if isinstance(decided, tuple) else None

    def decide(self, path: str, headers: Mapping[str, str], method: str) -> Refusal | Access | None:
        """The access that a request has; None for a path that is open to everybody; or its rejection."""
        if self.key is None:
            return host_refusal(headers.get("host", "")) or Access()
        if path in OPEN_PATHS:
            return None
        sent = sent_key(headers)
        if sent is None:
            return 401, "missing_api_key", "This server needs a key: send the header `Authorization: Bearer <key>`"
        views = [hmac.compare_digest(sent, key) for key in self._viewer_keys]  # all, so that the time reveals nothing
        if hmac.compare_digest(sent, self.key.encode()):
            return Access()
        if not any(views):
            return self._of_trajectory(self.key, sent, path, method)
        if method not in READING:
            return 403, "read_only_key", f"This key may only read: {method} {path} needs the server's own key"
        return Access()

    def _of_trajectory(self, key: str, sent: bytes, path: str, method: str) -> Refusal | Access:
        """The access of a key that is derived from the server's, for one trajectory."""
        trajectory = trajectory_of(path)
        if trajectory is not None and hmac.compare_digest(sent, trajectory_key(key, trajectory).encode()):
            return Access(trajectory)
        if sent.startswith(TRAJECTORY_KEY.encode()):
            return (
                403,
                "key_of_one_trajectory",
                f"This key is for the model calls of one trajectory, below /t/<its id>/: {method} {path} needs the server's own key",
            )
        return (
            401,
            "invalid_api_key",
            "The key is wrong: send the one that the server was started with (one that it made itself is in the "
            "file `key` of its directory)",
        )
