"""What the command line asks of a server, or of a directory on which none runs."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, cast, get_args

import httpx
from pydantic import TypeAdapter

from ..config import default_dir
from ..errors import BackendError, ConfigError
from ..types import Json
from ..wire import CheckpointState, ExportFormat, ExportRequest, ExportResult
from .backend import RemoteBackend
from .download import download_export
from .http import Api, checked_name

T = TypeVar("T")
FORMATS: tuple[str, ...] = get_args(ExportFormat)
WRONG_INPUT = 2
_STATES = TypeAdapter(list[CheckpointState])


def run_server(argv: Sequence[str]) -> NoReturn:
    """Become `python -m understudy.server` with these arguments: signals and the exit code are its own."""
    os.execv(sys.executable, [sys.executable, "-m", "understudy.server", *argv])


def list_checkpoints(model: str, url: str | None, folder: Path | None) -> list[CheckpointState]:
    """The model's checkpoints, by step."""
    api = _server(url, folder)
    if api is None:
        return _STATES.validate_json(_directory("checkpoints", model, folder))
    return asyncio.run(api.checkpoints(model))


def export_model(model: str, output: Path, format: str, step: int | None, url: str | None, folder: Path | None) -> str:
    """Write a step (None: the newest) to a new folder on this machine; its path."""
    if format not in FORMATS:
        raise ConfigError(f"--format: {format!r} must be one of {', '.join(FORMATS)}")
    chosen = cast(ExportFormat, format)
    api = _server(url, folder)
    if api is None:
        words = ["--output", str(output.absolute()), "--format", format]
        words += ["--step", str(step)] if step is not None else []
        return ExportResult.model_validate_json(_directory("export", model, folder, *words)).path

    async def export(api: Api) -> str:
        newest = (await api.model(model)).step
        if newest == 0:
            raise ConfigError(f"model {model!r} is at step 0: nothing has been trained yet, so there is no LoRA")
        at = newest if step is None else step
        if url is not None:
            return str(await download_export(api, model, at, chosen, output))
        request = ExportRequest(format=chosen, output=str(output.absolute()))
        return (await api.export(model, at, request)).path

    return asyncio.run(export(api))


def convert_command(folder: str) -> str:
    """What makes one GGUF file of a folder that was exported as `gguf-ready`."""
    return shlex.join(["python", "llama.cpp/convert_hf_to_gguf.py", folder, "--outfile", f"{folder}.gguf"])


def _server(url: str | None, folder: Path | None) -> Api | None:
    """The server at `url`, else the one that runs on the directory; None where none does."""
    if url is not None:
        return asyncio.run(RemoteBackend(url).connect())
    return running_server(_root(folder))


def reachable_server(url: str | None, folder: Path | None) -> Api:
    """The server at `url`, else the one that runs on the directory. Raises ConfigError where none does."""
    api = _server(url, folder)
    if api is None:
        raise ConfigError(
            f"no server runs on {_root(folder)}: pass --url, or start one with `understudy serve --dir {_root(folder)}`"
        )
    return api


def _root(folder: Path | None) -> Path:
    return (folder or default_dir()).expanduser().absolute()


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
    lines = key_file.read_text().splitlines() if key_file.exists() else []
    made = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return Api(facts["url"], facts.get("key") or os.environ.get("UNDERSTUDY_API_KEY") or next(iter(made), None))


def _directory(command: str, model: str, folder: Path | None, *words: str) -> str:
    """What the server's package answers about a directory, as JSON; its warnings are shown. Raises ConfigError and
    BackendError with its own words."""
    argv = [command, "--dir", str(_root(folder)), *words, "--", checked_name(model, "model")]
    done = subprocess.run(
        [sys.executable, "-m", "understudy.server", *argv],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        sys.stderr.write(done.stderr)
        return done.stdout
    message = done.stderr.strip().removeprefix("understudy: ")
    raise (ConfigError if done.returncode == WRONG_INPUT else BackendError)(message)
