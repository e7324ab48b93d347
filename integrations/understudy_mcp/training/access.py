"""Who may call what is served here: anyone of this machine, or who has the key. The rules of Understudy's own server."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from understudy.integration import ConfigError

OPEN_PATH = "/health"


def checked_key(host: str, key: str | None) -> str | None:
    """The key in force. Raises ConfigError for one that no header can carry, and where one is needed and there is none."""
    if key is not None and (not key.strip() or not key.isascii() or not key.isprintable()):
        raise ConfigError("--api-key: must be printable ASCII and not empty")
    if key is None and not is_loopback(host):
        raise ConfigError(f"--host {host}: other machines reach it: set a key, --api-key or UNDERSTUDY_API_KEY")
    return key


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
class KeyGate:
    """ASGI: the application behind the key; without a key, for requests that name this machine (DNS rebinding)."""

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
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status_code=status)
