"""The LoRA adapters of one sampler."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import httpx

from ...errors import EngineError
from .link import SamplerLink
from .transport import reason_of

log = logging.getLogger(__name__)

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class LoadedAdapters:
    """Adapters by name, loaded again whenever the sampler comes up again."""

    def __init__(self, link: SamplerLink) -> None:
        self._link = link
        self._folders: dict[str, Path] = {}

    @property
    def loaded(self) -> Collection[str]:
        return self._folders

    def expect(self, adapter: str, folder: Path) -> None:
        """Load the adapter as soon as the sampler is there."""
        self._folders.setdefault(adapter, folder)

    def forget(self, adapter: str) -> None:
        """Do not load it again."""
        self._folders.pop(adapter, None)

    async def load(self, adapter: str, folder: Path) -> None:
        if adapter in self._folders:
            return
        response = await self._link.command(LOAD, _lora(adapter, folder))
        if _refused(response):
            raise EngineError(f"The sampler could not load {adapter} from {folder}: {reason_of(response)}")
        self._folders[adapter] = folder

    async def unload(self, adapter: str) -> None:
        if self._folders.pop(adapter, None) is None:
            return
        response = await self._link.command(UNLOAD, {"lora_name": adapter})
        if response.is_error and response.status_code != 404:
            raise EngineError(f"The sampler could not unload {adapter}: {reason_of(response)}")

    async def reload(self, control: httpx.AsyncClient) -> None:
        """Load every adapter again into a sampler that has just come up. Raises httpx.TransportError."""
        for adapter, folder in list(self._folders.items()):
            response = await control.post(LOAD, json=_lora(adapter, folder))
            if _refused(response):
                del self._folders[adapter]
                log.error("Adapter %s at %s was not loaded again: %s", adapter, folder, reason_of(response))


def _lora(adapter: str, folder: Path) -> dict[str, str]:
    return {"lora_name": adapter, "lora_path": str(folder)}


def _refused(response: httpx.Response) -> bool:
    return response.is_error and "already" not in response.text
