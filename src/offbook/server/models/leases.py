"""Loads adapters that calls need, and unloads those that no call uses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from offbook.base.errors import EngineError

from ...engine.checkpoint_files import Checkpoint
from ..errors import ApiError
from ..sampler.pool import SamplerAdapters
from .registry import ModelRegistry, ModelRoute

logger = logging.getLogger(__name__)

KEPT_LOADED = 4
"""Adapters of older steps that stay loaded although no call uses them."""


class AdapterLeases:
    """Counts the calls that use each adapter. An adapter in use is neither unloaded nor deleted."""

    def __init__(self, registry: ModelRegistry, adapters: SamplerAdapters) -> None:
        self._registry = registry
        self._adapters = adapters
        self._in_use: dict[str, int] = defaultdict(int)
        self._last_used: dict[str, float] = {}
        self._loading: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._returned = asyncio.Condition()

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncGenerator[ModelRoute]:
        """The route of one call to the model `name`. Its adapter stays loaded inside the block.

        Raises ApiError for an unknown name, and EngineError if the adapter cannot be loaded.
        """
        route = self._registry.resolve(name)
        self._in_use[route.adapter] += 1
        try:
            await self._ensure_loaded(route)
            yield route
        finally:
            async with self._returned:
                self._in_use[route.adapter] -= 1
                self._returned.notify_all()

    async def load(self, adapter: str, checkpoint: Checkpoint) -> None:
        """Load an adapter, and unload the least recently used ones beyond the limit. Raises EngineError."""
        async with self._loading[adapter]:
            await self._adapters.load(adapter, checkpoint.path)
            self._last_used[adapter] = time.monotonic()
        await self._trim()

    @asynccontextmanager
    async def withdrawn(self, adapter: str) -> AsyncGenerator[None]:
        """Wait until no call uses an adapter, unload it, and prevent loading it inside the block.

        Raises EngineError.
        """
        async with self._returned:
            await self._returned.wait_for(lambda: not self._in_use[adapter])
        async with self._loading[adapter]:
            await self._adapters.unload(adapter)
            yield

    async def _ensure_loaded(self, route: ModelRoute) -> None:
        """Load the adapter of a route if necessary. Raises ApiError 404 if its checkpoint was deleted, EngineError."""
        if route.step == 0:
            return
        self._last_used[route.adapter] = time.monotonic()
        if route.adapter in self._adapters.loaded and not self._loading[route.adapter].locked():
            return
        checkpoint = self._registry.model(route.model).checkpoints.get(route.step)
        if checkpoint is None:
            raise ApiError(404, f"Step {route.step} of model {route.model!r} was deleted", "model", "model_not_found")
        await self.load(route.adapter, checkpoint)

    async def _trim(self) -> None:
        """Unload the least recently used idle adapters. The newest of each model and KEPT_LOADED others stay."""
        newest = {model.adapter(model.step) for model in self._registry.models()}
        idle = [name for name in self._adapters.loaded if name not in newest and not self._in_use[name]]
        idle.sort(key=lambda name: self._last_used.get(name, 0.0), reverse=True)
        for adapter in idle[KEPT_LOADED:]:
            async with self._loading[adapter]:
                if self._in_use[adapter]:
                    continue
                try:
                    await self._adapters.unload(adapter)
                except EngineError as error:
                    logger.warning("%s", error)
