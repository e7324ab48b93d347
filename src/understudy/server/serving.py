"""One server's life: its directory, its port, its children, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
from collections.abc import Generator
from functools import partial
from typing import cast

import psutil
import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from ..config import ServerOptions
from ..errors import ConfigError, EngineError, StoreError
from . import banner
from .calls.call_marks import CALL_MARKS
from .calls.recorder import Recorder
from .http import app
from .http.auth import Guard, Key, is_loopback, key_for
from .http.bounded_protocol import BoundedProtocol, Door, DoorLimits
from .http.key_file import KeyFile
from .lock import DirectoryLock
from .models.base_model import BaseModelPath, find
from .models.model_services import open_models
from .private import make_private
from .records.running_time import RunningTime
from .records.store import Store
from .sampler.choice import choose
from .scratch import sweep
from .services import Services
from .training.archives import Archives
from .training.history import TrainHistory
from .training.job_folders import JobFolders
from .training.learner_client import LearnerClient
from .training.queue import TrainQueue
from .training.runner import TrainRunner

log = logging.getLogger(__name__)

END_SECONDS = 120
"""What runs when the server is told to end has so long to finish."""
OPEN_FILES = 65_536
"""Each call in flight holds two sockets here; many systems allow 256 or 1,024 unless asked."""
SWEEP_SECONDS = 60.0
ALL_ADDRESSES = ("0.0.0.0", "::", "")
KEPT_FILES = 64
"""Open files that are no connections: records, logs, checkpoints, the children's pipes."""
ORPHAN_SECONDS = 3
"""The same when its parent is gone, so that nobody waits for the answers."""


def run(options: ServerOptions) -> int:
    """Serve until told to end; the exit code. Raises ConfigError, EngineError, StoreError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("httpx", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _allow_open_files()
    make_private(options.dir)
    base = find(options.model)
    lock = DirectoryLock(options.dir)
    try:
        sweep(options.dir)
        key = key_for(options.host, options.api_key, options.dir)
        if options.viewer_keys and key is None:
            raise ConfigError("--viewer-keys: without --api-key everybody on this machine may do everything; give both")
        with (
            listen(options.host, options.port) as listener,
            asyncio.Runner(loop_factory=auto_loop_factory()) as runner,
        ):
            return runner.run(_serve(options, base, lock, listener, key))
    finally:
        lock.release()


async def open_services(options: ServerOptions, base: BaseModelPath) -> Services:
    """Everything that the routes need, its children starting. Raises ConfigError, StoreError."""
    logs = options.dir / "logs"
    store = await Store.open(options.store_url or f"sqlite:///{options.dir / 'records.db'}", durable=options.durable)
    learner = runner = None
    recorder = Recorder(store, base.special_tokens(CALL_MARKS))
    try:
        engine = await asyncio.to_thread(choose, options.engine, trains=not options.inference_only)
        sampler = engine.sampler(base.path, logs / "sampler.log")
        models = open_models(options.dir, base, options.name, options.project, sampler.adapters, engine.max_rank)
        jobs = JobFolders(options.dir / "jobs", store)
        history = TrainHistory(store, models.registry, jobs)
        if not options.inference_only:
            learner = LearnerClient(base, engine.options, logs / "learner.log", options.step_timeout)
            runner = TrainRunner(
                learner,
                models,
                sampler.calls,
                history,
                jobs,
                sleeps=engine.shares_gpu,
                wrong_answers=lambda: recorder.wrong_answers,
                keep_tokens=options.engine.keep_tokens,
            )
        training = TrainQueue(history, jobs, runner, max_staleness=engine.max_staleness)
        await training.open()
    except BaseException:
        await store.close()
        raise
    archives = Archives(options.dir / "exports")
    return Services(options, engine, base, store, models, sampler, learner, recorder, training, history, archives)


async def close_services(services: Services, deadline: float) -> None:
    """Finish what runs within `deadline` seconds, save, and end the children."""
    await services.training.drain(deadline)
    await services.recorder.drain(deadline)
    await asyncio.gather(services.sampler.stop(), *([services.learner.stop()] if services.learner is not None else []))
    await services.store.close()


class Server(uvicorn.Server):
    """uvicorn without its signal handling: who ends it is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Ending:
    """The first request to end is orderly, the second immediate."""

    def __init__(self, services: Services, server: Server, lock: DirectoryLock) -> None:
        self._services = services
        self._server = server
        self._lock = lock
        self._draining: asyncio.Task[None] | None = None
        self.deadline = END_SECONDS

    def on_signal(self) -> None:
        if self._draining is not None:
            self._at_once()
        self.begin(END_SECONDS)
        print(f"\nEnding: what runs has {END_SECONDS} s to finish. Ctrl-C again ends at once.", flush=True)

    def begin(self, deadline: int) -> None:
        """Stop accepting, and let the training queue run out while calls in flight finish."""
        if self._draining is None:
            self.deadline = deadline
            self._draining = asyncio.create_task(self._services.training.drain(deadline))
            self._server.config.timeout_graceful_shutdown = deadline
            self._server.should_exit = True

    def _at_once(self) -> None:
        self._services.sampler.kill()
        if self._services.learner is not None:
            self._services.learner.kill()
        self._lock.release()
        os._exit(130)


