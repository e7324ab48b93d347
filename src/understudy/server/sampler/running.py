"""A vLLM server that runs already."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress

import httpx

from ...errors import ConfigError, EngineError
from .supervised import SupervisedSampler
from .transport import broken, checked, healthy, reason_of

log = logging.getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
CONNECT_SECONDS = 60.0
"""How long calls wait for a vLLM that does not answer, before they fail with the reason."""
ASK_SECONDS = 2.0
MISSES = 3
"""Health checks in a row without an answer after which one is gone; one is enough where a call's connection broke too."""
_NAME_SECONDS = 10.0


def key() -> str | None:
    """The key of running vLLM servers. Raises ConfigError for what cannot be sent."""
    text = os.environ.get(KEY_VARIABLE, "").strip()
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(f"{KEY_VARIABLE}: a key has printable ASCII characters only")
    return text or None


class RunningSampler(SupervisedSampler):
    """A vLLM at `url`, whose key is in VLLM_API_KEY. It reads adapters from this machine's folders: same disk, same path."""

    max_starts = 1

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._gone = asyncio.Event()

    async def explain(self, error: Exception) -> str:
        """A vLLM that gives no health either is gone: the supervisor is told, so that a retry waits for it."""
        if self._state == "ok" and (self.connection is None or not await healthy(self.connection.control)):
            self._gone.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._state != "ok")
        return f"vLLM at {self.url} broke the connection: {broken(error)}"

    # ---- inside

    async def _launch(self) -> None:
        connection = self.connection or self._connect(self.url, key=key())  # kept: calls may be running
        control = connection.control
        deadline = time.monotonic() + CONNECT_SECONDS
        while not await healthy(control):
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM at {self.url} did not answer GET /health for {CONNECT_SECONDS:.0f} s")
            self._detail = f"vLLM at {self.url} does not answer yet"
            await asyncio.sleep(ASK_SECONDS)
        self._detail = None
        try:
            self.served_name = await self._base_name(control)
            await checked(control, self.served_name)
            await self.adapters.reload(control)
        except (EngineError, httpx.HTTPError) as error:
            raise EngineError(f"vLLM at {self.url} cannot be used: {str(error) or type(error).__name__}") from error

    async def _base_name(self, client: httpx.AsyncClient) -> str:
        response = await client.get("/v1/models", timeout=_NAME_SECONDS)
        if response.status_code == 401:
            raise EngineError(
                f"it refuses the key in {KEY_VARIABLE}" if key() else f"it wants a key: set {KEY_VARIABLE}"
            )
        if response.is_error:
            raise EngineError(f"GET /v1/models: {reason_of(response)}")
        try:
            base = next(model for model in response.json()["data"] if model.get("parent") is None)
            name, root = str(base["id"]), base.get("root")
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise EngineError(f"GET /v1/models names no base model: {response.text[:200]!r}") from error
        log.info("vLLM at %s serves %s (%s)", self.url, name, root)
        return name

    async def _until_dead(self) -> str:
        assert self.connection is not None, "launched before"
        self._gone.clear()
        misses = 0
        while misses < MISSES:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), ASK_SECONDS)
                break
            misses = 0 if await healthy(self.connection.control) else misses + 1
        return f"vLLM at {self.url} answers no more; waiting for it"
