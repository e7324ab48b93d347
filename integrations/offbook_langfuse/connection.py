"""A Langfuse project: where it is, its keys, and its REST API."""

from __future__ import annotations

import contextlib
import os
import ssl
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import urlsplit

import httpx

from offbook.base.errors import ConfigError
from offbook.base.redaction import error_text
from offbook.base.types import Json

CHECK_SECONDS: Final = 4.0
REQUEST_SECONDS: Final = 10.0
URLS: Final = ("LANGFUSE_BASE_URL", "LANGFUSE_HOST")
CLOUD: Final = "https://cloud.langfuse.com"
OWN_TAG: Final = "offbook"
"""Tag of every trace that Offbook sends."""
PUBLIC, SECRET = "LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"


@dataclass(frozen=True)
class LangfuseConnection:
    """A Langfuse project. Raises ConfigError for a URL that is none."""

    base_url: str
    public_key: str
    secret_key: str = field(repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{URLS[0]}: {self.base_url!r} is not a URL; expected one such as {CLOUD!r}")

    @classmethod
    def from_environment(cls) -> LangfuseConnection:
        """Raises ConfigError that names each variable that is missing."""
        missing = [name for name in (PUBLIC, SECRET) if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"Langfuse: set {' and '.join(missing)} (project settings, API keys), and {URLS[0]} unless it is {CLOUD}"
            )
        url = next((os.environ[name] for name in URLS if os.environ.get(name)), CLOUD)
        return cls(url.rstrip("/"), os.environ[PUBLIC], os.environ[SECRET])

    @property
    def authorization(self) -> str:
        """The header's value."""
        return "Basic " + b64encode(f"{self.public_key}:{self.secret_key}".encode()).decode()

    def client(self, seconds: float) -> httpx.Client:
        """An HTTP client for its REST API."""
        return httpx.Client(
            base_url=self.base_url,
            headers={"authorization": self.authorization},
            timeout=seconds,
            verify=_certificates(),
        )

    def check(self) -> None:
        """Raise ConfigError where the keys or the URL are wrong, ConnectionError where nothing answers in a few seconds."""
        with LangfuseRest(self, CHECK_SECONDS) as rest:
            rest.get("/api/public/projects")


@cache
def _certificates() -> ssl.SSLContext:
    """Loaded once: for each client of its own it was an eighth of the sink's processor time."""
    return httpx.create_ssl_context()


PAGE: Final = 100
MAX_PAGES: Final = 10_000
"""Pages of a listing: a server that repeats itself ends there."""
MAX_BYTES: Final = 256 * 2**20
"""Bytes of an answer, as it is unpacked."""
Parameters: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str] | None]


class LangfuseRest:
    """One project's API. Raises ConfigError for what it refuses, ConnectionError where it does not answer or fails."""

    def __init__(self, connection: LangfuseConnection, seconds: float = REQUEST_SECONDS) -> None:
        self._connection = connection
        self._http = connection.client(seconds)

    def __enter__(self) -> LangfuseRest:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, parameters: Parameters | None = None) -> Mapping[str, Json]:
        """A JSON object."""
        return self._ask("GET", path, parameters=parameters)

    def post(self, path: str, body: Mapping[str, Json]) -> Mapping[str, Json]:
        """A JSON object."""
        return self._ask("POST", path, body=body)

    def by_cursor(self, path: str, parameters: Parameters, limit: int | None = None) -> Iterator[Mapping[str, Json]]:
        """The items of every page, `limit` at most. Raises ConfigError for a cursor that comes twice."""
        cursor: str | None = None
        known: set[str] = set()
        count = 0
        for _ in range(MAX_PAGES):
            answer = self.get(path, {**parameters, "cursor": cursor})
            for item in _items(path, answer):
                if count == limit:
                    return
                count += 1
                yield item
            following: Json = _meta(answer).get("cursor")
            if following is None:
                return
            if not isinstance(following, str) or following in known:
                raise ConfigError(
                    f"Langfuse answered {path} with the cursor {following!r:.100}, a second time or not as text, so the pages "
                    "would never end: is LANGFUSE_BASE_URL a Langfuse server?"
                )
            cursor = following
            known.add(cursor)
        raise ConfigError(f"Langfuse answered {path} with more than {MAX_PAGES:,} pages: narrow the filter")

    def by_page(self, path: str, parameters: Parameters) -> Iterator[Mapping[str, Json]]:
        """The items of every numbered page. An empty page is the last, whatever their announced number."""
        for page in range(1, MAX_PAGES + 1):
            answer = self.get(path, {**parameters, "page": page, "limit": PAGE})
            items = _items(path, answer)
            yield from items
            pages = _meta(answer).get("totalPages", 1)
            if not items or not isinstance(pages, int) or page >= pages:
                return
        raise ConfigError(f"Langfuse answered {path} with more than {MAX_PAGES:,} pages")

    def _ask(
        self,
        method: Literal["GET", "POST"],
        path: str,
        *,
        parameters: Parameters | None = None,
        body: Mapping[str, Json] | None = None,
    ) -> Mapping[str, Json]:
        named = {name: value for name, value in (parameters or {}).items() if value is not None}
        try:
            answer = _bounded(
                self._http, self._http.build_request(method, path, params=cast(dict[str, str], named), json=body)
            )
        except httpx.HTTPError as error:
            url = self._connection.base_url
            raise ConnectionError(f"no answer from Langfuse at {url} ({error_text(error)})") from error
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"Langfuse at {self._connection.base_url} refused the keys ({answer.status_code}): check {PUBLIC} "
                f"({self._connection.public_key!r}) and {SECRET}; keys of another region or project do not work here"
            )
        if answer.has_redirect_location:
            raise ConfigError(
                f"Langfuse redirects {path} to {answer.headers['location']!r:.200}: give {URLS[0]} the address that it has"
            )
        if not answer.is_success:
            told = f"Langfuse answered {answer.status_code} to {method} {path}: {answer.text[:300]!r}"
            raise (ConnectionError if answer.is_server_error else ConfigError)(told)
        try:
            found = answer.json()
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"Langfuse answered {path} with no JSON: {answer.text[:200]!r}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"Langfuse answered {path} with no JSON object: {answer.text[:200]!r}")
        return cast(Mapping[str, Json], found)


def _bounded(http: httpx.Client, request: httpx.Request) -> httpx.Response:
    """The answer, read to at most MAX_BYTES bytes. Raises ConfigError for a larger one, httpx.HTTPError."""
    with contextlib.closing(http.send(request, stream=True)) as answer:
        content = bytearray()
        for piece in answer.iter_bytes():
            content += piece
            if len(content) > MAX_BYTES:
                raise ConfigError(f"Langfuse answered {request.url.path} with more than {MAX_BYTES:,} bytes")
    kept = {name: value for name, value in answer.headers.items() if name in ("location", "content-type")}
    return httpx.Response(answer.status_code, headers=kept, content=bytes(content), request=request)


def _items(path: str, answer: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    items: Json = answer.get("data") or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in cast(list[Json], items)):
        raise ConfigError(f"Langfuse answered {path} with `data` that is not a list of objects: {items!r:.200}")
    return cast(list[Mapping[str, Json]], items)


def _meta(answer: Mapping[str, Json]) -> Mapping[str, Json]:
    meta = answer.get("meta")
    return cast(Mapping[str, Json], meta) if isinstance(meta, dict) else {}
