"""Access control of the server: a key, or a browser's session opened with one; on loopback without a key, the Host header.

Sessions are signed cookies. The server remembers only which of them were signed out, and wrong keys."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Literal

from itsdangerous import BadSignature, Signer, TimestampSigner

from offbook.base.errors import ConfigError
from offbook.base.http_access import (
    OPEN_PATHS,
    READING,
    TRAJECTORY_KEY,
    Refusal,
    checked_key,
    host_refusal,
    is_loopback,
    same,
    sent_key,
    trajectory_key,
)

from .model_paths import trajectory_of

Role = Literal["owner", "viewer", "program"]
"""A viewer may read pages and GET routes, a program may make the model calls of one trajectory; the owner may do everything."""

COOKIE = "offbook_session"
CSRF_HEADER = "x-offbook-csrf"
SESSION_SECONDS = 7 * 86_400
LINK_SECONDS = 900
"""How long a one-time link is valid."""
WRONG_KEYS, WRONG_SECONDS = 10, 60.0
"""Wrong keys that a peer may send to the sign-in page within so many seconds."""
PEERS = 4096
"""Peers whose wrong keys are remembered at most."""


class WrongKeys:
    """Counts the wrong keys that peers sent to the sign-in page."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def wait(self, peer: str) -> float:
        """Seconds until this peer may try again; 0: now."""
        now = time.monotonic()
        recent = [moment for moment in self._times.get(peer, []) if moment > now - WRONG_SECONDS]
        return 0.0 if len(recent) < WRONG_KEYS else recent[-WRONG_KEYS] + WRONG_SECONDS - now

    def add(self, peer: str) -> None:
        """Count a wrong key. Beyond PEERS, the peer that sent one longest ago is forgotten."""
        self._times[peer] = [*self._times.pop(peer, [])[1 - WRONG_KEYS :], time.monotonic()]
        if len(self._times) > PEERS:
            del self._times[next(iter(self._times))]


class SignedOut:
    """The sessions that were signed out, in a file so that a restart does not open them again; without it, in memory."""

    def __init__(self, file: Path | None) -> None:
        """Raises ConfigError if the file cannot be read."""
        self._file = file
        try:
            text = file.read_text("utf-8") if file is not None and file.exists() else ""
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file}: the sessions that were signed out cannot be read ({error}); restore it, or delete it and change the key, which ends every session"
            ) from error
        self._sessions = set(text.split("\n"))

    def add(self, session: str) -> None:
        """End a session. Raises OSError if that cannot be stored; the session ends in this process all the same."""
        name = _hashed(session)
        if name in self._sessions:
            return
        self._sessions.add(name)
        if self._file is not None:
            with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as out:
                out.write(f"{name}\n")

    def __contains__(self, session: str) -> bool:
        return bool(self._sessions) and _hashed(session) in self._sessions


def _hashed(session: str) -> str:
    """A session's name in the file, which does not open it if its signature is known otherwise."""
    return hashlib.sha256(session.encode()).hexdigest()


@dataclass(frozen=True)
class Access:
    """The access that a request has.

    `csrf` is the token that a page's request must send to change anything. `session` means that a session cookie gave the
    access, so the browser can sign out. `trajectory` is the only one whose calls a program may make and read.
    """

    role: Role
    csrf: str
    session: bool = False
    trajectory: str | None = None


