"""Servers on this machine: LocalBackend starts one as a child process that ends with this process; others are found by their directory."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Generator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Self

import httpx

from offbook.base.child_processes import last_lines
from offbook.base.console import Terminal
from offbook.base.errors import BackendError, ConfigError
from offbook.base.json_files import read_json
from offbook.base.option_names import check_options
from offbook.base.redaction import error_text
from offbook.base.server_options import EngineOptions, default_dir, server_folder
from offbook.base.types import Json

from .backend import Backend, RemoteBackend
from .connection.http import Api

logger = logging.getLogger("offbook")

TAIL_LINES = 20
"""Lines of the server's log in an error message."""
_START_SECONDS = "start_seconds.json"
END_SECONDS = 20.0
"""Seconds that the server has to finish after SIGTERM."""


class LocalBackend(Backend):
    """Starts a server on loopback, with a new key, as a child process at first use.

    `options` are EngineOptions' fields; `start_timeout` is in seconds. Backends on one directory in one process share one
    server. The server ends with this process, at `close()`, or at the end of a `with` block. Raises ConfigError for an
    unknown or invalid option; `connect` raises BackendError when the server cannot be started.
    """

    def __init__(
        self, dir: str | os.PathLike[str] | None = None, *, start_timeout: float = 600.0, **options: object
    ) -> None:
        check_options("LocalBackend", options, ["dir", "start_timeout", *EngineOptions.model_fields])
        self.dir = Path(dir).expanduser().absolute() if dir is not None else default_dir()
        self.engine = EngineOptions.parse(**options)
        self._options = options
        self._start_timeout = start_timeout

    async def connect(self, base_model: str | None = None) -> Api:
        """Return the server on this directory; start it if it is not running."""
        server = _servers.get(self.dir)
        if server is not None and server.running():
            return self._checked(server).api
        if base_model is None:
            raise ConfigError("the local server is not running yet: register a TrainableModel first, it names the base")
        starting = _Starting(self.dir, base_model, self.engine, self._start_timeout)
        try:
            return self._checked(await asyncio.to_thread(starting.run)).api
        except asyncio.CancelledError:
            starting.abandoned.set()
            raise

    def path_on_server(self, path: str | os.PathLike[str]) -> str:
        """Return the absolute path: the server runs on this machine with another working directory."""
        return os.path.abspath(path)

    def watched_at(self, run: str) -> str:
        """Return the command that shows the directory's runs. The server's own pages need its key, which is generated
        and not shown."""
        return shlex.join([shell_command(), "ui", "--dir", str(self.dir)])

    def close(self) -> Awaitable[None]:
        """Stop this directory's server if this process started it. The next use starts a new one. When this returns,
        the server has stopped. Code written for OpenPipe ART may await the result."""
        with _lock_of(self.dir):
            server = _servers.pop(self.dir, None)
        if server is not None:
            server.end()
        return _Done()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def _checked(self, server: LocalServer) -> LocalServer:
        if self._options and server.engine != self.engine:
            raise BackendError(
                f"the server on {self.dir} already runs with other options ({server.engine!r}): close() it first, "
                "or give this backend another dir="
            )
        return server

    def __repr__(self) -> str:
        return f"LocalBackend({str(self.dir)!r})"


class _Done:
    def __await__(self) -> Generator[None]:
        yield from ()


class LocalServer:
    """A server process that this process started."""

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
        """Whether the server is alive and was started by this process, not by a parent before a fork."""
        return self.owner == os.getpid() and self.process.poll() is None

    def check(self) -> None:
        """Raise BackendError with the end of the log if the server has ended."""
        if self.process.poll() is not None:
            raise BackendError(_ended(self.process, self.folder, self._log_start, "ended unexpectedly"))

    def end(self) -> None:
        """End the server, if this process started it: first gracefully, then by force."""
        if self.owner == os.getpid():
            end_process(self.process)