async def _serve(
    options: ServerOptions, base: BaseModelPath, lock: DirectoryLock, listener: socket.socket, key: Key | None
) -> int:
    url = url_of(options.host, listener)
    services = await open_services(options, base)
    kept = KeyFile(key.kept, key.text) if key is not None and key.kept is not None else None
    guard = Guard(key.text if key is not None else None, options.viewer_keys, kept)
    config = uvicorn.Config(
        app.build(services, guard),
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,  # nobody here asks who the client is
        server_header=False,
        timeout_keep_alive=75,
        ws="none",
        http=cast(type[asyncio.Protocol], partial(BoundedProtocol, door=Door(_door_limits()))),
    )
    server = Server(config)
    ending = Ending(services, server, lock)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ending.on_signal)
    print(f"Loading {base.name} from {base.path}; log: {options.dir / 'logs' / 'sampler.log'}", flush=True)
    failure: list[EngineError] = []
    tasks = [
        asyncio.create_task(_begin(services, server, ending, lock, (url, _local(url, listener)), key, guard, failure)),
        asyncio.create_task(_sweep(services)),
        asyncio.create_task(services.lag.watch()),
    ]
    if options.parent_pid is not None:
        tasks.append(asyncio.create_task(_follow(options.parent_pid, ending)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await close_services(services, ending.deadline)
    if failure:
        raise failure[0]
    print(banner.ended(services), flush=True)
    return 0


async def _begin(
    services: Services,
    server: Server,
    ending: Ending,
    lock: DirectoryLock,
    urls: tuple[str, str],
    key: Key | None,
    guard: Guard,
    failure: list[EngineError],
) -> None:
    """Say where the server is, to people and to clients on this machine (`urls`); when the sampler answers, say so; when it cannot be started, end with its reason."""
    while not server.started:
        await asyncio.sleep(0.01)
    lock.announce(
        urls[1], services.base.name, key.text if key is not None and is_loopback(services.options.host) else None
    )
    learner = services.learner
    if learner is not None and services.engine.shares_gpu:
        learner.start()
        await learner.started()  # then what is left of the GPU's memory can be measured
    services.sampler.start()
    try:
        await services.sampler.ready()
    except EngineError as error:
        failure.append(error)
        ending.begin(ORPHAN_SECONDS)
        return
    if learner is not None and not services.engine.shares_gpu:
        learner.start()
    link = guard.sessions.one_time_link() if guard.sessions is not None else "/"
    print(banner.ready(services, urls[0], key, urls[0] + link), flush=True)


async def _sweep(services: Services) -> None:
    """Let calls expire that no trajectory claimed within --unclaimed-ttl of this server's running time."""
    ttl, store = services.options.unclaimed_ttl, services.store
    running = RunningTime(await store.running())
    while True:
        await asyncio.sleep(min(ttl / 2, SWEEP_SECONDS))
        running.tick()
        try:
            await store.save_running(running.text())
            await store.expire_unclaimed(running.ago(ttl), tuple(services.recorder.in_flight))
        except StoreError as error:
            log.error("Unclaimed calls were not swept: %s", error)


async def _follow(pid: int, ending: Ending) -> None:
    """End with the process `pid`."""
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.5)
    except psutil.NoSuchProcess:
        log.debug("process %d is gone", pid)
    log.warning("The process that started this server (pid %d) is gone; ending", pid)
    ending.begin(ORPHAN_SECONDS)


def _allow_open_files() -> None:
    """As many open files as this account may have, for this process and the children it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("only %d files can be open at once (%s): some %d calls in flight", soft, error, soft // 2)


def _door_limits() -> DoorLimits:
    """As many connections as there can be open files for: a call in flight holds two."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    connections = max(64, min(files // 2 - KEPT_FILES, DoorLimits.connections))
    return DoorLimits(connections=connections, strangers=min(DoorLimits.strangers, connections // 2))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError saying what to do."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and host in ALL_ADDRESSES and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} on {host} is taken by another program; give another --port (0 takes a free one)"
        elif error.errno in (errno.EACCES, errno.EPERM):
            why = f"port {port} on {host} may not be used by this account; give a --port above 1023"
        else:
            why = f"--host {host}, --port {port}: this machine cannot listen there ({error})"
        raise ConfigError(why) from error


def url_of(host: str, listener: socket.socket) -> str:
    """Where a server that listens is found."""
    shown = socket.gethostname() if host in ALL_ADDRESSES else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


def _local(url: str, listener: socket.socket) -> str:
    """The address for clients on this machine: loopback, also where all addresses are served."""
    name, _, port = url.removeprefix("http://").rpartition(":")
    if is_loopback(name) or name != socket.gethostname():
        return url
    only_ipv6 = listener.family == socket.AF_INET6 and listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return f"http://{'[::1]' if only_ipv6 else '127.0.0.1'}:{port}"
