"""Who may send a request to an HTTP server of ours: whoever has the key; without a key this machine; no other site's page.

Pure rules over a request's method, path and headers (lower-case names), for every server and framework.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from .errors import ConfigError

logger = logging.getLogger("offbook")

KEY_VARIABLE = "OFFBOOK_API_KEY"
"""Environment variable with the default of --api-key."""
Refusal = tuple[int, str, str]
"""HTTP status, error code and message of a rejected request."""
OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key, for load balancers and for whoever starts the server."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. Browsers hide their responses from other sites' pages."""


def is_loopback(host: str) -> bool:
    """Whether an address or host name is only reachable from this machine."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def checked_key(key: str) -> str:
    """Return the key. Raises ConfigError for one that no header can carry."""
    if not key.strip() or not key.isascii() or not key.isprintable():
        raise ConfigError("--api-key: must be printable ASCII and not empty")
    return key


def key_option(option: str | None) -> str | None:
    """The key that a command got: `@FILE` is the first line of a file; None: the variable OFFBOOK_API_KEY, if set.

    A key that was written as an argument is accepted with a warning. Raises ConfigError for a file that cannot be read.
    """
    if not option:
        return os.environ.get(KEY_VARIABLE) or None
    if not option.startswith("@"):
        logger.warning(
            "--api-key: every account of this machine can read it in `ps`; pass --api-key @FILE, or set %s",
            KEY_VARIABLE,
        )
        return option
    try:
        return Path(option[1:]).expanduser().read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key {option}: the file cannot be read: {error}") from error


def key_for_host(host: str, key: str | None) -> str | None:
    """The key that a server without a key of its own requires at `host`; None: none, on loopback.

    Raises ConfigError for a missing key beyond loopback, and for a key that no header can carry.
    """
    if key is not None:
        return checked_key(key)
    if not is_loopback(host):
        raise ConfigError(f"--host {host}: other machines reach it: set a key, --api-key @FILE or OFFBOOK_API_KEY")
    return None


TRAJECTORY_KEY = "ob-t-"
"""How a key for one trajectory begins."""


def trajectory_key(key: str, trajectory_id: str) -> str:
    """The key that a program gets instead of the server's: it is valid for the model calls of one trajectory only.

    HMAC-SHA256 (RFC 2104) of the id under the server's key, so that neither side stores it and nobody can get back to the key."""
    message = f"offbook trajectory {trajectory_id}".encode()
    return TRAJECTORY_KEY + hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


KEY_HEADERS = ("x-api-key", "x-goog-api-key")
"""Where clients of Anthropic's and Google's APIs send their key."""


def sent_key(headers: Mapping[str, str]) -> bytes | None:
    """The key in `Authorization: Bearer <key>`, the password in `Basic` credentials, which browsers send, or the value of
    one of KEY_HEADERS."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip().encode()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2] or None
        except binascii.Error:
            return None
    return next((headers[name].strip().encode() for name in KEY_HEADERS if headers.get(name, "").strip()), None)


def key_refusal(key: str | None, path: str, headers: Mapping[str, str]) -> Refusal | None:
    """The rejection of a request by a server with one key, or with none on loopback; None if it may pass."""
    if key is None:
        return host_refusal(headers.get("host", ""))
    sent = sent_key(headers)
    if path in OPEN_PATHS or (sent is not None and secrets.compare_digest(sent, key.encode())):
        return None
    return 401, "invalid_api_key", "send the header `Authorization: Bearer <key>`"


def host_refusal(host: str) -> Refusal | None:
    """The rejection of a `Host` header that is not this machine, as a page has that rebinds its name to loopback."""
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    if is_loopback(name):
        return None
    return (
        403,
        "host_not_allowed",
        f"Host {host!r} is not this machine: without a key only localhost, 127.0.0.1 and [::1] are answered "
        "(protection against DNS rebinding); start the server with --api-key to serve other names",
    )


def cross_site_refusal(method: str, headers: Mapping[str, str], allowed: Collection[str] | None) -> Refusal | None:
    """The rejection of a request that another site's page sends through a visitor's browser; None if it may pass.

    `allowed` has the origins (`https://name:port`) whose pages may do everything; None: the server has no option for them.

    Browsers name the source of a request in `Origin` and `Sec-Fetch-Site`. Other clients send neither, and pass. Bodies must
    have the JSON content type, which another site's form cannot send without a CORS preflight.
    """
    if method in READING:
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = origin is None or origin.partition("://")[2] == headers.get("host")
    if origin not in (allowed or ()) and not (own and site in ("none", "same-origin")):
        return (
            403,
            "origin_not_allowed",
            f"A web page at {origin or 'another site'} may not change anything here; "
            + (
                "let its own server send the request"
                if allowed is None
                else "start the server with --allow-origin and the page's origin to allow it"
            ),
        )
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and kind != "application/json":
        return (
            415,
            "content_type_not_json",
            f"Content-Type is {kind or 'missing'!r}: bodies are JSON, send the header `Content-Type: application/json`",
        )
    return None
