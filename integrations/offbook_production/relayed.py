"""What passes between an app and its paid model.

Of requests: known paths, in the form in which they were checked, and headers. Of answers: the content types and headers of the
API, and never the provider's key."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from urllib.parse import quote, unquote, unquote_plus

import aiohttp

from offbook.base.http_access import KEY_HEADERS, sent_key
from offbook.base.redaction import MARK, SHORTEST
from offbook.base.text import one_line
from offbook.server.http.model_paths import found_path

from .upstream import AUTHORIZATION, UpstreamModel

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
NO_PAGE = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; sandbox; frame-ancestors 'none'"),
]
"""Headers of every answer below a route: whatever a browser takes it for, it does nothing in this server's origin."""
_TYPES = re.compile(r"application/(?:[\w.-]+\+)?json|text/event-stream")
_HEADERS = re.compile(
    rb"retry-after(?:-ms)?|x-should-retry|(?:[a-z-]+-)?request-?id|(?:[a-z]+-)?ratelimit(?:-[a-z0-9-]+)?"
    rb"|openai-(?:processing-ms|version)"
)
"""What clients of the APIs read: when to ask again, what is left of a limit, and the id to name to the provider."""
_VALUE = re.compile(rb"[ -~]{0,500}")
_DECODED = frozenset({"gzip", "deflate", "br", "zstd"})
"""Encodings that aiohttp undoes. They are not asked for, and a key could hide in them."""


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


class KeyMask:
    """Replaces a key in the pieces of a body by a mark of the same length, also where two pieces share it.

    What may be the beginning of the key waits for the next piece."""

    def __init__(self, key: str | None) -> None:
        forms = () if key is None or len(key) < SHORTEST else {key, quote(key, safe=""), json.dumps(key)[1:-1]}
        self._forms = [form.encode() for form in sorted(forms, key=len, reverse=True)]
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms))) if self._forms else None
        self._waiting = b""

    def push(self, piece: bytes) -> bytes:
        """What can be sent after this piece."""
        if self._pattern is None:
            return piece
        text = self.masked(self._waiting + piece)
        start = min(_beginning(form, text) for form in self._forms)
        self._waiting = text[start:]
        return text[:start]

    def rest(self) -> bytes:
        """What waits at the end of the body."""
        return self._waiting

    def masked(self, text: bytes) -> bytes:
        """A whole text without the key."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: MARK.encode().ljust(len(match[0]), b"*")[: len(match[0])], text)


def _beginning(form: bytes, text: bytes) -> int:
    """Where a key may begin that the text's end cuts off; the text's length if nowhere."""
    if text[-1:] not in form:  # as after the line feed of an event
        return len(text)
    at = text.find(form[:1], max(0, len(text) - len(form) + 1))
    while at >= 0 and not form.startswith(text[at:]):
        at = text.find(form[:1], at + 1)
    return at if at >= 0 else len(text)


@contextmanager
def ended_with_its_connection(response: aiohttp.ClientResponse) -> Generator[None]:
    """Inside the block, reads of the body fail once its connection is closed: after a malformed chunk aiohttp closes it, and
    lets the reads wait forever."""
    connection, content = response.connection, response.content
    closed = connection.protocol.closed if connection is not None and connection.protocol is not None else None

    def end(_: object = None) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was closed"))

    if closed is None:  # already, or the body is whole
        end()
        yield
        return
    closed.add_done_callback(end)
    try:
        yield
    finally:
        closed.remove_done_callback(end)


class RelayedAnswer:
    """An answer of the upstream, as far as it passes.
    `headers`: those to pass on, but those of the body."""

    def __init__(self, response: aiohttp.ClientResponse, key: str | None) -> None:
        self.mask = KeyMask(key)
        self._status = response.status
        self._encoding = self._text(response, "content-encoding", "identity")
        self._type = self._text(response, "content-type", "application/json")  # without any, it can only be JSON
        self._length = response.headers.get("content-length")
        named = [value for name, value in response.raw_headers if name.lower() == b"connection"]
        dropped = {option.strip().lower() for value in named for option in value.split(b",")}
        fields = [(name.lower(), self.mask.masked(value)) for name, value in response.raw_headers]
        self.headers = [
            (name, value)
            for name, value in fields
            if _HEADERS.fullmatch(name) and name not in dropped and _VALUE.fullmatch(value)
        ]

    @property
    def unfit(self) -> str | None:
        """Why nothing of the body passes, as the end of a sentence."""
        if 300 <= self._status < 400:
            return f"with a redirect (status {self._status}), which is not followed: correct api_base"
        if not 200 <= self._status < 600:
            return f"with the unknown status {self._status}"
        if self._encoding not in _DECODED | {"identity"}:
            return f"with the content encoding {self._encoding!r}, though none was accepted"
        if not _TYPES.fullmatch(self._type):
            return f"with status {self._status} and the content type {self._type!r}, which no API of a model has"
        return None

    @property
    def body_headers(self) -> list[tuple[bytes, bytes]]:
        """The type and the length of the body. It has no length if its encoding was undone."""
        headers = [(b"content-type", self._type.encode())]
        if self._length is not None and self._encoding == "identity":
            headers.append((b"content-length", self._length.encode()))
        return headers

    def _text(self, response: aiohttp.ClientResponse, name: str, default: str) -> str:
        """A header's value without parameters."""
        value = response.headers.get(name, default).encode("utf-8", "replace")
        return one_line(self.mask.masked(value).decode().partition(";")[0].strip().lower(), 60)
