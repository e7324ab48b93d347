"""Sign-in and sign-out of browsers. The sign-in page is the only page that needs no key."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from starlette.types import Scope

from offbook.base.http_access import READING, same
from offbook.server.http.auth import COOKIE, PAGE_ACTIONS, SESSION_SECONDS, SIGN_IN, SIGN_OUT, Access, Sessions

from .rendering import Crumb, page

_PROGRAMS = ("/v1", "/api", "/t/", "/m/", "/health", PAGE_ACTIONS)
"""Path prefixes of programs' requests: they get a JSON error instead of the sign-in page."""


def is_page(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request is a browser's request for a page."""
    wants = headers.get("accept", "")
    return (
        method in READING and not path.startswith(_PROGRAMS) and ("text/html" in wants or "*/*" in wants or not wants)
    )


def to_sign_in(scope: Scope, headers: Mapping[str, str]) -> Response | None:
    """Redirect to the sign-in page, which returns to the requested page. None for what is not a browser's page."""
    if not is_page(scope["method"], scope["path"], headers):
        return None
    query = scope["query_string"].decode("latin-1")
    wanted = quote(scope["path"]) + (f"?{query}" if query else "")
    return RedirectResponse(SIGN_IN + ("" if wanted == "/" else f"?next={quote(wanted, safe='')}"), 303)


def sign_in_routes(sessions: Sessions) -> APIRouter:
    """The routes for signing in and out."""
    router = APIRouter()

    @router.get(SIGN_IN)
    async def sign_in_page(request: Request) -> Response:
        return _page(request, "")

    @router.post(SIGN_IN)
    async def sign_in(request: Request) -> Response:
        """Sign in with the token of a one-time link, or with a key."""
        form = await _form(request)
        once, peer = form.get("once", ""), request.client.host if request.client is not None else ""
        wait = 0.0 if once else sessions.wrong_keys.wait(peer)
        if wait:
            answer = _page(request, f"Too many wrong keys: try again in {wait:.0f} s.", status=429)
            answer.headers["retry-after"] = str(ceil(wait))
            return answer
        cookie = sessions.open_by_link(once) if once else sessions.open_by_key(form.get("key", ""))
        if cookie is None:
            if not once:
                sessions.wrong_keys.add(peer)
            why = (
                "This link was used, or is older than 15 minutes. Sign in with a key." if once else "The key is wrong."
            )
            return _page(request, why, status=401)
        answer = RedirectResponse(_inside(form.get("next", "")), 303)
        answer.set_cookie(
            COOKIE, cookie, max_age=SESSION_SECONDS, httponly=True, samesite="strict", secure=_encrypted(request)
        )
        return answer

    @router.post(SIGN_OUT)
    async def sign_out(request: Request) -> Response:
        access: Access = request.state.access
        form = await _form(request)
        if not same(form.get("csrf", ""), access.csrf):
            return _page(request, "The form was too old: nothing was changed.", status=403)
        if access.session:
            sessions.close(request.headers.get("cookie", ""))
        answer = RedirectResponse(SIGN_IN, 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    _ = (sign_in_page, sign_in, sign_out)
    return router


def _page(request: Request, fault: str, status: int = 200) -> Response:
    query = request.query_params
    context = {
        "fault": fault,
        "once": "" if fault else query.get("once", ""),
        "next": _inside(query.get("next", "")),
    }
    return page(request, "sign_in.html", "Sign in", (Crumb("Sign in"),), context, status)


async def _form(request: Request) -> dict[str, str]:
    body = (await request.body()).decode("utf-8", "replace")
    return {name: values[0] for name, values in parse_qs(body).items()}


def _inside(path: str) -> str:
    """The path if it belongs to this server, else "/" (protects against open redirects)."""
    parts = urlsplit(path)
    plain = path.startswith("/") and not path.startswith(("//", "/\\")) and not parts.scheme and not parts.netloc
    return path if plain and path.isprintable() else "/"


def _encrypted(request: Request) -> bool:
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "") == "https"
