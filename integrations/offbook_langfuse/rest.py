"""Langfuse's REST API: JSON in, JSON out, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast

import httpx

from offbook.base.errors import ConfigError
from offbook.base.types import Json

from .connection import PUBLIC, SECRET, LangfuseConnection

PAGE: Final = 100
Parameters: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str] | None]


class LangfuseRest:
    """One project's API. Raises ConfigError for what it refuses, ConnectionError where it does not answer."""

    def __init__(self, connection: LangfuseConnection) -> None:
        self._connection = connection
        self._http = connection.client()

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
        """The items of every page, `limit` at most."""
        cursor: str | None = None
        count = 0
        while True:
            answer = self.get(path, {**parameters, "cursor": cursor})
            for item in cast(Sequence[Mapping[str, Json]], answer.get("data") or ()):
                if count == limit:
                    return
                count += 1
                yield item
            cursor = cast(Mapping[str, str | None], answer.get("meta") or {}).get("cursor")
            if cursor is None:
                return

    def by_page(self, path: str, parameters: Parameters) -> Iterator[Mapping[str, Json]]:
        """The items of every numbered page."""
        page = 1
        while True:
            answer = self.get(path, {**parameters, "page": page, "limit": PAGE})
            yield from cast(Sequence[Mapping[str, Json]], answer.get("data") or ())
            if page >= int(cast(Mapping[str, int], answer.get("meta") or {}).get("totalPages", 1)):
                return
            page += 1

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
            answer = self._http.request(method, path, params=cast(dict[str, str], named), json=body)
        except httpx.HTTPError as error:
            url = self._connection.base_url
            raise ConnectionError(f"no answer from Langfuse at {url} ({type(error).__name__}: {error})") from error
        if answer.status_code in (401, 403):
            raise ConfigError(f"Langfuse refused the keys ({answer.status_code}): look at {PUBLIC} and {SECRET}")
        if not answer.is_success:
            raise ConfigError(f"Langfuse answered {answer.status_code} to {method} {path}: {answer.text[:300]!r}")
        try:
            return cast(Mapping[str, Json], answer.json())
        except ValueError as error:
            raise ConfigError(f"Langfuse answered {path} with no JSON: {answer.text[:200]!r}") from error
