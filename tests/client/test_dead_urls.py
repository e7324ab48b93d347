"""How long a URL where nobody answers is tried, by every way to a server."""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import offbook
from tests.fakes.scripted_api import Asked, Reply, scripted_api


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where connections are refused; or where they never come about, as the queue of those that wait is full."""
    if request.param == "refused":
        yield "http://127.0.0.1:9"
        return
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def model_at(url: str) -> offbook.TrainableModel:
    return offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend(url))


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("url", ["refused", "silent"], indirect=True)
@pytest.mark.parametrize("way", ["register", "get_step", "train", "chat"])
async def test_a_url_where_nobody_ever_answered_is_known_within_five_seconds(url: str, way: str) -> None:
    model = model_at(url)
    request: Any = {"model": "agent", "messages": [{"role": "user", "content": "hello"}]}
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "register": lambda: offbook.RemoteBackend(url).register(model),
        "get_step": model.get_step,
        "train": lambda: model.train([offbook.TrajectoryGroup([offbook.Trajectory(captured=True, reward=1)])]),
        "chat": lambda: model.openai_client().chat.completions.create(**request),
    }
    started = time.monotonic()
    with pytest.raises(Exception, match=rf"no answer from the server at {url} .*is it running"):
        await ways[way]()
    assert time.monotonic() - started < 5


async def test_a_server_that_has_answered_is_waited_for_while_it_starts_anew() -> None:
    cut_until = time.monotonic() + 5

    def script(request: Asked) -> Reply | None:
        if request.path != "/api/models/agent":
            return None
        state = {"name": "agent", "project": "default", "base_model": "tiny", "step": 3, "lora": {}, "checkpoint": None}
        return Reply(cut=True) if time.monotonic() < cut_until else Reply(json=state)

    with scripted_api(script) as api:
        assert await model_at(api.url).get_step() == 3
        assert time.monotonic() >= cut_until
