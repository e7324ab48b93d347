"""Protection against cross-site requests: another site's page must not change anything through a visitor's browser."""

from __future__ import annotations

from collections.abc import Collection, Mapping

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. Browsers hide their responses from other sites' pages."""


def refusal(
    method: str, headers: Mapping[str, str], allowed: Collection[str], *, form: bool = False
) -> tuple[int, str, str] | None:
    """Return the rejection of a request as (status, code, message); None if it may pass.

    Header names are lower-case. `allowed` has the origins (`https://name:port`) whose pages may do everything. `form` means
    that the route accepts a form of our own pages, which is not JSON.

    Browsers name the source of a request in `Origin` and `Sec-Fetch-Site`. Other clients send neither, and pass. Bodies must
    have the JSON content type, which another site's form cannot send without a CORS preflight.
    """
    if method in READING:
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = origin is None or origin.partition("://")[2] == headers.get("host")
    if origin not in allowed and not (own and site in ("none", "same-origin")):
        return (
            403,
            "origin_not_allowed",
            f"A web page at {origin or 'another site'} may not change anything here; start the server with "
            "--allow-origin and the page's origin to allow it",
        )
    if form:
        return None
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and kind != "application/json":
        return (
            415,
            "content_type_not_json",
            f"Content-Type is {kind or 'missing'!r}: bodies are JSON, send the header `Content-Type: application/json`",
        )
    return None
