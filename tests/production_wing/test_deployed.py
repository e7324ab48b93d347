"""A deployed app of LangGraph: small models take over its nodes by evidence, and its own models answer whatever fails."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

import offbook
from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.server.services import Services
from offbook.testing import ScriptedCompletion, ScriptedSampler, scripted_sampler
from offbook.testing.asgi import serving
from offbook.testing.server import services_over
from offbook_langgraph import trainable
from offbook_production import deployed, langgraph_app
from offbook_production.wire import TakeoverState
from tests.fakes.paid_api import PaidApi
from tests.paths import ROOT
from tests.server.servers import RunningServer

SMALL, PAID = "Hello", "It is on its way."
HALF: dict[str, Any] = {"share": 0.5, "threads": 20, "margin": 0.4}
ALL: dict[str, Any] = {"share": 0.999}
"""Nearly all threads are the small model's from the first on."""
NODES = ("router", "writer")
SELECTED = {TrainableModel(name, base_model="tiny"): {"node": name} for name in NODES}


class Loud(BaseChatModel):
    """A chat model of the app's own that changes another one's answers."""

    inner: BaseChatModel

    @property
    def _llm_type(self) -> str:
        return "loud"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        message = AIMessage(self.inner.invoke(messages, stop=stop, **kwargs).text.upper())
        return ChatResult(generations=[ChatGeneration(message=message)])


