"""Connects a model to its backend and registers it once, for callers in any event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from offbook.base.wire import RegisterRequest

from .backend import Backend
from .connection.http import Api


class Registration:
    """One model on one backend. `server` is the server that knows the model; None before the first use."""

    def __init__(self, backend: Backend, request: RegisterRequest) -> None:
        self.backend = backend
        self.server: Api | None = None
        self._request = request
        self._lock = threading.Lock()
        self._attempt: Future[Api | None] | None = None

    async def api(self) -> Api:
        """Return the running server with the model registered.

        Callers that arrive during an attempt share its result or its error, so eight rollouts that begin at once start one
        server and send one request. If the attempt is cancelled, one of the waiting callers makes the next.
        """
        while True:
            with self._lock:
                attempt, leads = self._attempt, self._attempt is None
                if attempt is None:
                    attempt = self._attempt = Future()
                    attempt.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the attempt
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
        """Connect through the backend, and register again if it returned a new server: that one does not know the model."""
        api = await self.backend.connect(self._request.base_model)
        if api is not self.server:
            await api.register(self._request)
            self.server = api
        return api
