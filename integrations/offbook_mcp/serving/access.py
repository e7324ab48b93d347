"""Access control of `offbook mcp serve`: a key, or loopback only. The rules are those of Offbook's own server."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from offbook.base.errors import ConfigError

OPEN_PATH = "/health"


def checked_key(host: str, key: str | None) -> str | None:
    """Return the key. Raises ConfigError for a key that no header can carry, and for a missing key beyond loopback."""
    if key is not None and (not key.strip() or not key.isascii() or not key.isprintable()):
        raise ConfigError("--api-key: must be printable ASCII and not empty")
    if key is None and not is_loopback(host):
        raise ConfigError(f"--host {host}: other machines reach it: set a key, --api-key or OFFBOOK_API_KEY")
    return key


def is_loopback(host: str) -> bool:
    """Whether an address or host name is only reachable from this machine."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class KeyGate:
    """ASGI middleware that requires the key. Without a key, the Host header must name this machine (DNS rebinding)."""

    app: ASGIApp
    key: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if self.key is None:
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if is_loopback(name):
                return None
            return fault(
                403, "host_not_allowed", f"Host {host!r} is not this machine: start with --api-key to serve it"
            )
        kind, _, sent = headers.get("authorization", "").partition(" ")
        right = kind.lower() == "bearer" and hmac.compare_digest(sent.strip().encode(), self.key.encode())
        if right or scope["path"] == OPEN_PATH:
            return None
        return fault(401, "invalid_api_key", "send the header `Authorization: Bearer <key>`")


def fault(status: int, code: str, message: str) -> JSONResponse:
    """An error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status_code=status)
