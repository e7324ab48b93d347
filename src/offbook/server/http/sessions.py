"""Browser sessions: one-time links, signed session cookies without server-side state, and CSRF tokens."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Literal

Role = Literal["owner", "viewer"]
"""A viewer may read pages and GET routes; the owner may do everything."""

COOKIE = "offbook_session"
CSRF_HEADER = "x-offbook-csrf"
SESSION_SECONDS = 7 * 86_400
LINK_SECONDS = 900
"""How long a one-time link is valid."""


@dataclass(frozen=True)
class Access:
    """The access that a request has.

    `csrf` is the token that a page's request must send to change anything. `session` means that a session cookie gave the
    access, so the browser can sign out.
    """

    role: Role
    csrf: str
    session: bool = False


class Sessions:
    """Sessions opened with keys. A cookie is signed with its key, so it survives a restart and ends with the key."""

    def __init__(self, owner_keys: Callable[[], Collection[bytes]], viewer_keys: Sequence[str] = ()) -> None:
        """`owner_keys` returns the valid keys, at least one; they may change."""
        self._owner_keys = owner_keys
        self._viewer_keys = [key.encode() for key in viewer_keys]
        self._links: dict[str, float] = {}

    def _keys(self) -> list[tuple[bytes, Role]]:
        keys: list[tuple[bytes, Role]] = [(key, "owner") for key in sorted(self._owner_keys())]
        viewers: list[tuple[bytes, Role]] = [(key, "viewer") for key in self._viewer_keys]
        return keys + viewers

    def role_of_key(self, sent: bytes) -> Role | None:
        """The role of a key; None for a wrong one. All keys are compared, so that the time reveals nothing."""
        matches: list[Role] = [role for key, role in self._keys() if hmac.compare_digest(sent, key)]
        return matches[0] if matches else None

    def one_time_link(self) -> str:
        """Create a link that signs one browser in as the owner; returns its path."""
        token = secrets.token_urlsafe(24)
        self._links[token] = time.monotonic() + LINK_SECONDS
        return f"/sign-in?once={token}"

    def open_by_link(self, token: str) -> str | None:
        """A new session's cookie for a one-time link; None if the link is unknown, used or expired."""
        valid_until = self._links.pop(token, 0.0)
        return self._signed(self._keys()[0][0]) if valid_until > time.monotonic() else None

    def open_by_key(self, sent: str) -> str | None:
        """A new session's cookie for a key; None for a wrong one."""
        encoded = sent.strip().encode()
        matches = [key for key, _ in self._keys() if hmac.compare_digest(encoded, key)]
        return self._signed(matches[0]) if matches else None

    def access(self, cookie_header: str) -> Access | None:
        """The access of the session in a Cookie header; None without a valid session."""
        value = cookie_of(cookie_header, COOKIE)
        expires, _, rest = value.partition(".")
        nonce, _, signature = rest.partition(".")
        if not (expires.isdecimal() and nonce and signature) or int(expires) < time.time():
            return None
        for key, role in self._keys():
            if hmac.compare_digest(signature.encode(), _hmac(key, f"session {expires}.{nonce}").encode()):
                return Access(role, _hmac(key, f"csrf {value}"), session=True)
        return None

    def _signed(self, key: bytes) -> str:
        payload = f"{int(time.time()) + SESSION_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{payload}.{_hmac(key, f'session {payload}')}"


def cookie_of(header: str, name: str) -> str:
    """The value of a cookie; "" if there is none."""
    try:
        cookie = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return cookie.value if cookie is not None else ""


def _hmac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
