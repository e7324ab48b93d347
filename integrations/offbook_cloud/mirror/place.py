"""A place for copies of models, by its URL: a bucket, a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from .bucket_place import BucketPlace
from .hub_place import HubPlace


class MirrorPlace(Protocol):
    """The objects below a URL. Every method raises StoreError with the place's own message if it fails."""

    url: str

    async def sizes(self) -> dict[str, int]:
        """The bytes of every object by its path."""
        ...

    async def read(self, path: str) -> bytes | None:
        """The content of a small object; None if there is none."""
        ...

    async def upload(self, path: str, source: Path) -> None:
        """Write an object from a file. Nobody sees a part of it. Raises FileNotFoundError if the file is gone."""
        ...

    async def add(self, files: Mapping[str, Path], marker: str, content: bytes) -> bool:
        """Write objects, path -> file, and then a new one, `marker`; return whether there was no such marker before. One
        that exists stays. Raises FileNotFoundError if a file is gone."""
        ...

    async def rename(self, path: str, target: str) -> None:
        """Move a small object."""
        ...

    async def download(self, path: str, size: int, target: Path) -> None:
        """Write an object of `size` bytes to a new file. Raises OSError if the file cannot be written."""
        ...


def mirror_place(url: str) -> MirrorPlace:
    """The place at a URL. Raises ConfigError for one that names no place that can be used."""
    return HubPlace(url) if url.startswith("hf:") else BucketPlace(url)