def graph_of(paid_url: str, wrap: Callable[[BaseChatModel], BaseChatModel] = lambda model: model) -> Any:
    """A graph of two nodes, each of which asks the same paid model."""
    model = wrap(ChatOpenAI(model="gpt-4.1", base_url=f"{paid_url}/v1", api_key="unused", max_retries=0))  # type: ignore[arg-type]

    def ask(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke(state["messages"])]}

    async def ask_async(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    for name in NODES:
        graph.add_node(name, RunnableLambda(ask, ask_async))
    graph.add_edge(START, "router")
    graph.add_edge("router", "writer")
    return graph.compile(checkpointer=InMemorySaver())


@dataclass
class Desk:
    """A graph before a server; `app` is the graph as it is deployed, after takeovers by these rules have begun."""

    url: str
    paid: PaidApi
    paid_url: str
    sampler: ScriptedSampler
    services: Services
    http: httpx.AsyncClient
    graph: Any

    async def app(self, **rules: dict[str, Any]) -> Any:
        for route, rule in rules.items():
            answer = await self.http.post("/api/takeover/start", params={"route": route}, json=rule)
            assert answer.status_code == 200, answer.text
        return deployed(trainable(self.graph, model=SELECTED, reward="logged"), url=self.url)

    async def state(self, route: str) -> TakeoverState:
        answer = await self.http.get("/api/takeover", params={"route": route})
        assert answer.status_code == 200, answer.text
        return TakeoverState.model_validate_json(answer.content)

    async def score(self, thread: str, value: float, route: str) -> None:
        body = {"thread_id": thread, "route": route, "score": value}
        answer = await self.http.post("/api/feedback", json=body)
        assert answer.status_code in (200, 404), answer.text  # 404: its takeover has ended, and nothing is recorded


async def said(deployed: Any, thread: str) -> tuple[str, str]:
    """What the two nodes answered to a new question of a thread."""
    asked = {"messages": [("user", "Where is box 4821?")]}
    state = await deployed.ainvoke(asked, {"configurable": {"thread_id": thread}})
    router, writer = state["messages"][-2:]
    return router.text, writer.text


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Desk]:
    paid = PaidApi()
    async with (
        serving(paid) as paid_url,
        scripted_sampler() as sampler,
        services_over(sampler.url, folder) as services,
        serving(app.build(services, Guard(None))) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        for name in NODES:
            body = {"name": name, "project": "desk", "base_model": "tiny"}
            assert (await http.post("/api/models", json=body)).status_code in (200, 201)
        yield Desk(url, paid, paid_url, sampler, services, http, graph_of(paid_url))


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with opened(tmp_path) as desk:
        yield desk


async def test_each_node_has_a_takeover_of_its_own_and_each_thread_stays_on_its_side(desk: Desk) -> None:
    app = await desk.app(router=ALL, writer=HALF)
    answers = {f"t-{number}": await said(app, f"t-{number}") for number in range(12)}
    assert {router for router, _ in answers.values()} == {SMALL}
    assert {writer for _, writer in answers.values()} == {SMALL, PAID}
    for thread, answer in answers.items():
        assert await said(app, thread) == answer
    router, writer = await desk.state("router"), await desk.state("writer")
    assert (router.model, writer.model, router.id != writer.id) == ("router@0", "writer@0", True)


async def test_a_model_class_of_the_apps_own_runs_on_both_sides(desk: Desk) -> None:
    desk.graph = graph_of(desk.paid_url, lambda model: Loud(inner=model))
    app = await desk.app(router=ALL)
    assert await said(app, "t-1") == (SMALL.upper(), PAID.upper())


async def test_a_model_that_is_as_good_takes_over_and_one_that_is_worse_is_left(desk: Desk) -> None:
    app = await desk.app(router=HALF, writer=HALF)
    states: dict[str, TakeoverState] = {}
    for number in range(400):
        thread = f"t-{number}"
        for route, answer in zip(NODES, await said(app, thread), strict=True):
            await desk.score(thread, 1.0 if route == "router" else float(answer == PAID), route)
        states = {route: await desk.state(route) for route in NODES}
        if all(state.status != "running" for state in states.values()):
            break
    router, writer = states["router"], states["writer"]
    assert [decision.verdict for decision in router.decisions] == ["started", "taken_over"]
    assert writer.status == "left" and writer.decisions[-1].reason == "not shown to be worse by less than 0.4"
    assert await said(app, "new") == (SMALL, PAID)
    page = await desk.http.get("/takeovers/writer")
    assert page.status_code == 200 and "not shown to be worse by less than 0.4" in page.text
    app = await desk.app(writer=ALL)
    assert await said(app, "newer") == (SMALL, SMALL)


async def test_whatever_fails_on_the_small_side_the_own_model_answers_and_many_failures_end_it(desk: Desk) -> None:
    app = await desk.app(writer=ALL)
    broken = ScriptedCompletion(status=500, error={"error": {"message": "out of memory"}})
    desk.sampler.completions.extend([broken, ScriptedCompletion(dies_after=1)] * 40)
    for number in range(60):
        assert await said(app, f"t-{number}") == (PAID, PAID)
        if (now := await desk.state("writer")).status != "running":
            break
    assert now.decisions[-1].reason == "more than 10 of 11 calls failed"
    assert now.decisions[-1].numbers.failed == {"as the app says": 11}


async def test_streams_of_both_sides_and_sync_calls_arrive_whole(desk: Desk) -> None:
    app = await desk.app(router=ALL)
    asked, config = {"messages": [("user", "Where is box 4821?")]}, {"configurable": {"thread_id": "t-1"}}
    pieces: dict[str, str] = {}
    async for piece, facts in app.astream(asked, config, stream_mode="messages"):
        pieces[facts["langgraph_node"]] = pieces.get(facts["langgraph_node"], "") + piece.text
    assert pieces == {"router": SMALL, "writer": PAID}
    state = await asyncio.to_thread(app.invoke, asked, config)
    assert [message.text for message in state["messages"][-2:]] == [SMALL, PAID]


async def test_models_that_stream_in_a_node_have_a_side_too(desk: Desk) -> None:
    model = ChatOpenAI(model="gpt-4.1", base_url=f"{desk.paid_url}/v1", api_key="unused")  # type: ignore[arg-type]

    async def writer(state: MessagesState) -> MessagesState:
        pieces = [piece async for piece in model.astream(state["messages"])]
        whole = "".join(piece.text for piece in pieces)
        whole += "|" + "".join(piece.text for piece in await asyncio.to_thread(lambda: list(model.stream("hi"))))
        return {"messages": [AIMessage(whole)]}

    graph = StateGraph(MessagesState)
    graph.add_node("writer", writer)
    graph.add_edge(START, "writer")
    wrapped = trainable(graph.compile(), model=next(reversed(SELECTED)), reward="logged")
    for rules, text in (({}, PAID), ({"writer": ALL}, SMALL)):
        await desk.app(**rules)
        app = deployed(wrapped, url=desk.url)
        state = await app.ainvoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "t-1"}})
        assert state["messages"][-1].text == f"{text}|{text}"


