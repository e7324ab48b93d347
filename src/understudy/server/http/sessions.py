"""Signed-in browsers: one-time links, session cookies that need no table, and CSRF tokens."""

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
"""A viewer reads pages and GET APIs; the owner may do everything."""

COOKIE = "understudy_session"
CSRF_HEADER = "x-understudy-csrf"
SESSION_SECONDS = 7 * 86_400
LINK_SECONDS = 900
"""How long a one-time link can be used."""


@dataclass(frozen=True)
class Access:
    """What a request may do. `csrf`: what it must carry to change anything from a page. `session`: by a cookie, whose
    browser can sign out."""

    role: Role
    csrf: str
    session: bool = False


class Sessions:
    """Sessions of the holders of keys. A cookie is signed with the key that opened it: it ends with that key, and outlives a
    restart of the server."""

    def __init__(self, owner_keys: Callable[[], Collection[bytes]], viewer_keys: Sequence[str] = ()) -> None:
        """`owner_keys` are those in force, at least one; they may change."""
        self._owner_keys = owner_keys
        self._viewer_keys = [each.encode() for each in viewer_keys]
        self._links: dict[str, float] = {}

    def _keys(self) -> list[tuple[bytes, Role]]:
        keys: list[tuple[bytes, Role]] = [(key, "owner") for key in sorted(self._owner_keys())]
        viewers: list[tuple[bytes, Role]] = [(key, "viewer") for key in self._viewer_keys]
        return keys + viewers

    def role_of_key(self, sent: bytes) -> Role | None:
        """Whose key it is; every key is compared, so that the time tells nothing."""
        matches: list[Role] = [role for key, role in self._keys() if hmac.compare_digest(sent, key)]
        return matches[0] if matches else None

    def one_time_link(self) -> str:
        """The path of a link that signs one browser in as the owner."""
        token = secrets.token_urlsafe(24)
        self._links[token] = time.monotonic() + LINK_SECONDS
        return f"/sign-in?once={token}"

    def open_by_link(self, token: str) -> str | None:
        """A new session's cookie for a one-time link, which is used up; None for one that is unknown, used or too old."""
        until = self._links.pop(token, 0.0)
        return self._signed(self._keys()[0][0]) if until > time.monotonic() else None

    def open_by_key(self, sent: str) -> str | None:
        """A new session's cookie for a key; None for a wrong one."""
        encoded = sent.strip().encode()
        found = [key for key, _ in self._keys() if hmac.compare_digest(encoded, key)]
        return self._signed(found[0]) if found else None

    def access(self, cookie_header: str) -> Access | None:
        """What the session of a Cookie header may do; None without a valid one."""
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
    """The value of a cookie; "" where there is none."""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _hmac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
