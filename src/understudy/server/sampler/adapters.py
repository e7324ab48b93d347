"""Which LoRA adapters one sampler has loaded."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import httpx

from ...errors import EngineError
from .link import SamplerLink
from .transport import reason_of

logger = logging.getLogger(__name__)

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class LoadedAdapters:
    """The adapters of one sampler by name. A sampler that was restarted loads all of them again."""

    def __init__(self, link: SamplerLink) -> None:
        self._link = link
        self._folders: dict[str, Path] = {}

    @property
    def loaded(self) -> Collection[str]:
        """The names of the adapters. A sampler that is starting loads them before it answers calls."""
        return self._folders

    def remember(self, adapter: str, folder: Path) -> None:
        """Load the adapter at the sampler's next start."""
        self._folders.setdefault(adapter, folder)

    def forget(self, adapter: str) -> None:
        """Do not load the adapter at the sampler's next start."""
        self._folders.pop(adapter, None)

    async def load(self, adapter: str, folder: Path) -> None:
        """Load a LoRA folder under the name `adapter`; a loaded name is left as it is. Raises EngineError."""
        if adapter in self._folders:
            return
        response = await self._link.command(LOAD, _lora(adapter, folder))
        if _rejected(response):
            raise EngineError(f"The sampler could not load {adapter} from {folder}: {reason_of(response)}")
        self._folders[adapter] = folder

    async def unload(self, adapter: str) -> None:
        """Unload an adapter; an unknown name is ignored. Raises EngineError."""
        if self._folders.pop(adapter, None) is None:
            return
        response = await self._link.command(UNLOAD, {"lora_name": adapter})
        if response.is_error and response.status_code != 404:
            raise EngineError(f"The sampler could not unload {adapter}: {reason_of(response)}")

    async def reload(self, control: httpx.AsyncClient) -> None:
        """Load every adapter into a sampler that has just started. Drops and logs those that it rejects.

        Raises httpx.TransportError.
        """
        for adapter, folder in list(self._folders.items()):
            response = await control.post(LOAD, json=_lora(adapter, folder))
            if _rejected(response):
                del self._folders[adapter]
                logger.error(
                    "The restarted sampler rejected adapter %s at %s: %s", adapter, folder, reason_of(response)
                )


def _lora(adapter: str, folder: Path) -> dict[str, str]:
    return {"lora_name": adapter, "lora_path": str(folder)}


def _rejected(response: httpx.Response) -> bool:
    """Whether a load failed. vLLM also answers with an error if the name is "already" loaded, which is no failure."""
    return response.is_error and "already" not in response.text
