"""What a web page of another site may not do: change something here through the browser of whoever reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; what they answer, a browser keeps from the pages of other sites."""


def refusal(
    method: str, headers: Mapping[str, str], allowed: Collection[str], *, form: bool = False
) -> tuple[int, str, str] | None:
    """None when the request may pass, else (status, code, message). Header names are in lower case; `allowed` are origins
    (`https://name:port`) whose pages may do everything.

    Browsers say where a request comes from by `Origin` and `Sec-Fetch-Site`; other clients send neither, and pass. A form
    of another site can send no JSON content type without asking first, so bodies must have one. `form`: the route takes a page's own form, which has none.
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
            "--allow-origin and the page's origin if it shall",
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
