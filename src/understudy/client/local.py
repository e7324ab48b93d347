"""A server of one's own on this machine, ended with this process."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import cast

import httpx
from rich.console import Console

from ..config import EngineOptions, default_dir
from ..errors import BackendError, ConfigError
from ..types import Json
from .backend import Backend
from .http import Api
from .other_trainers import BACKEND_OPTIONS, refuse_foreign

log = logging.getLogger("understudy")

TAIL_LINES = 20
END_SECONDS = 20.0


class LocalBackend(Backend):
    """Starts a server as a child process on loopback, with a fresh key, at the first use.

    `options` are EngineOptions' fields. Backends on one directory in one process share one server. It ends with this
    process, or at `close()`. Raises BackendError when it cannot be started, ConfigError for a wrong option.
    """

    def __init__(self, dir: str | Path | None = None, *, start_timeout: float = 600.0, **options: object) -> None:
        refuse_foreign(options, BACKEND_OPTIONS, "LocalBackend")
        self.dir = Path(dir).expanduser().absolute() if dir is not None else default_dir()
        self.engine = EngineOptions.parse(**options)
        self._given = bool(options)
        self._start_timeout = start_timeout

    async def connect(self, base_model: str | None = None) -> Api:
        """The server on this directory, started when it is not running."""
        found = _servers.get(self.dir)
        if found is not None and found.running():
            return self._checked(found).api
        if base_model is None:
            raise ConfigError("the local server is not running yet: register a TrainableModel first, it names the base")
        starting = _Starting(self.dir, base_model, self.engine, self._start_timeout)
        try:
            return self._checked(await asyncio.to_thread(starting.run)).api
        except asyncio.CancelledError:
            starting.abandoned.set()
            raise

    def path_on_server(self, path: str | os.PathLike[str]) -> str:
        """The absolute path: the server runs on this machine, in another folder."""
        return os.path.abspath(path)

    def close(self) -> None:
        """End the server of this directory, if this process started one; it is started anew at the next use."""
        with _lock_of(self.dir):
            server = _servers.pop(self.dir, None)
        if server is not None:
            server.end()

    def _checked(self, server: LocalServer) -> LocalServer:
        if self._given and server.engine != self.engine:
            raise BackendError(
                f"the server on {self.dir} already runs with other options ({server.engine!r}): close() it first, "
                "or give this backend another dir="
            )
        return server

    def __repr__(self) -> str:
        return f"LocalBackend({str(self.dir)!r})"


class LocalServer:
    """A running server process of ours."""

    def __init__(
        self, process: subprocess.Popen[bytes], folder: Path, log_start: int, engine: EngineOptions, url: str, key: str
    ) -> None:
        self.process = process
        self.folder = folder
        self.engine = engine
        self.owner = os.getpid()
        self.api = Api(url, key, alive=self.check)
        self._log_start = log_start

    def running(self) -> bool:
        """Whether the process is alive, and is ours (not that of the process we were forked from)."""
        return self.owner == os.getpid() and self.process.poll() is None

    def check(self) -> None:
        """Raise BackendError with the end of the log when the process is gone."""
        if self.process.poll() is not None:
            raise BackendError(_ended(self.process, self.folder, self._log_start, "ended unexpectedly"))

    def end(self) -> None:
        """End the process: what runs may finish for a while, then at once."""
        if self.owner == os.getpid():
            end_process(self.process)


class _Starting:
    """One start, run in a thread; `abandoned` ends it."""

    def __init__(self, folder: Path, base_model: str, engine: EngineOptions, timeout: float) -> None:
        self.abandoned = threading.Event()
        self._folder = folder
        self._base_model = base_model
        self._engine = engine
        self._timeout = timeout
        self._key = secrets.token_urlsafe(32)

    def run(self) -> LocalServer:
        """The directory's server: the one that another thread has started meanwhile, or a new one."""
        with _lock_of(self._folder):
            found = _servers.get(self._folder)
            if found is not None and found.running():
                return found
            server = self._start()
            _servers[self._folder] = server
            return server

    def _start(self) -> LocalServer:
        log_path = log_file(self._folder)
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as output:
                log_start = output.tell()
                process = subprocess.Popen(
                    command(self._base_model, self._folder, self._engine),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"UNDERSTUDY_API_KEY": self._key},
                    start_new_session=True,  # Ctrl-C, or a notebook's interrupt, is for the rollouts
                )
        except OSError as error:
            raise BackendError(f"the server could not be started in {self._folder}: {error}") from error
        try:
            url = self._wait(process, log_start)
        except BaseException:
            end_process(process)
            raise
        return LocalServer(process, self._folder, log_start, self._engine, url, self._key)

    def _wait(self, process: subprocess.Popen[bytes], log_start: int) -> str:
        deadline = time.monotonic() + self._timeout
        console = Console(stderr=True)
        text = f"Starting a server with {self._base_model} (log: {log_file(self._folder)})"
        log.info("%s", text)
        shown = console.status(text) if console.is_terminal and not console.is_jupyter else nullcontext()
        # A bare transport: no proxy for this machine's own address, and no line in the log per question.
        with shown, httpx.HTTPTransport(verify=False, trust_env=False) as asking:
            while not self.abandoned.wait(0.1):
                if process.poll() is not None:
                    raise BackendError(_ended(process, self._folder, log_start, "could not be started"))
                if time.monotonic() > deadline:
                    tail = _tail(self._folder, log_start)
                    raise BackendError(f"the server was not ready within start_timeout={self._timeout} s:\n{tail}")
                url = self._ready(process.pid, asking)
                if url is not None:
                    return url
        raise BackendError("the start of the server was cancelled")

    def _ready(self, pid: int, asking: httpx.HTTPTransport) -> str | None:
        try:
            facts: Json = json.loads((self._folder / "server.json").read_text(encoding="utf-8"))
            if facts["pid"] != pid:
                return None
            url = str(facts["url"])
            impatient = {"timeout": httpx.Timeout(5.0).as_dict()}
            answer = asking.handle_request(httpx.Request("GET", f"{url}/health", extensions=impatient))
            with closing(answer):
                health: Json = json.loads(answer.read())
            return url if health["status"] == "ok" else None
        except (OSError, ValueError, KeyError, TypeError, httpx.TransportError) as error:
            log.debug("not ready: %r", error)
            return None


