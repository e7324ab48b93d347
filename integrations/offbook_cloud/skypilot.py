"""SkyPilotBackend: a server on a machine of a cloud, launched by SkyPilot and reached through an SSH tunnel."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from offbook.base.child_processes import die_with_parent
from offbook.base.errors import BackendError, ConfigError, OffbookError
from offbook.base.json_files import read_json
from offbook.base.option_names import names_checked
from offbook.base.terminal import echo
from offbook.client.backend import Backend
from offbook.client.connection.http import Api

from .sky_command import (
    SERVER_PORT,
    ServerTask,
    cancel_jobs,
    job_runs,
    launch,
    price_line,
    run_again,
    status_of,
    take_down,
    wanted_resources,
)

logger = logging.getLogger("offbook")

START_SECONDS = 1800.0
"""Limit for the server to load its base."""
LOST_AFTER = 3
"""Tunnels that end within `SHORT_SECONDS`, after which the cloud is asked whether the machine is still there."""
SHORT_SECONDS = 10.0
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


class Tunnel:
    """An SSH tunnel to the server's port, opened again when it breaks. It ends with this process.

    `lost` is called, in the tunnel's thread, when it cannot be opened several times in a row.
    """

    def __init__(self, cluster: str, port: int, lost: Callable[[], None]) -> None:
        self.cluster = cluster
        self.port = port
        self._lost = lost
        self.is_open = threading.Event()
        self._closed = threading.Event()
        self._ssh: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_open, name=f"offbook-tunnel-{cluster}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Close the tunnel."""
        self._closed.set()
        if self._ssh is not None:
            self._ssh.terminate()
        if threading.current_thread() is not self._thread:
            self._thread.join(10)
        atexit.unregister(self.close)

    def _keep_open(self) -> None:
        short = 0
        while not self._closed.is_set():
            opened = time.monotonic()
            self._ssh = subprocess.Popen(
                ssh_command(self.cluster, self.port, "-N"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent(),  # this thread lives as long as the tunnel
            )
            if self._closed.is_set():
                self._ssh.terminate()
            while self._ssh.poll() is None and not accepts(self.port):
                time.sleep(0.1)
            self.is_open.set()
            self._ssh.wait()
            self.is_open.clear()
            if self._closed.wait(1):
                return
            short = short + 1 if time.monotonic() - opened < SHORT_SECONDS else 0
            if short >= LOST_AFTER:
                self._lost()
                short = 0


def ssh_command(cluster: str, port: int, *options: str) -> list[str]:
    """`ssh` with the tunnel. It ends itself after three keep-alives without an answer. SkyPilot has written the entry of
    the host."""
    alive = ("-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
    return ["ssh", *options, *alive, "-L", f"127.0.0.1:{port}:127.0.0.1:{SERVER_PORT}", cluster]


class SkyPilotBackend(Backend):
    """A server on a cloud machine. Create it with `initialize_cluster`. Needs the command `sky` and ssh."""

    def __init__(self, cluster_name: str, task: ServerTask, key: str, env_path: Path | None, relaunch: bool) -> None:
        self.cluster_name = cluster_name
        self.port = free_port()
        self._task, self._key, self._env_path, self._relaunch = task, key, env_path, relaunch
        self._api = self._new_api()
        self._up = threading.Event()
        self._failed: OffbookError | None = None
        self._closed = False
        self._tunnel: Tunnel | None = None

    @classmethod
    @names_checked("SkyPilotBackend.initialize_cluster")
    async def initialize_cluster(
        cls,
        cluster_name: str = "offbook",
        *,
        base_model: str,
        gpu: str | None = None,
        resources: object = None,
        use_spot: bool = False,
        mirror: str | None = None,
        idle_minutes: float = 30,
        env_path: str | os.PathLike[str] | None = None,
        serve: Sequence[str] = (),
        force_restart: bool = False,
        relaunch: bool = True,
    ) -> Self:
        """Launch a machine with a server, or attach to the machine of this name, and open a tunnel to it.

        `gpu`: such as "L4" or "H100:2"; or `resources`, SkyPilot's, as a mapping. `mirror`: place for copies of the
        checkpoints. With it, an idle machine is deleted; without it, the machine is stopped and keeps its disk.
        `use_spot` needs it. `env_path`: file with environment variables for the machine, such as the mirror's keys.
        `serve`: further options of `offbook serve`. `force_restart`: stop the server that runs there. `relaunch`: if
        the cloud reclaims the machine, launch another; its server resumes from the mirror. Prints the price before it
        launches. Raises ConfigError, BackendError.
        """
        if not _NAME.fullmatch(cluster_name):
            raise ConfigError(
                f"cluster_name: use only a to z, 0 to 9 and -, at most 40 characters; got {cluster_name!r}"
            )
        if use_spot and mirror is None:
            raise ConfigError("use_spot: a machine that the cloud takes back loses its disk: pass mirror= too")
        if idle_minutes <= 0:
            raise ConfigError(f"idle_minutes: minutes above 0 are needed, got {idle_minutes!r}")
        task = ServerTask(base_model, wanted_resources(gpu, resources, use_spot), mirror, idle_minutes, tuple(serve))
        path = None if env_path is None else Path(env_path).expanduser().absolute()
        backend = cls(cluster_name, task, cluster_key(cluster_name), path, relaunch)
        await asyncio.to_thread(backend.start, force_restart)
        return backend

    def start(self, force_restart: bool = False) -> None:
        """Bring the machine up, open the tunnel, and wait for the server. Raises BackendError."""
        status = status_of(self.cluster_name)
        if status != "UP":
            self._launch()
        else:
            if force_restart:
                cancel_jobs(self.cluster_name)
            if force_restart or not job_runs(self.cluster_name):
                run_again(self.cluster_name, self._task, self._key, self._env_path)
        self._tunnel = Tunnel(self.cluster_name, self.port, self._find_machine)
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        self._up.set()

    @property
    def url(self) -> str:
        """URL of the tunnel's end on this machine."""
        return self._api.url

    async def connect(self, base_model: str | None = None) -> Api:
        """Return the server. Waits while the tunnel is being opened or the machine launched again. Raises BackendError
        if that fails."""
        while not (self._up.is_set() and self._tunnel is not None and self._tunnel.is_open.is_set()):
            if self._failed is not None:
                raise self._failed
            if self._closed:
                raise BackendError(f"{self!r} is closed: call initialize_cluster to attach to its machine again")
            await asyncio.sleep(0.5)
        return self._api

    def watched_at(self, run: str) -> str:
        """Return the address of the run's page, through the tunnel."""
        return f"{self.url}/runs/{run}"

    def close(self) -> None:
        """Close the tunnel. The machine keeps running until it has been idle for `idle_minutes`."""
        self._closed = True
        if self._tunnel is not None:
            self._tunnel.close()

    async def down(self) -> None:
        """Terminate the machine and delete its disk; only the mirror keeps checkpoints. Raises BackendError."""
        self.close()
        await asyncio.to_thread(take_down, self.cluster_name)
        key_file(self.cluster_name).unlink(missing_ok=True)

    def _launch(self) -> None:
        echo(f"{self.cluster_name}: {price_line(self._task.resources)}", err=True)
        launch(self.cluster_name, self._task, self._key, self._env_path)
        status_of(self.cluster_name)  # writes the entry for ssh

    def _new_api(self) -> Api:
        return Api(f"http://127.0.0.1:{self.port}", self._key)

    def _find_machine(self) -> None:
        """The tunnel cannot be opened: launch the machine again if it is gone."""
        try:
            status = status_of(self.cluster_name)
            if status == "UP" and job_runs(self.cluster_name):
                return  # the network between
            self._up.clear()
            if status == "UP" or not self._relaunch:
                raise BackendError(
                    f"the server on {self.cluster_name} has ended: its log is in `sky logs {self.cluster_name}`"
                )
            logger.warning("%s is gone (%s): launching it again", self.cluster_name, status)
            self._launch()
        except OffbookError as error:
            self._failed = error
            logger.error("%s: %s", self.cluster_name, error)
            return
        threading.Thread(target=self._came_back, name=f"offbook-relaunch-{self.cluster_name}", daemon=True).start()

    def _came_back(self) -> None:
        """Wait for the server of a new machine; another Api makes the models register again."""
        try:
            self._wait_ready()
        except OffbookError as error:
            self._failed = error
            logger.error("%s: %s", self.cluster_name, error)
            return
        self._api = self._new_api()
        self._up.set()

    def _wait_ready(self) -> None:
        deadline, asked = time.monotonic() + START_SECONDS, time.monotonic()
        headers = {"authorization": f"Bearer {self._key}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=10, trust_env=False) as client:
            while time.monotonic() < deadline:
                with suppress(httpx.TransportError, ValueError):
                    health = client.get("/health").json()
                    if health["status"] == "ok":
                        return self._check_base(str(health["base_model"]))
                    if health["status"] == "failed":
                        raise BackendError(f"the server on {self.cluster_name} failed: {health['detail']}")
                if time.monotonic() - asked > 30:
                    asked = time.monotonic()
                    if not job_runs(self.cluster_name):
                        break
                time.sleep(0.5)
        raise BackendError(
            f"the server on {self.cluster_name} did not become ready: its log is in `sky logs {self.cluster_name}`. The "
            f"machine may be up and cost money: `offbook cloud down {self.cluster_name}` ends it"
        )

    def _check_base(self, base_model: str) -> None:
        if base_model != self._task.base_model:
            raise BackendError(
                f"the server on {self.cluster_name} has the base {base_model!r}, not {self._task.base_model!r}: pass "
                "force_restart=True, or another cluster_name="
            )

    def __repr__(self) -> str:
        return f"SkyPilotBackend({self.cluster_name!r})"


def key_file(cluster: str) -> Path:
    """Where the key of a cluster's server is kept, for this user's other processes."""
    return Path.home() / ".offbook" / "clusters" / f"{cluster}.json"


def cluster_key(cluster: str) -> str:
    """The key of a cluster's server; a new one is stored with mode 0600."""
    file = key_file(cluster)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return str(read_json(file)["key"])
    key = secrets.token_urlsafe(24)
    with os.fdopen(handle, "w", encoding="utf-8") as new:
        json.dump({"key": key}, new)
    return key


def known_clusters() -> list[str]:
    """Names of the clusters that this user launched from this machine."""
    return sorted(file.stem for file in key_file("x").parent.glob("*.json"))


def accepts(port: int) -> bool:
    """Whether something listens on a port of this machine's loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """A free port of this machine's loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
