"""The leak check: a request to another LLM during a capture is named with its URL and the line that made it."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest
import requests
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from offbook import TrainableModel
from offbook.base.errors import LeakError
from offbook.testing import ScriptedLlm, says, scripted_llm
from offbook_langgraph import capture, observe, trainable, uncaptured

HERE = r"test_leaks\.py:\d+ in "


@pytest.fixture
def other() -> Iterator[ScriptedLlm]:
    """Another LLM's endpoint."""
    with scripted_llm([says("from elsewhere")]) as running:
        yield running


def ask_openai(url: str) -> object:
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def ask_async_openai(url: str) -> object:
    async def ask() -> object:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

    return asyncio.run(ask())


def ask_responses(url: str) -> object:
    return openai.OpenAI(base_url=url, api_key="unused", max_retries=0).responses.create(model="m", input="hi")


def ask_anthropic(url: str) -> object:
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    return client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])


def ask_requests(url: str) -> object:
    return requests.post(
        f"{url}/whatever", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]}, timeout=9
    )


def ask_aiohttp(url: str) -> object:
    async def ask() -> object:
        async with aiohttp.ClientSession() as session:
            body = {"contents": [{"parts": [{"text": "hi"}]}]}
            return await session.post(f"{url}/models/gemini:generateContent", json=body)

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [ask_openai, ask_async_openai, ask_responses, ask_anthropic, ask_requests, ask_aiohttp])
def test_a_request_past_the_capture_is_an_error_that_names_url_and_line(
    ask: Any, stand_in: TrainableModel, other: ScriptedLlm
) -> None:
    with pytest.raises(LeakError, match=rf"POST {other.url}.*{HERE}\w*ask"), capture(stand_in):
        ask(other.url)
    assert other.requests == []


def test_a_package_outside_of_the_interpreters_folders_is_not_the_line_that_made_the_request(
    stand_in: TrainableModel, other: ScriptedLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fetching-1.0.dist-info").mkdir()
    (tmp_path / "fetching-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: fetching\nVersion: 1.0\n")
    (tmp_path / "fetching-1.0.dist-info/RECORD").write_text("fetching.py,,\n")
    (tmp_path / "fetching.py").write_text("import httpx\n\ndef fetch(url, body):\n    httpx.post(url, json=body)\n")
    monkeypatch.syspath_prepend(tmp_path)
    fetching = importlib.import_module("fetching")
    with pytest.raises(LeakError, match=f"made at .*{HERE}test_a_package"), capture(stand_in):
        fetching.fetch(f"{other.url}/chat/completions", {})


def test_our_own_server_in_the_same_process_is_no_leak(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    with pytest.raises(LeakError, match=f"POST {other.url}.*{HERE}ask"), capture(stand_in, scope="process"):
        assert ChatOpenAI(model="own", api_key=SecretStr("unused")).invoke("hi").text == "heard: hi"
        ask_openai(other.url)


def test_a_leak_that_the_app_swallowed_is_raised_at_the_end(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    with pytest.raises(LeakError, match=HERE), capture(stand_in):
        try:
            ask_openai(other.url)
        except openai.APIError:
            answer = "sorry"
        assert answer == "sorry"


def test_a_warned_leak_goes_through_and_stands_in_the_trajectory(
    stand_in: TrainableModel, other: ScriptedLlm, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "offbook"), capture(stand_in, on_leak="warn") as trajectory:
        for _ in range(2):
            ask_openai(other.url)
    assert len(other.requests) == len(trajectory.logs) == 2
    assert [other.url in record.message for record in caplog.records] == [True]  # said once


def test_an_ignored_leak_is_ignored(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    with capture(stand_in, on_leak="ignore") as trajectory:
        ask_openai(other.url)
    assert (len(other.requests), trajectory.logs) == (1, [])


def test_a_leak_ends_the_training_at_once(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    @trainable(model=stand_in)
    def agent(scenario: dict[str, str]) -> float:
        ask_openai(other.url)
        return 1.0

    with pytest.raises(LeakError, match=HERE):
        agent.evaluate([{"id": str(number)} for number in range(20)])


def test_what_is_no_leak_goes_through(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    """An e-mail API, embeddings, a judge outside of the capture, a model that is not selected, our own client."""
    own = ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url=other.url)

    async def explicitly() -> None:
        client = stand_in.openai_client()
        await client.chat.completions.create(model=stand_in.name, messages=[{"role": "user", "content": "hi"}])

    with capture(stand_in, select={"node": "agent"}):
        httpx.post(f"{other.url}/messages", json={"model": "x", "to": "me", "body": "hi"})
        httpx.post(f"{other.url}/embeddings", json={"model": "x", "input": ["hi"]})
        httpx.post(f"{other.url}/search", json={"query": "hi", "model": "x"})
        with uncaptured():
            ask_openai(other.url)
        assert own.invoke("hi").text == "from elsewhere"
        assert asyncio.run(own.ainvoke("hi")).text == "from elsewhere"
        assert "".join(chunk.text for chunk in own.stream("hi")) == "from elsewhere"
        asyncio.run(explicitly())


def test_outside_of_a_capture_nothing_is_checked(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    with capture(stand_in):
        pass
    ask_openai(other.url)
    ask_requests(other.url)
    assert len(other.requests) == 2


def test_a_query_that_may_hold_a_key_is_not_shown(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    body = {"contents": [{"parts": []}]}
    with pytest.raises(LeakError) as raised, capture(stand_in):
        httpx.post(f"{other.url}/models/gemini:generateContent?key=SECRET", json=body)
    assert "SECRET" not in str(raised.value)


def test_an_observation_warns_of_calls_that_it_does_not_see(
    other: ScriptedLlm, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "offbook"), observe() as trajectory:
        ask_openai(other.url)
    assert [other.url in line for line in trajectory.logs] == [True]


def test_urllib_is_not_watched(stand_in: TrainableModel, other: ScriptedLlm) -> None:
    """Known: the standard library's own client goes through."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    with capture(stand_in):
        urllib.request.urlopen(urllib.request.Request(f"{other.url}/chat/completions", body), timeout=9).close()
    assert len(other.requests) == 1
