"""Operations of the command line on a running server, or on a server's directory when no server runs there."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn, TypeVar, cast, get_args

import httpx
from pydantic import TypeAdapter

from offbook.base.config import default_dir
from offbook.base.errors import BackendError, ConfigError
from offbook.base.types import Json
from offbook.base.wire import (
    CheckpointState,
    ExportFormat,
    ExportRequest,
    ExportResult,
    ModelRecords,
    RolloutTrace,
    TrajectoryQuery,
)

from .backend import RemoteBackend
from .connection.download import download_export
from .connection.http import Api, checked_name

T = TypeVar("T")
FORMATS: tuple[str, ...] = get_args(ExportFormat)
WRONG_INPUT = 2
"""Exit code of `python -m offbook.server` for wrong arguments."""
_STATES = TypeAdapter(list[CheckpointState])


def run_server(argv: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m offbook.server` with these arguments (exec)."""
    os.execv(sys.executable, [sys.executable, "-m", "offbook.server", *argv])


def list_checkpoints(model: str, url: str | None, folder: Path | None) -> list[CheckpointState]:
    """The model's checkpoints, by step. `url=None`: of the server, or the files, in `folder`."""
    api = server_at(url, folder)
    if api is None:
        return _STATES.validate_json(_directory("checkpoints", model, folder))
    return asyncio.run(api.checkpoints(model))


def export_model(model: str, output: Path, format: str, step: int | None, url: str | None, folder: Path | None) -> str:
    """Write a step (None: the newest) to a new folder on this machine and return its path.

    Raises ConfigError for an unknown format or a model at step 0, ServerError, BackendError.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format: {format!r} must be one of {', '.join(FORMATS)}")
    chosen = cast(ExportFormat, format)
    api = server_at(url, folder)
    if api is None:
        words = ["--output", str(output.absolute()), "--format", format]
        words += ["--step", str(step)] if step is not None else []
        return ExportResult.model_validate_json(_directory("export", model, folder, *words)).path

    async def export(api: Api) -> str:
        newest = (await api.model(model)).step
        if newest == 0:
            raise ConfigError(
                f"model {model!r} is at step 0: nothing has been trained yet, so there is no LoRA to export; train a step first"
            )
        exported_step = newest if step is None else step
        if url is not None:
            return str(await download_export(api, model, exported_step, chosen, output))
        request = ExportRequest(format=chosen, output=str(output.absolute()))
        return (await api.export(model, exported_step, request)).path

    return asyncio.run(export(api))


def convert_command(folder: str) -> str:
    """The shell command that converts a folder exported as `gguf-ready` to one GGUF file."""
    return shlex.join(["python", "llama.cpp/convert_hf_to_gguf.py", folder, "--outfile", f"{folder}.gguf"])


def server_at(url: str | None, folder: Path | None) -> Api | None:
    """The server at `url`, else the one running on the directory; None if there is none."""
    if url is not None:
        return asyncio.run(RemoteBackend(url).connect())
    return running_server(server_folder(folder))


async def directory_rollouts(folder: Path | None, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
    """All rollouts in a directory's records that match the query. Raises ConfigError for a directory without records,
    BackendError."""
    for line in _directory_lines("traces", "--dir", str(server_folder(folder)), "--query", query.model_dump_json()):
        yield RolloutTrace.model_validate_json(line)


def directory_models(folder: Path | None) -> list[ModelRecords]:
    """All models of a directory. Raises ConfigError for a directory without records, BackendError."""
    lines = _directory_lines("models", "--dir", str(server_folder(folder)))
    return [ModelRecords.model_validate_json(line) for line in lines]


def server_folder(folder: Path | None) -> Path:
    """A server's directory as an absolute path. None: the default."""
    return (folder or default_dir()).expanduser().absolute()


def running_server(folder: Path) -> Api | None:
    """The server running on a directory; None if there is none.

    The key comes from `server.json`, else from OFFBOOK_API_KEY, else from the directory's `key` file.
    """
    try:
        facts: Json = json.loads((folder / "server.json").read_text(encoding="utf-8"))
        answer = httpx.get(f"{facts['url']}/health", timeout=5, trust_env=False)
        if not answer.is_success or answer.json()["pid"] != facts["pid"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, httpx.TransportError):
        return None
    key_file = folder / "key"
    lines = key_file.read_text().splitlines() if key_file.exists() else []
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return Api(facts["url"], facts.get("key") or os.environ.get("OFFBOOK_API_KEY") or next(iter(keys), None))


def _directory(command: str, model: str, folder: Path | None, *words: str) -> str:
    """Run a command of `python -m offbook.server` on a directory and return its JSON output.

    Its warnings go to stderr. Raises ConfigError or BackendError with its error message.
    """
    argv = [command, "--dir", str(server_folder(folder)), *words, "--", checked_name(model, "model")]
    done = subprocess.run(
        [sys.executable, "-m", "offbook.server", *argv],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        sys.stderr.write(done.stderr)
        return done.stdout
    raise _failed(done.returncode, done.stderr)


def _directory_lines(*words: str) -> Iterator[str]:
    """The lines that a command of `python -m offbook.server` prints. Raises ConfigError or BackendError with its error
    message."""
    with TemporaryFile("w+", errors="replace") as complaints:
        argv = [sys.executable, "-m", "offbook.server", *words]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=complaints, encoding="utf-8") as process:
            assert process.stdout is not None
            yield from process.stdout
        complaints.seek(0)
        if process.returncode != 0:
            raise _failed(process.returncode, complaints.read())


def _failed(code: int, stderr: str) -> ConfigError | BackendError:
    message = stderr.strip().removeprefix("offbook: ")
    return (ConfigError if code == WRONG_INPUT else BackendError)(message)
