"""A vLLM server that this server did not start."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress

import httpx

from offbook.base.errors import ConfigError, EngineError

from .supervised import SupervisedSampler
from .transport import check_sampling, error_text, healthy, reason_of

logger = logging.getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of running vLLM servers."""
CONNECT_SECONDS = 60.0
"""How long calls wait for a vLLM that does not answer before they fail."""
POLL_SECONDS = 2.0
"""Interval of the health checks."""
MISSES = 3
"""Failed health checks in a row after which a vLLM counts as gone. One is enough if a call's connection broke too."""
_NAME_SECONDS = 10.0


def key() -> str | None:
    """The key in VLLM_API_KEY; None if it is not set. Raises ConfigError for a key that no header can carry."""
    text = os.environ.get(KEY_VARIABLE, "").strip()
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(f"{KEY_VARIABLE}: a key must be printable ASCII, since a header carries it")
    return text or None


class RunningSampler(SupervisedSampler):
    """A running vLLM server at `url`, with its key in VLLM_API_KEY.

    vLLM reads adapters by their paths, so both servers must see the same file system.
    """

    max_starts = 1
    must_start = False

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._gone = asyncio.Event()

    async def explain(self, error: Exception) -> str:
        """Why a call's connection broke.

        If the health check fails too, the state changes to "starting", so that a retry of the call waits for vLLM.
        """
        if self._state == "ok" and (self.connection is None or not await healthy(self.connection.control)):
            self._gone.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._state != "ok")
        return f"vLLM at {self.url} broke the connection: {error_text(error)}"

    async def _launch(self) -> None:
        connection = self.connection or self._connect(self.url, key=key())  # keep an open one: calls may use it
        control = connection.control
        deadline = time.monotonic() + CONNECT_SECONDS
        while not await healthy(control):
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM at {self.url} did not answer GET /health for {CONNECT_SECONDS:.0f} s")
            self._detail = f"vLLM at {self.url} does not answer yet"
            await asyncio.sleep(POLL_SECONDS)
        self._detail = None
        try:
            self.served_name, embedded = await self._base(control)
            if not await check_sampling(control, self.served_name, vllm=not embedded) and not embedded:
                logger.warning(
                    "vLLM at %s runs without Offbook's plugin: it renders messages in its own way, and text that its chat "
                    "template leaves out is lost. Start a vLLM 0.32 with Offbook installed beside it and "
                    "OFFBOOK_VLLM_PLUGIN=1 in its environment",
                    self.url,
                )
            await self.adapters.reload(control)
        except (EngineError, httpx.HTTPError) as error:
            raise EngineError(f"vLLM at {self.url} cannot be used: {str(error) or type(error).__name__}") from error

    async def _base(self, client: httpx.AsyncClient) -> tuple[str, bool]:
        """The name of the base, and whether the embedded engine serves it. Raises EngineError, httpx.HTTPError."""
        response = await client.get("/v1/models", timeout=_NAME_SECONDS)
        if response.status_code == 401:
            raise EngineError(
                f"it rejects the key in {KEY_VARIABLE}" if key() else f"it requires a key: set {KEY_VARIABLE}"
            )
        if response.is_error:
            raise EngineError(f"GET /v1/models: {reason_of(response)}")
        try:
            base = next(model for model in response.json()["data"] if model.get("parent") is None)
            name, root = str(base["id"]), base.get("root")
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise EngineError(f"GET /v1/models names no base model: {response.text[:200]!r}") from error
        logger.info("vLLM at %s serves %s (%s)", self.url, name, root)
        return name, base.get("owned_by") == "offbook"

    async def _until_dead(self) -> str:
        """Return when MISSES health checks have failed in a row, or `explain` has reported vLLM as gone."""
        assert self.connection is not None, "_launch connects"
        self._gone.clear()
        misses = 0
        while misses < MISSES:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), POLL_SECONDS)
                break
            misses = 0 if await healthy(self.connection.control) else misses + 1
        return f"vLLM at {self.url} no longer answers; waiting for it"
