"""A model's tie to its backend: connected and registered once, whoever asks and from whichever event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from ..wire import RegisterRequest
from .backend import Backend
from .http import Api


class Registration:
    """One model on one backend. `server` is where it is registered, None before its first use."""

    def __init__(self, backend: Backend, request: RegisterRequest) -> None:
        self.backend = backend
        self.server: Api | None = None
        self._request = request
        self._lock = threading.Lock()
        self._attempt: Future[Api | None] | None = None

    async def api(self) -> Api:
        """The server, up, with the model registered.

        Those who ask while an attempt runs share its outcome, also its error: eight rollouts that begin at once start
        one server and send one request. When the attempt is cancelled, one of those who wait makes the next.
        """
        while True:
            with self._lock:
                attempt, leads = self._attempt, self._attempt is None
                if attempt is None:
                    attempt = self._attempt = Future()
                    attempt.set_running_or_notify_cancel()  # cancelling one who waits does not cancel the attempt
            api = await (self._lead(attempt) if leads else asyncio.wrap_future(attempt))
            if api is not None:
                return api

    async def _lead(self, attempt: Future[Api | None]) -> Api:
        try:
            api = await self._connect()
        except Exception as error:
            self._attempt = None
            attempt.set_exception(error)
            raise
        except BaseException:  # cancelled, interrupted
            self._attempt = None
            attempt.set_result(None)
            raise
        self._attempt = None
        attempt.set_result(api)
        return api

    async def _connect(self) -> Api:
        """Ask the backend each time: a server that has ended is started anew, and then knows nothing of the model."""
        api = await self.backend.connect(self._request.base_model)
        if api is not self.server:
            await api.register(self._request)
            self.server = api
        return api
