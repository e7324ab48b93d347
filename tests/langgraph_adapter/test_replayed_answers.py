"""A cache between the app and the server: an answer that was given to another call is an error, and no rollout of the policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import vcr
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from offbook import TrainableModel, Trajectory
from offbook.base.errors import CaptureError
from offbook.client.rollouts.capture import capturing
from offbook.testing import ScriptedServer
from offbook_langgraph import ChatOffbook, capture
from offbook_langgraph.calls.langchain_patches import install

OTHER = r"a call of rollout .* got the answer of call .* of rollout .*: a cache between the app and the server"
AGAIN = r"the answer of call .* came a second time: a cache between the app and the server"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def cache(tmp_path: Path) -> Callable[[], Any]:
    """Opens the cassette, which answers the requests of the blocks before, whatever their headers."""
    install()  # before the recorder patches the same transports
    recorder = vcr.VCR(record_mode=vcr.mode.NEW_EPISODES, match_on=("method", "uri", "body"))

    def calls_only(request: Any) -> Any:
        return request if request.uri.endswith("/chat/completions") else None

    path = str(tmp_path / "cassette.yaml")
    return lambda: recorder.use_cassette(path, allow_playback_repeats=True, before_record_request=calls_only)


def own() -> ChatOpenAI:
    return ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url="http://127.0.0.1:9/v1", max_retries=0)


async def ask(way: str) -> None:
    if way == "invoke":
        own().invoke("hi")
    elif way == "ainvoke":
        await own().ainvoke("hi")
    elif way == "stream":
        list(own().stream("hi"))
    else:
        _ = [chunk async for chunk in own().astream("hi")]


WAYS = ("invoke", "ainvoke", "stream", "astream")


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_to_another_rollout_is_an_error_and_not_this_rollouts(
    stand_in: TrainableModel, obedient: ScriptedServer, cache: Any, way: str
) -> None:
    with cache():
        async with capture(stand_in) as first:
            await ask(way)
    with cache() as cassette, pytest.raises(CaptureError, match=OTHER):
        async with capture(stand_in) as second:
            await ask(way)
    assert cassette.play_count == 1
    assert (first.metrics["captured_calls"], second.metrics["captured_calls"]) == (1, 0)
    assert len(list(obedient.calls(first.id))) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_comes_again_in_one_rollout_is_an_error_also_if_the_app_swallows_it(
    stand_in: TrainableModel, cache: Any, way: str
) -> None:
    with pytest.raises(CaptureError, match=AGAIN):
        async with capture(stand_in):
            with cache():
                await ask(way)
            try:
                with cache():
                    await ask(way)
            except CaptureError:
                answer = "sorry"
            assert answer == "sorry"


def test_a_chat_model_that_names_its_trajectory_takes_no_other_ones_answer(
    stand_in: TrainableModel, obedient: ScriptedServer, cache: Any
) -> None:
    with capture(stand_in):
        pass  # registers the model
    model = ChatOffbook(model=stand_in.name, base_url=obedient.url, api_key=SecretStr("none"))
    with cache():
        model.model_copy(update={"trajectory_id": "first"}).invoke("hi")
    named = r"a call of rollout second got the answer of call .* of rollout first"
    with cache(), pytest.raises(CaptureError, match=named):
        model.model_copy(update={"trajectory_id": "second"}).invoke("hi")


def test_a_cache_of_langchains_does_not_answer_for_an_explicit_chat_model(
    stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    set_llm_cache(InMemoryCache())
    try:
        for _ in range(2):
            with capture(stand_in) as trajectory:
                ChatOffbook(model=stand_in.name, base_url=obedient.url, api_key=SecretStr("none")).invoke("hi")
                own().invoke("hi")
            assert len(list(obedient.calls(trajectory.id))) == 2
    finally:
        set_llm_cache(None)


async def explicit_client(model: TrainableModel) -> openai.AsyncOpenAI:
    await model.register()
    return model.openai_client()


async def complete(client: openai.AsyncOpenAI, model: TrainableModel, stream: bool) -> None:
    answer = await client.chat.completions.create(model=model.name, messages=MESSAGES, stream=stream)
    if stream:
        _ = [chunk async for chunk in answer]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_explicit_client_takes_no_other_rollouts_answer(
    stand_in: TrainableModel, obedient: ScriptedServer, cache: Any, stream: bool
) -> None:
    client = await explicit_client(stand_in)
    with cache(), capturing(Trajectory()):
        await complete(client, stand_in, stream)
    with cache() as cassette, capturing(Trajectory()), pytest.raises(openai.ConflictError, match=OTHER):
        await complete(client, stand_in, stream)
    assert cassette.play_count == 1
    await client.close()


async def test_an_explicit_client_takes_an_answer_once(
    stand_in: TrainableModel, obedient: ScriptedServer, cache: Any
) -> None:
    client = await explicit_client(stand_in)
    with cache():
        await complete(client, stand_in, stream=False)
    with cache(), pytest.raises(openai.ConflictError, match=AGAIN):
        await complete(client, stand_in, stream=False)
    await client.close()


async def test_a_request_that_is_sent_again_under_its_idempotency_key_gets_its_answer_again(
    stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    client = await explicit_client(stand_in)
    with capturing(Trajectory()):
        for _ in range(2):
            await client.chat.completions.create(
                model=stand_in.name, messages=MESSAGES, extra_headers={"idempotency-key": "one"}
            )
    await client.close()