_servers: dict[Path, LocalServer] = {}
_locks: dict[Path, threading.Lock] = {}


def _lock_of(folder: Path) -> threading.Lock:
    return _locks.setdefault(folder, threading.Lock())


def command(base_model: str, folder: Path, engine: EngineOptions) -> list[str]:
    """The command that serves `base_model` from `folder`, on a free port, as long as this process lives."""
    words = [sys.executable, "-m", "understudy.server", "--model", base_model, "--port", "0", "--dir", str(folder)]
    words += ["--parent-pid", str(os.getpid())]
    for name, value in engine.model_dump(exclude_defaults=True).items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}={_word(value)}"]
    return words


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in cast(Sequence[object], value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def log_file(folder: Path) -> Path:
    """Where the server's own output goes."""
    return folder / "logs" / "server.log"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, a while to finish, SIGTERM again (the server then ends at once), SIGKILL."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGTERM, 5.0), (None, 5.0)):
        if process.poll() is None:
            process.send_signal(number) if number is not None else process.kill()
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            log.warning("the server (pid %d) has not ended after %g s", process.pid, seconds)


def _tail(folder: Path, start: int) -> str:
    try:
        with log_file(folder).open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(its log cannot be read: {error})"
    return "\n".join(lines[-TAIL_LINES:]) or "(it wrote nothing)"


def _ended(process: subprocess.Popen[bytes], folder: Path, start: int, what: str) -> str:
    tail = _tail(folder, start)
    hint = "" if "another server has this directory" not in tail else "; here: LocalBackend(dir=...)"
    return f"the server {what} (exit code {process.returncode}, log {log_file(folder)}{hint}):\n{tail}"


def _end_all() -> None:
    for server in list(_servers.values()):
        server.end()
    _servers.clear()


atexit.register(_end_all)
