"""`deployed()`: an app of LangGraph on its own models, of which trained ones take over calls, as a server's takeovers decide.

Nothing here can fail or hold up a call for long: while the server is down or late, the app's own models answer.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Collection
from typing import Any

import httpx

from offbook import RemoteBackend, TrainableModel
from offbook.base.errors import ConfigError
from offbook.client.connection.http import LoopTransport
from offbook_langgraph import ChosenModel

from .wire import ThreadSide

logger = logging.getLogger("offbook")

ASK_SECONDS = 1.0
"""How long a call waits to be told its side, before the app's own model answers."""
PAUSE_SECONDS = 5.0
"""How long the server is not asked after it did not answer."""


def deployed(app: Any, *, url: str | None = None, api_key: str | None = None, temperature: float | None = None) -> Any:
    """Return what `trainable` wrapped on its own models, of which the trained ones take over calls.

    Each trained model has a takeover of its own, on a route of its name. url, api_key: the server that has the models, and
    decides; None: the models' own. temperature: of the trained models; None: the server's default. Raises ConfigError for an
    app that `trainable` has not wrapped with a model, and without a server.
    """

    def chooser(model: TrainableModel) -> TakeoverSide:
        return TakeoverSide(model.name, server, key)

    models: Collection[TrainableModel] = app.own_models() if hasattr(app, "with_fallback") else ()
    if not models:
        raise ConfigError(f"deployed: what trainable(..., model=...) returned is needed, got {app!r:.200}")
    server, key = _server(url, api_key, models)
    return app.with_fallback(chooser, url=server, api_key=key, temperature=temperature)


def _server(url: str | None, api_key: str | None, models: Collection[TrainableModel]) -> tuple[str, str | None]:
    """The server's URL without /v1, and its key: as named, else of the models' own backend. Raises ConfigError without one."""
    key = api_key or os.environ.get("OFFBOOK_API_KEY")
    if url is not None:
        return url.rstrip("/").removesuffix("/v1"), key
    backend, *others = {model.backend for model in models}
    if others or not isinstance(backend, RemoteBackend):
        raise ConfigError(
            "deployed: url: the address of the server that has the small model is needed, such as http://gpu-box:8000, here "
            "or as OFFBOOK_URL. A server that this process starts would end with it"
        )
    return backend.url, key or backend.api_key


class TakeoverSide:
    """Asks the server at `url` who answers a call of a route. Chooser of `offbook_langgraph`."""

    def __init__(self, route: str, url: str, api_key: str | None) -> None:
        self._route = route
        self._url = url
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=ASK_SECONDS, trust_env=False)
        weakref.finalize(self, self._http.close).atexit = False
        transport = LoopTransport(secure=url.startswith("https"))
        self._async_http = httpx.AsyncClient(base_url=url, headers=headers, timeout=ASK_SECONDS, transport=transport)
        self._asks_again_at = 0.0
        self._failed = 0
        self._warned: set[str] = set()

    def choose(self, thread: str | None) -> ChosenModel | None:
        """Who answers. Never raises."""
        if time.monotonic() < self._asks_again_at:
            return None
        try:
            return self._read(self._http.get("/api/takeover/side", params=self._question(thread)))
        except Exception as error:  # noqa: BLE001  # whatever fails here, the app's own model answers
            return self._pause(error)

    async def choose_async(self, thread: str | None) -> ChosenModel | None:
        """As `choose`, from an event loop."""
        if time.monotonic() < self._asks_again_at:
            return None
        try:
            return self._read(await self._async_http.get("/api/takeover/side", params=self._question(thread)))
        except Exception as error:  # noqa: BLE001  # as in `choose`
            return self._pause(error)

    def failed(self, error: Exception) -> None:
        """The small model failed: the server is told with the next question."""
        self._failed += 1
        self._warn(f"the small model failed: {type(error).__name__} {error}"[:500])

    def unfit(self, reason: str) -> None:
        """A call has no side."""
        self._warn(f"the small model cannot take a call: {reason}")

    def _question(self, thread: str | None) -> dict[str, str | int]:
        failed, self._failed = self._failed, 0
        return {"route": self._route, "failed": failed} | ({"thread": thread[:1000]} if thread else {})

    def _read(self, answer: httpx.Response) -> ChosenModel | None:
        if not answer.is_success:
            self._warn(f"the server answered {answer.status_code}: {answer.text[:500]}")
            return None
        side = ThreadSide.model_validate_json(answer.content)
        return None if side.model is None else ChosenModel(side.model, side.seconds)

    def _pause(self, error: Exception) -> None:
        self._asks_again_at = time.monotonic() + PAUSE_SECONDS
        self._warn(
            f"the server at {self._url} cannot be asked for a call's side: {type(error).__name__} {error}".strip()
        )

    def _warn(self, reason: str) -> None:
        """Log why the app's own model answers, the first of equal reasons."""
        if reason not in self._warned and len(self._warned) < 100:
            self._warned.add(reason)
            logger.warning("deployed app: its own model answers: %s", reason)