class _Starting:
    """One attempt to start a server, run in a thread. Setting `abandoned` cancels it."""

    def __init__(self, folder: Path, base_model: str, engine: EngineOptions, timeout: float) -> None:
        self.abandoned = threading.Event()
        self._folder = folder
        self._base_model = base_model
        self._engine = engine
        self._timeout = timeout
        self._key = secrets.token_urlsafe(32)

    def run(self) -> LocalServer:
        """Return the directory's server: one that another thread started in the meantime, or a new one."""
        with _lock_of(self._folder):
            existing = _servers.get(self._folder)
            if existing is not None and existing.running():
                return existing
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
                    env=os.environ | {"OFFBOOK_API_KEY": self._key},
                    start_new_session=True,  # Ctrl-C and a notebook's interrupt must not reach the server
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
        begun = time.monotonic()
        deadline = begun + self._timeout
        console = Terminal(stderr=True)
        known = self._seconds().get(self._base_model)
        took = "loading it takes longest" if known is None else f"{known:.0f} s last time"
        text = f"Starting a server with {self._base_model}, {took} (log: {log_file(self._folder)})"
        animated = console.is_terminal and not console.is_jupyter
        shown = console.status(text) if animated else nullcontext()
        if not animated:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        # A bare transport uses no proxy for the loopback address, and logs no line per health check.
        with shown, httpx.HTTPTransport(verify=False, trust_env=False) as transport:
            while not self.abandoned.wait(0.1):
                if process.poll() is not None:
                    raise BackendError(_ended(process, self._folder, log_start, "could not be started"))
                if time.monotonic() > deadline:
                    tail = _tail(self._folder, log_start)
                    raise BackendError(f"the server was not ready within start_timeout={self._timeout} s:\n{tail}")
                url = self._ready(process.pid, transport)
                if url is not None:
                    self._note(time.monotonic() - begun)
                    return url
        raise BackendError("the start of the server was cancelled")

    def _seconds(self) -> dict[str, float]:
        """How long earlier starts took, by base."""
        try:
            stored: Json = read_json(self._folder / _START_SECONDS)
            return {base: float(seconds) for base, seconds in stored.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _note(self, seconds: float) -> None:
        with suppress(OSError):  # an estimate is no reason to fail a start
            (self._folder / _START_SECONDS).write_text(
                json.dumps(self._seconds() | {self._base_model: round(seconds, 1)})
            )

    def _ready(self, pid: int, transport: httpx.HTTPTransport) -> str | None:
        """The URL of the server with this pid once it is healthy; None before."""
        try:
            facts: Json = read_json(self._folder / "server.json")
            if facts["pid"] != pid:
                return None
            url = str(facts["url"])
            short_timeout = {"timeout": httpx.Timeout(5.0).as_dict()}
            answer = transport.handle_request(httpx.Request("GET", f"{url}/health", extensions=short_timeout))
            with closing(answer):
                health: Json = json.loads(answer.read())
            return url if health["status"] == "ok" else None
        except (OSError, ValueError, KeyError, TypeError, httpx.TransportError) as error:
            logger.debug("not ready: %s", error_text(error))
            return None


_servers: dict[Path, LocalServer] = {}
_locks: dict[Path, threading.Lock] = {}


def _lock_of(folder: Path) -> threading.Lock:
    return _locks.setdefault(folder, threading.Lock())


def command(base_model: str, folder: Path, engine: EngineOptions) -> list[str]:
    """The command that serves `base_model` from `folder` on a free port until this process ends."""
    words = [sys.executable, "-m", "offbook.server", "--model", base_model, "--port", "0", "--dir", str(folder)]
    set_options = {"parent_pid": os.getpid(), **engine.model_dump(mode="json", exclude_defaults=True)}
    for name, value in set_options.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def shell_command() -> str:
    """`offbook` as the user's shell finds it: by its name, or by its path if its environment is not active."""
    own = Path(sys.executable).with_name("offbook")
    if shutil.which("offbook") == str(own):
        return "offbook"
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)


def log_file(folder: Path) -> Path:
    """The file that receives the server's output."""
    return folder / "logs" / "server.log"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM and wait; send it again, which makes the server end at once; finally SIGKILL."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGTERM, 5.0), (None, 5.0)):
        if process.poll() is None:
            process.send_signal(number) if number is not None else process.kill()
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            logger.warning("the server (pid %d) has not ended after %g s", process.pid, seconds)


def _tail(folder: Path, start: int) -> str:
    try:
        with log_file(folder).open("rb") as file:
            file.seek(start)
            lines = last_lines(file.read().decode(errors="replace"), TAIL_LINES)
    except OSError as error:
        return f"(its log cannot be read: {error})"
    return "\n".join(lines) or "(it wrote nothing)"


def _ended(process: subprocess.Popen[bytes], folder: Path, start: int, what: str) -> str:
    tail = _tail(folder, start)
    hint = "" if "another server has this directory" not in tail else "; here: LocalBackend(dir=...)"
    return f"the server {what} (exit code {process.returncode}, log {log_file(folder)}{hint}):\n{tail}"


def _end_all() -> None:
    for server in list(_servers.values()):
        server.end()
    _servers.clear()


atexit.register(_end_all)


def server_at(url: str | None, folder: Path | None) -> Api | None:
    """The server at `url`, else the one running on the directory; None if there is none."""
    if url is not None:
        return asyncio.run(RemoteBackend(url).connect())
    return running_server(server_folder(folder))


def running_server(folder: Path) -> Api | None:
    """The server running on a directory; None if there is none.

    The key comes from `server.json`, else from OFFBOOK_API_KEY, else from the directory's `key` file.
    """
    try:
        facts: Json = read_json(folder / "server.json")
        answer = httpx.get(f"{facts['url']}/health", timeout=5, trust_env=False)
        if not answer.is_success or answer.json()["pid"] != facts["pid"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, httpx.TransportError):
        return None
    key_file = folder / "key"
    lines = key_file.read_text().split("\n") if key_file.exists() else []
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return Api(facts["url"], facts.get("key") or os.environ.get("OFFBOOK_API_KEY") or next(iter(keys), None))