async def test_a_call_that_the_small_model_cannot_take_is_the_own_models(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    app = await desk.app(router=ALL, writer=ALL)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    state = await app.ainvoke({"messages": [("user", [image])]}, {"configurable": {"thread_id": "t-1"}})
    assert state["messages"][-1].text == PAID
    assert "the small model cannot take a call" in caplog.text


async def test_what_the_server_refuses_is_logged_with_its_reason(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    assert await said(await desk.app(writer=ALL), "t-1") == (PAID, SMALL)
    assert "404" in caplog.text and "no route 'router' with a takeover: this server has writer" in caplog.text


async def test_a_server_that_hangs_costs_one_wait_and_no_call(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    monkeypatch.setattr(langgraph_app, "ASK_SECONDS", 0.2)
    connected: list[asyncio.StreamWriter] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        await reader.read()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    wrapped = trainable(desk.graph, model=SELECTED, reward="logged")
    app = deployed(wrapped, url=f"http://127.0.0.1:{port}")
    started = time.monotonic()
    answers = [await said(app, f"t-{number}") for number in range(5)]
    assert answers == [(PAID, PAID)] * 5
    assert len(connected) <= 2 and time.monotonic() - started < 20  # one question of each route
    for writer in connected:
        writer.close()
    server.close()


async def test_a_kill_in_mid_run_loses_no_call_and_the_takeover_goes_on_after_it(tmp_path: Path) -> None:
    async with serving(PaidApi()) as paid_url, scripted_sampler() as sampler:
        flags = ("--inference-only", "--vllm-url", sampler.url, "--name", "writer")
        server = await asyncio.to_thread(RunningServer, tmp_path / "dir", *flags)
        try:
            small = TrainableModel("writer", base_model="tiny")
            wrapped = trainable(graph_of(paid_url), model={small: {"node": "writer"}}, reward="logged")
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
                (await http.post("/api/takeover/start?route=writer", json=HALF)).raise_for_status()
            app = deployed(wrapped, url=server.url)
            before = {f"t-{number}": await said(app, f"t-{number}") for number in range(8)}
            assert {writer for _, writer in before.values()} == {SMALL, PAID}
            asked = iter(range(200))

            async def ask() -> list[tuple[str, str]]:
                return [await said(app, f"busy-{number}") for number in asked]

            async def kill() -> None:
                while next(asked) < 40:  # in the middle of the others' calls
                    await asyncio.sleep(0.01)
                server.kill()

            answers, _ = await asyncio.gather(asyncio.gather(*(ask() for _ in range(8))), kill())
            late = [answer for part in answers for answer in part]
            assert {SMALL, PAID} == {writer for _, writer in late} and late[-1] == (PAID, PAID)
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)
        again = await asyncio.to_thread(RunningServer, tmp_path / "dir", *flags)
        try:
            app = deployed(wrapped, url=again.url)
            for thread, answer in before.items():
                assert await said(app, thread) == answer
        finally:
            await asyncio.to_thread(again.__exit__, None, None, None)


async def test_the_block_of_the_page_deploys_a_graph(desk: Desk) -> None:
    text = (ROOT / "docs" / "gateway.md").read_text("utf-8").replace("http://127.0.0.1:8000", desk.url)
    [block] = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "deployed(" in block]
    page: dict[str, Any] = {"graph": desk.graph}
    await asyncio.to_thread(exec, block, page)  # the page's own lines
    assert await said(page["app"], "t-1") == (PAID, PAID)
    await desk.app(writer=ALL)
    assert await said(page["app"], "t-2") == (PAID, SMALL)


def test_mistakes_are_refused_by_name() -> None:
    own = TrainableModel("a", base_model="tiny", backend=offbook.LocalBackend())
    with pytest.raises(ConfigError, match="OFFBOOK_URL"):
        deployed(trainable(graph_of("http://127.0.0.1:1"), model=own, reward="logged"))
    with pytest.raises(ConfigError, match="what trainable"):
        deployed(graph_of("http://127.0.0.1:1"), url="http://127.0.0.1:1")
