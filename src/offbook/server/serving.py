"""Runs one server: takes its directory and its port, removes the unfinished files of a crash, starts its children, and
shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Generator
from functools import partial

import psutil
import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from offbook.base import clock
from offbook.base.errors import ConfigError, EngineError, OffbookError, StoreError
from offbook.base.http_access import is_loopback
from offbook.base.redaction import guard_own_log, protect, protect_environment
from offbook.base.server_options import ServerOptions
from offbook.base.terminal import echo
from offbook.http_listener.config import OPEN_FILES, listener_config
from offbook.http_listener.listening import listen, local_url, url_of

from .base_model import BaseModelPath, find
from .calls.recorder import Recorder
from .calls.sampled_answer import CALL_MARKS
from .directory_lock import DirectoryLock, make_private, sweep, with_prompt_date
from .http import app
from .http.auth import Guard, Key, key_for
from .logprob_check import check_logprobs
from .models.checkpoint_swaps import open_models
from .records.database import RECORDS
from .records.store import Store
from .sampler.engine_choice import EngineChoice, choose
from .services import Services
from .training.archives import Archives
from .training.history import TrainHistory
from .training.jobs import JobFolders
from .training.learner_client import LearnerClient
from .training.queue import TrainQueue
from .training.runner import TrainRunner
from .wing import ServerWing, close_wings, wing_classes

logger = logging.getLogger(__name__)


END_SECONDS = 120
"""Shutdown deadline: running calls and the running train step get this long to finish."""
WING_SECONDS = 30
"""Shutdown deadline of the wings, besides END_SECONDS."""
EXPIRY_SECONDS = 60.0
"""Longest interval between two searches for expired calls."""
ORPHAN_SECONDS = 3
"""Shutdown deadline when the parent process has died: no client is waiting, so keep it short."""


def run(options: ServerOptions) -> int:
    """Serve until a signal, or the end of the parent process, and return the exit code.

    Raises ConfigError, EngineError, StoreError.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    guard_own_log()
    for noisy in ("httpx", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _allow_open_files()
    make_private(options.dir)
    lock = DirectoryLock(options.dir)
    try:
        sweep(options.dir)
        options = with_prompt_date(options)
        for wing in wing_classes(options):
            wing.prepare(options.wings.get(wing.name), options)
        engine = choose(options.engine, options.model, trains=not options.inference_only)  # before downloading a base
        base = find(options.model)
        engine = engine.for_base(plain_answers=base.answers_plainly(), template=base.template_words())
        key = key_for(options.host, options.api_key, options.dir)
        protect_environment()
        protect([*([key.text] if key else []), *options.viewer_keys])
        if options.viewer_keys and key is None:
            raise ConfigError(
                "--viewer-keys has no effect without --api-key, since every local client may write then: set both"
            )
        with (
            listen(options.host, options.port) as listener,
            asyncio.Runner(loop_factory=auto_loop_factory()) as runner,
        ):
            return runner.run(_serve(options, engine, base, lock, listener, key))
    finally:
        lock.release()


async def open_services(options: ServerOptions, engine: EngineChoice, base: BaseModelPath) -> Services:
    """Open all services of a server. Starts no child process yet. Raises ConfigError, StoreError."""
    logs = options.dir / "logs"
    store = await Store.open(options.dir / RECORDS, durable=options.durable, may_begin=options.inference_only)
    learner = runner = None
    wings: dict[str, ServerWing] = {}
    recorder = Recorder(store, base.special_tokens(CALL_MARKS))
    try:
        sampler = engine.sampler(base, logs / "sampler.log")
        models = open_models(options.dir, base, options.name, options.project, sampler.adapters, engine.max_rank)
        jobs = JobFolders(options.dir / "jobs", store)
        history = TrainHistory(store, models.registry, jobs)
        if not options.inference_only:
            learner = _learner(options, engine, base)
            runner = TrainRunner(
                learner,
                models,
                history,
                jobs,
                free_gpu=partial(engine.free_gpu, sampler.calls),
                wrong_answers=lambda: recorder.wrong_answers,
                keep_tokens=options.engine.keep_tokens,
                wings=wings,
            )
        training = TrainQueue(history, jobs, runner)
        await training.open()
        archives = Archives(options.dir / "exports")
        services = Services(
            options, engine, base, store, models, sampler, learner, recorder, training, history, archives, wings,
        )  # fmt: skip
        await open_wings(services)
    except BaseException:
        await close_wings(wings, 0)
        await store.close()
        raise
    return services


async def open_wings(services: Services) -> None:
    """Open the wings that the options ask for. Raises ConfigError, StoreError."""
    for wing_class in wing_classes(services.options):
        if wing_class.tables is not None:
            await services.store.add_tables(wing_class.tables)
        wing = wing_class(services.options.wings.get(wing_class.name), services)
        services.wings[wing.name] = wing
        await wing.open()


def _learner(options: ServerOptions, engine: EngineChoice, base: BaseModelPath) -> LearnerClient:
    """The client of the learner, which is not started yet."""
    sharing = engine.sharing
    return LearnerClient(
        base,
        engine.options,
        options.dir / "logs" / "learner.log",
        options.step_timeout,
        offload=sharing is not None and sharing.layout == "offload",
        row_limit=sharing.row_limit if sharing is not None else None,
    )


async def close_services(services: Services, deadline: float) -> None:
    """Give the train step, then the calls, `deadline` seconds to finish; stop the children and the wings, and close the
    records."""
    await services.training.drain(deadline)
    await services.recorder.drain(deadline)
    ending = [services.sampler.stop(), close_wings(services.wings, min(deadline, WING_SECONDS))]
    if services.learner is not None:
        ending.append(services.learner.stop())
    await asyncio.gather(*ending)
    await services.store.close()


class Server(uvicorn.Server):
    """uvicorn without its signal handlers. `Shutdown` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no handlers."""
        yield


class Shutdown:
    """Ends the server: the first signal lets running work finish, the second ends at once."""

    def __init__(self, services: Services, server: Server, lock: DirectoryLock) -> None:
        self._services = services
        self._server = server
        self._lock = lock
        self._draining: asyncio.Task[None] | None = None
        self.deadline = END_SECONDS
        """Seconds that running work gets once `begin` was called."""

    def on_signal(self) -> None:
        """Handle SIGINT or SIGTERM."""
        if self._draining is not None:
            self._at_once()
        self.begin(END_SECONDS)
        echo(
            f"\nEnding: running calls and the train step have {END_SECONDS} s to finish. Ctrl-C again ends at once.",
        )

    def begin(self, deadline: int) -> None:
        """Stop accepting requests. The running train step and the calls in flight get `deadline` seconds to finish."""
        if self._draining is None:
            self.deadline = deadline
            self._draining = asyncio.create_task(self._services.training.drain(deadline))
            self._server.config.timeout_graceful_shutdown = deadline
            self._server.should_exit = True

    def _at_once(self) -> None:
        """Kill the children and exit this process. Does not return."""
        self._services.sampler.kill()
        if self._services.learner is not None:
            self._services.learner.kill()
        self._lock.release()
        os._exit(130)


async def _serve(
    options: ServerOptions,
    engine: EngineChoice,
    base: BaseModelPath,
    lock: DirectoryLock,
    listener: socket.socket,
    key: Key | None,
) -> int:
    """Open the services, serve, and close them. Raises EngineError if the sampler cannot be started."""
    url = url_of(options.host, listener)
    services = await open_services(options, engine, base)
    guard = Guard(key.text if key is not None else None, options.viewer_keys)
    config = listener_config(app.build(services, guard))
    server = Server(config)
    shutdown = Shutdown(services, server, lock)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, shutdown.on_signal)
    log = "sampler.log" if engine.options.samplers == 1 else "sampler-*.log"
    echo(f"Loading {base.name} from {base.path}; log: {options.dir / 'logs' / log}")
    failure: list[OffbookError] = []
    tasks = [
        asyncio.create_task(_start(services, server, shutdown, lock, (url, local_url(url, listener)), key, failure)),
        asyncio.create_task(_expire_calls(services)),
    ]
    if options.parent_pid is not None:
        tasks.append(asyncio.create_task(_follow(options.parent_pid, shutdown)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await close_services(services, shutdown.deadline)
    if failure:
        raise failure[0]
    echo(ended_message(services))
    return 0


async def _start(
    services: Services,
    server: Server,
    shutdown: Shutdown,
    lock: DirectoryLock,
    urls: tuple[str, str],
    key: Key | None,
    failure: list[OffbookError],
) -> None:
    """Start the children, and announce the server when it listens and when it is ready.

    `urls`: the address to print, and the one for clients on this machine. If the server cannot be announced or the sampler
    not be started, appends the error to `failure` and shuts down.
    """
    while not server.started:
        await asyncio.sleep(0.01)
    told = key.text if key is not None and is_loopback(services.options.host) else None
    try:
        lock.announce(urls[1], services.base.name, told)
    except ConfigError as error:
        failure.append(error)
        shutdown.begin(ORPHAN_SECONDS)
        return
    learner = services.learner
    if learner is not None and services.engine.sharing is not None:
        learner.start()
        await learner.started()  # vLLM then measures the free GPU memory with the learner in place
    services.sampler.start()
    try:
        if not await _sampler_ready(services):
            return
    except EngineError as error:
        failure.append(error)
        shutdown.begin(ORPHAN_SECONDS)
        return
    if learner is not None and services.engine.sharing is None:
        learner.start()
    gc.collect()
    gc.freeze()  # what is loaded stays: a full collection looks through the objects of calls alone
    echo(ready_message(services, urls[0], key))
    await check_logprobs(services)


async def _sampler_ready(services: Services) -> bool:
    """Wait for the sampler. False if it cannot be started, and a wing is of use all the same; without one, raises
    EngineError."""
    try:
        await services.sampler.started()
    except EngineError as error:
        if not any(wing.answers_without_sampler() for wing in services.wings.values()):
            raise
        logger.error("No model of this server answers: %s. What does not need one goes on", error)
        return False
    return True


async def _expire_calls(services: Services) -> None:
    """Delete calls that no trajectory claimed within --unclaimed-ttl, measured in the time since this server's start."""
    ages = clock.RunningAge(services.options.unclaimed_ttl)
    while True:
        await asyncio.sleep(min(ages.seconds / 2, EXPIRY_SECONDS))
        before = ages.older()
        try:
            if before is not None:
                await services.store.expire_unclaimed(before, tuple(services.recorder.in_flight))
        except StoreError as error:
            logger.error("Expired calls were not deleted: %s", error)


async def _follow(pid: int, shutdown: Shutdown) -> None:
    """Shut down when the process `pid` has ended."""
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.5)
    except psutil.NoSuchProcess:
        logger.debug("process %d has ended", pid)
    logger.warning("The process that started this server (pid %d) has ended; shutting down", pid)
    shutdown.begin(ORPHAN_SECONDS)


def _allow_open_files() -> None:
    """Raise the limit of open files towards OPEN_FILES, for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.warning(
            "The limit of open files stays at %d (%s), enough for about %d calls in flight", soft, error, soft // 2
        )


def ready_message(services: Services, url: str, key: Key | None) -> str:
    """The message of a ready server: its model, engine, files and addresses, and a line of client code."""
    options = services.options
    rows = [
        ("base model", f"{services.base.name} ({services.base.path})"),
        ("engine", services.engine.described()),
        ("directory", str(options.dir)),
        ("models", _model_steps(services)),
        ("logs", str(options.dir / "logs")),
        ("training", "off (--inference-only)" if services.learner is None else "on"),
    ]
    if key is not None and key.kept is not None:
        shown = f"{key.text} (shown once; stored in {key.kept})" if key.is_new else f"stored in {key.kept}"
        rows.append(("key", shown))
    elif key is not None:
        rows.append(("key", "the configured one"))
    for wing in services.wings.values():
        rows += wing.ready_rows(url)
    lines = [f"Offbook is ready at {url}", *(f"  {name:<11}{value}" for name, value in rows)]
    return "\n".join([*lines, *_client_line(url, key)])


def _client_line(url: str, key: Key | None) -> list[str]:
    if key is None:
        return [f'  {"client":<11}offbook.RemoteBackend("{url}"), or any OpenAI client with base_url="{url}/v1"']
    text = key.text if key.is_new else "..."
    return [f'  {"client":<11}offbook.RemoteBackend("{url}", api_key="{text}")']


def ended_message(services: Services) -> str:
    """The message after shutdown: the newest checkpoint of every trained model."""
    states = [model.state() for model in services.models.registry.models()]
    trained = [f"  {state.name}: step {state.step}, {state.checkpoint}" for state in states if state.checkpoint]
    return "\n".join(["Ended. Everything recorded and trained is saved.", *trained])


def _model_steps(services: Services) -> str:
    return ", ".join(f"{model.facts.name} (step {model.step})" for model in services.models.registry.models())