class Sessions:
    """Sessions opened with keys. A cookie is signed with its key, so it survives a restart and ends with the key."""

    def __init__(self, key: str, viewer_keys: Sequence[str] = (), signed_out: Path | None = None) -> None:
        """`key` is the owner's. `signed_out` is the file of `SignedOut`."""
        self.wrong_keys = WrongKeys()
        self._signed_out = SignedOut(signed_out)
        self._key = key
        self._keys: list[tuple[bytes, Role]] = [
            (key.encode(), "owner"),
            *((it.encode(), "viewer") for it in viewer_keys),
        ]
        self._links: dict[str, float] = {}

    def role_of_key(self, sent: bytes) -> Role | None:
        """The role of a key; None for a wrong one. All keys are compared, so that the time reveals nothing."""
        matches: list[Role] = [role for key, role in self._keys if hmac.compare_digest(sent, key)]
        return matches[0] if matches else None

    def opens_trajectory(self, sent: bytes, trajectory_id: str) -> bool:
        """Whether a key is that of the trajectory, derived from the owner's key."""
        return hmac.compare_digest(sent, trajectory_key(self._key, trajectory_id).encode())

    def one_time_link(self) -> str:
        """Create a link that signs one browser in as the owner; returns its path."""
        token = secrets.token_urlsafe(24)
        self._links[token] = time.monotonic() + LINK_SECONDS
        return f"/sign-in?once={token}"

    def open_by_link(self, token: str) -> str | None:
        """A new session's cookie for a one-time link; None if the link is unknown, used or expired."""
        valid_until = self._links.pop(token, 0.0)
        return _new_session(self._keys[0][0]) if valid_until > time.monotonic() else None

    def open_by_key(self, sent: str) -> str | None:
        """A new session's cookie for a key; None for a wrong one."""
        encoded = sent.strip().encode()
        matches = [key for key, _ in self._keys if hmac.compare_digest(encoded, key)]
        return _new_session(matches[0]) if matches else None

    def access(self, cookie_header: str) -> Access | None:
        """The access of the session in a Cookie header; None without a valid session."""
        value = cookie_of(cookie_header, COOKIE)
        for key, role in self._keys:
            signer = _session_signer(key)
            try:
                opened = signer.unsign(value, return_timestamp=True)[1]
            except BadSignature:  # of another key, or changed
                continue
            # Not by the signer's `max_age`, which ends sessions when the clock is set back.
            if signer.get_timestamp() - opened.timestamp() > SESSION_SECONDS:
                continue
            if value in self._signed_out:
                return None
            csrf = Signer(key, "csrf", key_derivation="hmac", digest_method=hashlib.sha256).get_signature(value)
            return Access(role, csrf.decode(), session=True)
        return None

    def close(self, cookie_header: str) -> None:
        """End the session in a Cookie header. Raises OSError."""
        self._signed_out.add(cookie_of(cookie_header, COOKIE))


def cookie_of(header: str, name: str) -> str:
    """The value of a cookie; "" if there is none."""
    try:
        cookie = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return cookie.value if cookie is not None else ""


def _new_session(key: bytes) -> str:
    return _session_signer(key).sign(secrets.token_urlsafe(12)).decode()


def _session_signer(key: bytes) -> TimestampSigner:
    return TimestampSigner(key, "session", key_derivation="hmac", digest_method=hashlib.sha256)


SIGN_IN = "/sign-in"
SIGN_OUT = "/sign-out"
STATIC = "/pages/static/"
PAGE_ACTIONS = "/pages/"
"""Prefix of requests by pages. Below it, every request that changes something needs the CSRF token."""


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

    def __init__(self, key: str | None, viewer_keys: Sequence[str] = (), signed_out: Path | None = None) -> None:
        """`signed_out` is the file of sessions that were signed out; without it, they are forgotten at the end of the process."""
        self.sessions = Sessions(key, viewer_keys, signed_out) if key is not None else None
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
        sent = sent_key(headers)
        if sent is None:
            access = self.sessions.access(headers.get("cookie", ""))
            if access is not None:
                return self._checked(access, path, headers, method)
            return 401, "missing_api_key", "This server needs a key: send the header `Authorization: Bearer <key>`"
        role = self.sessions.role_of_key(sent)
        if role is None:
            trajectory = trajectory_of(path)
            if trajectory is not None and self.sessions.opens_trajectory(sent, trajectory):
                return Access("program", self._local.csrf, trajectory=trajectory)
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
