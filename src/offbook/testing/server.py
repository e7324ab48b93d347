"""Offbook's own server over a scripted inference engine: it records as in production, and loads no model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from offbook.base.locked_folders import TemporaryFolder
from offbook.base.server_options import EngineOptions, ServerOptions
from offbook.base.types import Call
from offbook.base.wire import TrajectoryWithCalls
from offbook.server.base_model import BaseModelPath
from offbook.server.calls.recorder import Recorder
from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.server.models.checkpoint_swaps import open_models
from offbook.server.records.store import Store
from offbook.server.sampler.engine_choice import EngineChoice
from offbook.server.sampler.supervised import SupervisedSampler
from offbook.server.services import Services
from offbook.server.serving import open_wings
from offbook.server.training.archives import Archives
from offbook.server.training.history import TrainHistory
from offbook.server.training.jobs import JobFolders
from offbook.server.training.queue import TrainQueue

from .asgi import serving
from .policy_sampler import PolicyFunction, PolicySampler

START_SECONDS = 60.0
END_SECONDS = 30.0


@dataclass
class ScriptedServer:
    """A running server, as `scripted_server` yields it.

        [call] = server.calls(trajectory.id)

    - `url`: for `RemoteBackend`.
    - `sampler`: the policy's side; `sampler.received` has the requests.
    - `http`: a client for any other request to the server."""

    url: str
    sampler: PolicySampler
    http: httpx.Client

    def calls(self, trajectory_id: str) -> tuple[Call, ...]:
        """The calls recorded under a trajectory, in order of start, with token ids and logprobs; () for an unknown id.

        Raises httpx.HTTPStatusError when the server fails."""
        response = self.http.get(f"/api/trajectories/{trajectory_id}")
        if response.status_code == 404:
            return ()
        response.raise_for_status()
        calls = TrajectoryWithCalls.model_validate_json(response.content).calls
        return tuple(sorted(calls, key=lambda call: call.started_at))


@contextmanager
def scripted_server(policy: PolicyFunction, folder: Path | None = None) -> Generator[ScriptedServer]:
    """Serve the real server, whose policy is a function, on a free port of loopback until the block ends. Needs the extra `server`.

        def policy(body):
            return Action("done") if body["messages"][-1]["role"] == "tool" else Action(calls=(("look_up", "{}"),))

        with scripted_server(policy) as server:
            model = offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend(server.url))

    The server runs in a thread with its own event loop, and so does the policy; sync and async clients may call it. It
    records, scores and shows rollouts in `folder`, else in a temporary one; its only base model is `tiny`. It has no
    learner: `train` is refused.

    If the block ends without an error, raises the first error of the policy. Raises RuntimeError when the server does not start."""
    sampler = PolicySampler(policy)
    with ExitStack() as stack:
        records = folder or stack.enter_context(TemporaryFolder("records"))
        url = stack.enter_context(_in_thread(sampler, records))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False))
        yield ScriptedServer(url, sampler, http)
    if sampler.failures:
        raise sampler.failures[0]


@asynccontextmanager
async def server_over(sampler_url: str, folder: Path | None = None) -> AsyncGenerator[str]:
    """Serve the real server over an inference engine that runs at `sampler_url`, in this event loop; yields the server's URL.

    Otherwise as `scripted_server`."""
    with ExitStack() as stack:
        records = folder or stack.enter_context(TemporaryFolder("records"))
        async with services_over(sampler_url, records) as services, serving(app.build(services, Guard(None))) as url:
            yield url


@asynccontextmanager
async def services_over(sampler_url: str, folder: Path) -> AsyncGenerator[Services]:
    """What a server without a learner is made of, over an inference engine that runs at `sampler_url`."""
    store = await Store.open(folder / "records.db")
    base = BaseModelPath("tiny", folder, "tiny")
    sampler = ConnectedSampler(sampler_url)
    models = open_models(folder, base, "default", "default", sampler.adapters)
    recorder = Recorder(store)
    jobs = JobFolders(folder / "jobs", store)
    history = TrainHistory(store, models.registry, jobs)
    services = Services(
        options=ServerOptions(dir=folder),
        engine=EngineChoice("embedded", EngineOptions()),
        base=base,
        store=store,
        models=models,
        sampler=sampler,
        recorder=recorder,
        learner=None,
        training=TrainQueue(history, jobs, None),
        train_history=history,
        archives=Archives(folder / "exports"),
    )
    try:
        await open_wings(services)
        yield services
    finally:
        await recorder.drain()
        for wing in services.wings.values():
            await wing.close(END_SECONDS)
        await sampler.stop()
        await store.close()


class ConnectedSampler(SupervisedSampler):
    """The server's client of an inference engine that is already running."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._connect(url)
        self._state = "ok"


@contextmanager
def _in_thread(sampler: PolicySampler, folder: Path) -> Generator[str]:
    urls: list[str] = []
    failures: list[BaseException] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        try:
            async with serving(sampler) as sampler.url, server_over(sampler.url, folder) as url:
                urls.append(url)
                ready.set()
                await asyncio.to_thread(over.wait)
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="scripted-server")
    thread.start()
    try:
        if not ready.wait(START_SECONDS) or not urls:
            reason = f"{failures[0]!r}" if failures else f"no answer within {START_SECONDS:.0f} s"
            raise RuntimeError(f"the scripted server did not start: {reason}") from (failures or [None])[0]
        yield urls[0]
    finally:
        over.set()
        thread.join(END_SECONDS)
    if failures:
        raise failures[0]
