"""Temporary folders for rollouts, copied from the fixture."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from pathlib import Path


class RolloutFolders:
    """Creates and removes the folders of rollouts inside one temporary folder."""

    def __init__(self, fixture: Path | None) -> None:
        self._fixture = fixture
        self._root = Path(tempfile.mkdtemp(prefix="offbook-mcp-")).resolve()  # some servers compare resolved paths
        self._numbers = itertools.count(1)

    async def make(self) -> Path:
        """Create a folder: a copy of the fixture, or an empty one. Raises OSError."""
        folder = self._root / f"{next(self._numbers):04}"
        if self._fixture is None:
            folder.mkdir()
        else:
            await asyncio.to_thread(shutil.copytree, self._fixture, folder, symlinks=True)
        return folder

    async def remove(self, folder: Path) -> None:
        """Remove one folder. A file that cannot be removed stays until `close`."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders."""
        shutil.rmtree(self._root, ignore_errors=True)
