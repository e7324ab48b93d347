"""What passes of a paid model's answer to the app: the content types and headers of its API, and never the provider's key."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import quote

import aiohttp

from offbook.base.redaction import MARK, SHORTEST
from offbook.base.text import one_line

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
_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (aiohttp.ClientConnectorDNSError, "its name has no address"),
    (aiohttp.ClientSSLError, "TLS failed"),
    (aiohttp.ClientConnectorError, "it accepts no connection"),
    (aiohttp.ServerDisconnectedError, "it closed the connection without an answer"),
    (aiohttp.ClientResponseError, "its answer is not valid HTTP"),
    (aiohttp.ClientPayloadError, "its answer broke off, or is not valid HTTP"),
    (TimeoutError, "it did not accept a connection in time"),
    (OSError, "the connection broke"),
)


def failure_kind(error: BaseException) -> str:
    """What failed, in words of our own: the texts of aiohttp's errors hold parts of the answer, and their repr the request's
    headers."""
    words = next((words for kind, words in _KINDS if isinstance(error, kind)), "the request failed")
    return f"{words} ({type(error).__name__})"


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
