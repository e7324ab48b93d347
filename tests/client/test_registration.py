"""A model's first use: however many ask at once, the backend is connected and the model registered once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import offbook
from offbook.base.errors import ServerError
from offbook.client.connection.http import Api
from tests.fakes.scripted_api import Asked, Reply, ScriptedApi, scripted_api

USERS = 8


class GatedBackend(offbook.RemoteBackend):
    """Connects when its gate is open, and counts how often it was asked to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = asyncio.Event()
        self.connects = 0

    async def connect(self, base_model: str | None = None) -> Api:
        self.connects += 1
        await self.gate.wait()
        return await super().connect(base_model)


def model_on(backend: offbook.RemoteBackend) -> offbook.TrainableModel:
    return offbook.TrainableModel("agent", base_model="tiny", backend=backend)


def registrations(api: ScriptedApi) -> int:
    return len(api.bodies("/api/models"))


async def test_users_that_begin_at_once_share_one_connection_and_one_registration() -> None:
    with scripted_api() as api:
        backend = GatedBackend(api.url)
        model = model_on(backend)
        users = [asyncio.create_task(model.api()) for _ in range(USERS)]
        await asyncio.sleep(0)  # each has begun
        backend.gate.set()
        servers = await asyncio.gather(*users)
        assert len(set(servers)) == 1
        assert (backend.connects, registrations(api)) == (1, 1)


def test_users_in_event_loops_of_their_own_threads_share_one_registration() -> None:
    entered = threading.Barrier(USERS + 1)
    all_ask = threading.Event()

    def script(request: Asked) -> Reply | None:
        all_ask.wait(30)
        return None

    with scripted_api(script) as api:
        model = model_on(offbook.RemoteBackend(api.url))

        def use() -> None:
            entered.wait(30)
            asyncio.run(model.api())

        threads = [threading.Thread(target=use) for _ in range(USERS)]
        for thread in threads:
            thread.start()
        entered.wait(30)
        all_ask.set()
        for thread in threads:
            thread.join(30)
        assert registrations(api) == 1


async def test_a_registration_that_fails_fails_for_all_who_wait_and_the_next_use_tries_again() -> None:
    answers = [Reply(409, {"error": {"message": "another base model", "code": "conflict", "param": None}})]
    with scripted_api(lambda request: answers.pop() if answers else None) as api:
        backend = GatedBackend(api.url)
        model = model_on(backend)
        users = [asyncio.create_task(model.api()) for _ in range(USERS)]
        await asyncio.sleep(0)
        backend.gate.set()
        outcomes = await asyncio.gather(*users, return_exceptions=True)
        assert all(isinstance(outcome, ServerError) and outcome.status == 409 for outcome in outcomes)
        assert (backend.connects, registrations(api)) == (1, 1)
        await model.api()
        assert registrations(api) == 2


async def test_when_the_first_user_is_cancelled_another_one_connects() -> None:
    with scripted_api() as api:
        backend = GatedBackend(api.url)
        model = model_on(backend)
        first, second, third = [asyncio.create_task(model.api()) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        third.cancel()  # one who only waits takes nothing with it
        with pytest.raises(asyncio.CancelledError):
            await first
        backend.gate.set()
        await second
        assert (backend.connects, registrations(api)) == (2, 1)


async def test_a_backend_named_while_another_one_is_connected_is_the_one_that_is_used() -> None:
    with scripted_api() as api, scripted_api() as other:
        slow = GatedBackend(api.url)
        model = model_on(slow)
        waiting = asyncio.create_task(model.api())
        await asyncio.sleep(0)
        await model.register(offbook.RemoteBackend(other.url))
        slow.gate.set()
        assert (await waiting).url == api.url
        assert (await model.api()).url == other.url
        assert model.inference_base_url.startswith(other.url)
        assert registrations(other) == 1


def test_a_path_is_absolute_for_the_server_on_this_machine_and_untouched_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert offbook.LocalBackend(tmp_path / "server").path_on_server("out") == str(tmp_path / "out")
    assert offbook.RemoteBackend("http://gpu-box:8000").path_on_server("out") == "out"
