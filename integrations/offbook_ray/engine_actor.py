"""What an actor of a Ray cluster does for a server: it runs one engine on the actor's machine, and keeps adapters there."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from offbook import tiny
from offbook.base.devices import gpus
from offbook.base.errors import ConfigError
from offbook.base.locked_folders import TemporaryFolder, remove_tree
from offbook.server.base_model import BaseModelPath, find
from offbook.server.child_process import Child

LOG_PIECE = 2**20
"""Bytes of the log in one answer at most."""
NEWS_SECONDS = 1.0
"""How long an actor waits for the end of its engine before it answers with what is new in the log."""


@dataclass(frozen=True)
class RemoteEngine:
    """An engine to start: Python's module, the base as another machine finds it (a path that all have, or a name), the
    fingerprint of its files, the words of the command line, and the environment, with the key that a caller must have.

    In `words`, the actor replaces {base}, {host}, {port} and {pid}, its own. `gpu_words` are added where Ray gave it GPUs;
    it replaces {gpus}."""

    module: str
    base: str
    fingerprint: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    gpu_words: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine listens, and what it runs on: Ray's id of the machine, and its GPUs by nvidia-smi's index."""

    host: str
    port: int
    node: str
    gpus: tuple[int, ...]

    @property
    def url(self) -> str:
        """The URL of an engine that speaks HTTP."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class EngineNews:
    """New bytes of an engine's log; `code` and `ending` once it has ended and all of the log was read."""

    log: bytes
    code: int | None = None
    ending: str = ""


class EngineActor:
    """One engine on the actor's machine. It ends with the actor, whose methods are called by the server."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder("replica")
        self._child: Child | None = None
        self._adapters = 0

    async def start(self, engine: RemoteEngine) -> EnginePlace:
        """Start the engine on a free port of this machine. Raises ConfigError, OSError."""
        base = await asyncio.to_thread(self._base, engine)
        ray: Any = import_module("ray")
        host, port = _free_address(ray.util.get_node_ip_address())
        context = ray.get_runtime_context()
        reserved = context.get_accelerator_ids().get("GPU", [])
        own = tuple(gpu.index for gpu in gpus()) if reserved else ()  # Ray shows an actor its GPUs alone
        filled = {
            "{base}": str(base),
            "{host}": host,
            "{port}": str(port),
            "{pid}": str(os.getpid()),
            "{gpus}": ",".join(map(str, own)),
        }
        words = [filled.get(word, word) for word in (*engine.words, *(engine.gpu_words if own else ()))]
        self._child = await Child.start(
            [sys.executable, "-m", engine.module, *words], self._folder.path / "log", env=engine.environment
        )
        return EnginePlace(host, port, context.get_node_id(), own)

    async def news(self, position: int) -> EngineNews:
        """The log from byte `position` on, with the end of the engine if there is no more; waits a moment for it."""
        assert self._child is not None, "start comes first"
        try:
            await asyncio.wait_for(self._child.exited.wait(), NEWS_SECONDS)
        except TimeoutError:
            return EngineNews(_piece(self._child.log.path, position))
        piece = _piece(self._child.log.path, position)
        return EngineNews(piece) if piece else EngineNews(b"", self._child.returncode, self._child.ending())

    async def keep(self, files: Mapping[str, bytes]) -> str:
        """Write an adapter to a folder of this machine's disk, and return its path. Raises OSError."""
        self._adapters += 1
        folder = self._folder.path / f"adapter-{self._adapters}"
        await asyncio.to_thread(_write, folder, files)
        return str(folder)

    async def drop(self, folder: str) -> None:
        """Remove the folder of an adapter."""
        await asyncio.to_thread(remove_tree, Path(folder))

    async def stop(self, deadline: float) -> None:
        """End the engine, at the latest after `deadline` seconds, and remove all that the actor wrote."""
        if self._child is not None:
            await self._child.stop(deadline)
        self._folder.remove()

    def _base(self, engine: RemoteEngine) -> Path:
        base = find(engine.base).path
        if fingerprint(base) != engine.fingerprint:
            raise ConfigError(
                f"{base} on {socket.gethostname()} is not the base of the server: its files differ. Copy the server's folder "
                "to the same path there, or give both the same snapshot"
            )
        return base


def remote_engine(
    module: str, base: BaseModelPath, words: Sequence[str], gpu_words: Sequence[str] = ()
) -> RemoteEngine:
    """What an actor starts for a base, which other machines find by its path, or by its name. Raises OSError."""
    where = base.name if base.name in tiny.FOLDERS else base.reference
    return RemoteEngine(module, where, fingerprint(base.path), tuple(words), {}, tuple(gpu_words))


def fingerprint(base: Path) -> str:
    """A hash of a base's files: names and sizes of all weights, the content of configuration, tokenizer and templates."""
    digest = hashlib.sha256()
    for file in sorted(base.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
        elif file.suffix == ".safetensors":
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _free_address(host: str) -> tuple[str, int]:
    with socket.socket() as free:
        free.bind((host, 0))
        return host, free.getsockname()[1]


def _piece(log: Path, position: int) -> bytes:
    with log.open("rb") as file:
        file.seek(position)
        return file.read(LOG_PIECE)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
