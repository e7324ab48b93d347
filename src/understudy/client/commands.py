"""What the command line asks of a server: to run, or to answer about its models."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, cast, get_args

import httpx

from ..config import default_dir
from ..errors import ConfigError
from ..types import Json
from ..wire import CheckpointState, ExportFormat, ExportRequest
from .backend import RemoteBackend
from .http import Api
from .local import LocalBackend

T = TypeVar("T")
FORMATS: tuple[str, ...] = get_args(ExportFormat)


def run_server(argv: Sequence[str]) -> NoReturn:
    """Become `python -m understudy.server` with these arguments: signals and the exit code are its own."""
    os.execv(sys.executable, [sys.executable, "-m", "understudy.server", *argv])


def list_checkpoints(model: str, url: str | None, folder: Path | None) -> list[CheckpointState]:
    """The model's checkpoints, by step."""
    return asyncio.run(_ask(model, url, folder, lambda api: api.checkpoints(model)))


def export_model(model: str, output: Path, format: str, step: int | None, url: str | None, folder: Path | None) -> str:
    """Write a step (None: the newest) to a new folder; its path."""
    if format not in FORMATS:
        raise ConfigError(f"--format: {format!r} must be one of {', '.join(FORMATS)}")

    async def export(api: Api) -> str:
        newest = (await api.model(model)).step
        if newest == 0:
            raise ConfigError(f"model {model!r} is at step 0: nothing has been trained yet, so there is no LoRA")
        target = str(output if url else output.absolute())
        request = ExportRequest(format=cast(ExportFormat, format), output=target)
        return (await api.export(model, newest if step is None else step, request)).path

    return asyncio.run(_ask(model, url, folder, export))


def convert_command(folder: str) -> str:
    """What makes one GGUF file of a folder that was exported as `gguf-ready`."""
    return shlex.join(["python", "llama.cpp/convert_hf_to_gguf.py", folder, "--outfile", f"{folder}.gguf"])


async def _ask(model: str, url: str | None, folder: Path | None, question: Callable[[Api], Awaitable[T]]) -> T:
    """Ask the server at `url`, or the one that runs on the directory, or one started there for this question."""
    if url is not None:
        return await question(await RemoteBackend(url).connect())
    root = (folder or default_dir()).expanduser().absolute()
    running = running_server(root)
    if running is not None:
        return await question(running)
    backend = LocalBackend(dir=root)
    try:
        return await question(await backend.connect(base_model_of(model, root)))
    finally:
        backend.close()


def running_server(folder: Path) -> Api | None:
    """The server that runs on a directory; None when there is none. Its key is the one in `server.json`, else the
    environment's, else the one that a server here once made."""
    try:
        facts: Json = json.loads((folder / "server.json").read_text(encoding="utf-8"))
        answer = httpx.get(f"{facts['url']}/health", timeout=5, trust_env=False)
        if not answer.is_success or answer.json()["pid"] != facts["pid"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, httpx.TransportError):
        return None
    key_file = folder / "key"
    made = key_file.read_text().strip() if key_file.exists() else None
    return Api(facts["url"], facts.get("key") or os.environ.get("UNDERSTUDY_API_KEY") or made)


def base_model_of(model: str, folder: Path) -> str:
    """The base of a model that the directory holds. Raises ConfigError listing those it has."""
    found = {path.parent.name: path for path in folder.glob("*/models/*/model.json")}
    if model not in found:
        names = ", ".join(sorted(found)) or "none"
        raise ConfigError(f"there is no model {model!r} in {folder} (it holds: {names}); see --dir")
    facts: Json = json.loads(found[model].read_text(encoding="utf-8"))
    return str(facts["base_model"])
