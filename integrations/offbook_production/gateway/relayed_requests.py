"""What passes of an app's request to its paid model: known paths, in the form in which they were checked, and headers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote, unquote, unquote_plus

from offbook.base.http_access import KEY_HEADERS, sent_key
from offbook.server.http.model_paths import found_path

from .address import AUTHORIZATION, UpstreamModel

_READ = re.compile(r"/v1(?:(?:alpha|beta)?/models(?:/.+)?|/responses/.+)")
"""Paths that may be read. Others of a provider, such as its files, are no business of an app's model."""
_ALSO = re.compile(r"/v1/embeddings|/v1(?:alpha|beta)?/models/[^/]+:(?:batchE|e)mbedContents?")
"""Paths to which an app that has one address posts too. They pass, and are not counted."""
_PART = re.compile(r"(?!\.+$)[\w.:@+~,=-]+", re.ASCII)
"""A part of a path, decoded: a word of an API or a part of a model's name. No dots alone, and nothing that another server could
decode or split once more, such as `%`, `;` and a backslash."""
OWN_KEY = 16
"""Shortest key of a client that is masked in answers. Shorter ones may be words, such as `placeholder`."""
HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "cookie", "expect"}
)
"""Headers of one connection (RFC 9110, section 7.6.1), and those that this server writes or keeps to itself."""


def relayed_path(method: str, path: str, raw: str) -> str | None:
    """The path to forward, None if it is none of a model. `path`: as the client's was decoded; `raw`: as it was written.

    A slash within a name stays escaped where the client has escaped it. A second version, which clients of a base URL with one
    add, is left out."""
    if path.startswith("/v1/v1/"):
        path, raw = path.removeprefix("/v1"), raw.removeprefix("/v1")
    segments = [unquote(segment) for segment in raw.removeprefix("/").removesuffix("/").split("/")]
    if not all(_PART.fullmatch(part) for segment in segments for part in segment.split("/")):
        return None
    if "/" + "/".join(segments) + "/" * (raw.endswith("/") and raw != "/") != path:
        return None
    if method == "POST" and (match := found_path(path)) is not None:
        groups = match[0].groupdict()
        if groups["model"] or groups["trajectory"]:  # paths of this server's own models
            return None
    elif not (_ALSO if method == "POST" else _READ).fullmatch(path):
        return None
    return "/" + "/".join(quote(segment, safe=":@+~,=") for segment in segments) + "/" * path.endswith("/")


def relayed_query(query: str, upstream: UpstreamModel) -> str:
    """The query to forward: without `key`, which is this server's where the provider's own is sent."""
    if upstream.key is None:
        return query
    return "&".join(part for part in query.split("&") if unquote_plus(part.partition("=")[0]) != "key")


def secret_of(raw: Iterable[tuple[bytes, bytes]], upstream: UpstreamModel) -> str | None:
    """The key that goes to the provider with a request: this server's, or the client's own."""
    if upstream.secret is not None:
        return upstream.secret
    own = sent_key({name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw})
    return own.decode() if own is not None and len(own) >= OWN_KEY else None


def relayed_headers(raw: Iterable[tuple[bytes, bytes]], upstream: UpstreamModel) -> list[tuple[str, str]]:
    """The headers to forward, with the provider's key."""
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
    hidden = set(HOP)
    for name, value in headers:
        if name == "connection":
            hidden.update(option.strip().lower() for option in value.split(","))
    own = [("accept-encoding", "identity")]
    if upstream.key is not None:
        hidden.update((AUTHORIZATION, *KEY_HEADERS))
        own.append((upstream.key_header, upstream.key))
    return [(name, value) for name, value in headers if name not in hidden and not name.startswith("x-offbook-")] + own
