"""A deployed app of LangGraph: small models take over its nodes by evidence, and its own models answer whatever fails."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
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
from offbook import TakeoverPlan, TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.takeovers import TakeoverState
from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.server.services import Services
from offbook.server.upstream.app_routes import AppRoutes
from offbook.server.upstream.traffic import RecordingPolicy
from offbook.testing import ScriptedCompletion, ScriptedSampler, scripted_sampler
from offbook.testing.asgi import serving
from offbook.testing.server import services_over
from offbook_langgraph import trainable
from offbook_langgraph.calls import takeover_sides
from tests.fakes.paid_api import PaidApi
from tests.paths import ROOT
from tests.server.servers import RunningServer

SMALL, PAID = "Hello", "It is on its way."
PLAN: dict[str, Any] = {"stages": (0.5, 1), "margin": 0.4}
ALL = TakeoverPlan(stages=(0.999, 1))
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
    """A graph before a server; `deployed` makes the app."""

    url: str
    paid: PaidApi
    paid_url: str
    sampler: ScriptedSampler
    services: Services
    http: httpx.AsyncClient
    graph: Any

    def deployed(self, policy: Any = None, **options: Any) -> Any:
        named = {"prices": {"gpt-4.1": (2.0, 8.0)}} | options
        return trainable(self.graph, model=SELECTED, reward="logged").deployed(policy, url=self.url, **named)

    async def state(self, route: str) -> TakeoverState:
        answer = await self.http.get("/api/takeover", params={"route": route})
        assert answer.status_code == 200, answer.text
        return TakeoverState.model_validate_json(answer.content)

    async def score(self, thread: str, value: float, route: str) -> None:
        body = {"thread_id": thread, "route": route, "score": value}
        answer = await self.http.post("/api/feedback", json=body)
        assert answer.status_code in (200, 404), answer.text  # 404: its takeover has ended, and nothing is recorded

    async def counted(self, deployed: Any) -> dict[str, dict[str, Any]]:
        """What the server counted of each route, when all reports are read."""
        assert await asyncio.to_thread(deployed._serving._sides.reports.flush, 10)
        for route in self.services.app_routes:
            await route.traffic.settled()
        return {state["name"]: state for state in (await self.http.get("/api/routes")).json()}


async def said(deployed: Any, thread: str) -> tuple[str, str]:
    """What the two nodes answered to a new question of a thread."""
    asked = {"messages": [("user", "Where is box 4821?")]}
    state = await deployed.ainvoke(asked, {"configurable": {"thread_id": thread}})
    router, writer = state["messages"][-2:]
    return router.text, writer.text


@asynccontextmanager
async def opened(folder: Path, share: float = 0.0) -> AsyncIterator[Desk]:
    paid = PaidApi()
    async with (
        serving(paid) as paid_url,
        scripted_sampler() as sampler,
        services_over(sampler.url, folder) as services,
    ):
        routes = AppRoutes(RecordingPolicy(share), services.store, services.recorder.sampled)
        await routes.open(None)
        own = replace(services, app_routes=routes)
        async with serving(app.build(own, Guard(None))) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
            for name in NODES:
                body = {"name": name, "project": "desk", "base_model": "tiny"}
                assert (await http.post("/api/models", json=body)).status_code in (200, 201)
            try:
                yield Desk(url, paid, paid_url, sampler, own, http, graph_of(paid_url))
            finally:
                await routes.close()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with opened(tmp_path) as desk:
        yield desk


async def test_each_node_has_a_takeover_of_its_own_and_each_thread_stays_on_its_side(desk: Desk) -> None:
    app = desk.deployed({"router": ALL, "writer": TakeoverPlan(**PLAN)})
    answers = {f"t-{number}": await said(app, f"t-{number}") for number in range(12)}
    assert {router for router, _ in answers.values()} == {SMALL}
    assert {writer for _, writer in answers.values()} == {SMALL, PAID}
    for thread, answer in answers.items():
        assert await said(app, thread) == answer
    router, writer = await desk.state("router"), await desk.state("writer")
    assert (router.model, writer.model, router.id != writer.id) == ("router@0", "writer@0", True)
    assert (router.numbers.calls, router.numbers.failed) == (24, {})
    small = sum(answer == SMALL for _, answer in answers.values())
    assert writer.numbers.calls == 2 * small
    counts = await desk.counted(app)
    assert counts["router"]["calls"] == 0 and counts["writer"]["calls"] == 2 * (12 - small)
    assert counts["writer"]["upstream"] is None and counts["writer"]["failed"] == 0
    assert counts["writer"]["cost"] == pytest.approx(116e-6 * 2 * (12 - small))  # 30 tokens at 2, 7 at 8


async def test_a_model_class_of_the_apps_own_runs_on_both_sides(desk: Desk) -> None:
    desk.graph = graph_of(desk.paid_url, lambda model: Loud(inner=model))
    app = desk.deployed({"router": ALL})
    assert await said(app, "t-1") == (SMALL.upper(), PAID.upper())
    assert (await desk.counted(app))["writer"]["calls"] == 1


async def test_a_model_that_is_as_good_takes_over_and_one_that_is_worse_is_left(desk: Desk) -> None:
    app = desk.deployed(TakeoverPlan(**PLAN))
    states: dict[str, TakeoverState] = {}
    for number in range(400):
        thread = f"t-{number}"
        for route, answer in zip(NODES, await said(app, thread), strict=True):
            await desk.score(thread, 1.0 if route == "router" else float(answer == PAID), route)
        states = {route: await desk.state(route) for route in NODES}
        if all(state.status not in ("running", "none") for state in states.values()):
            break
    router, writer = states["router"], states["writer"]
    assert [decision.verdict for decision in router.decisions] == ["started", "passed", "started", "taken_over"]
    assert writer.decisions[-1].verdict == "left" and writer.decisions[-1].reason == "worse by more than 0.4"
    assert await said(app, "new") == (SMALL, PAID)
    page = await desk.http.get("/takeovers/writer")
    assert page.status_code == 200 and "worse by more than 0.4" in page.text
    again = await desk.http.post("/api/takeover/start?route=writer", json={"stages": [0.999, 1]})
    assert again.status_code == 200 and (await said(app, "newer")) == (SMALL, SMALL)


async def test_in_shadow_the_reported_answers_are_compared(desk: Desk) -> None:
    desk.paid.text = SMALL
    app = desk.deployed({"writer": TakeoverPlan(stages=(0, 0.5, 1), threads=300)})
    for number in range(400):
        assert await said(app, f"t-{number}") == (SMALL, SMALL)
        await desk.counted(app)
        if (now := await desk.state("writer")).stage == 1 or now.status != "running":
            break
    shadow = now.decisions[1]
    assert (shadow.share, shadow.verdict, shadow.numbers.score) == (0.0, "passed", 1.0)


async def test_recorded_threads_have_the_calls_of_both_sides_and_nothing_else_is_stored(tmp_path: Path) -> None:
    async with opened(tmp_path, share=1.0) as desk:
        app = desk.deployed({"router": ALL})
        await said(app, "t-1")
        await desk.counted(app)
        for route, model in (("router", "router@0"), ("writer", "openai/gpt-4.1")):
            [trace] = (await desk.http.get("/api/traces", params={"run": f"route/{route}"})).json()["rollouts"]
            assert trace["record"]["metadata"]["thread_id"] == "t-1"
            assert [call["model"] for call in trace["calls"]] == [model]
            assert trace["calls"][0]["messages"][0]["content"] == "Where is box 4821?"
    (tmp_path / "none").mkdir()
    async with opened(tmp_path / "none") as desk:
        app = desk.deployed({"router": ALL})
        await said(app, "t-1")
        await desk.counted(app)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "none").rglob("*") if path.is_file())
    assert b"box 4821" not in stored


async def test_whatever_fails_on_the_small_side_the_own_model_answers_and_the_guard_leaves(desk: Desk) -> None:
    app = desk.deployed({"writer": ALL})
    broken = ScriptedCompletion(status=500, error={"error": {"message": "out of memory"}})
    desk.sampler.completions.extend([broken, ScriptedCompletion(dies_after=1)] * 40)
    for number in range(60):
        assert await said(app, f"t-{number}") == (PAID, PAID)
        if (now := await desk.state("writer")).status != "running":
            break
    assert now.decisions[-1].reason == "guard: failed calls: more than 5%"
    counts = await desk.counted(app)
    assert counts["writer"]["calls"] == number + 1


async def test_streams_of_both_sides_and_sync_calls_arrive_whole(desk: Desk) -> None:
    app = desk.deployed({"router": ALL})
    asked, config = {"messages": [("user", "Where is box 4821?")]}, {"configurable": {"thread_id": "t-1"}}
    pieces: dict[str, str] = {}
    async for piece, facts in app.astream(asked, config, stream_mode="messages"):
        pieces[facts["langgraph_node"]] = pieces.get(facts["langgraph_node"], "") + piece.text
    assert pieces == {"router": SMALL, "writer": PAID}
    state = await asyncio.to_thread(app.invoke, asked, config)
    assert [message.text for message in state["messages"][-2:]] == [SMALL, PAID]
    counts = await desk.counted(app)
    assert (counts["writer"]["calls"], counts["writer"]["uncounted"]) == (2, 1)  # the stream did not say its tokens


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
    for plan, text in ((None, PAID), (ALL, SMALL)):
        app = wrapped.deployed(plan, url=desk.url)
        state = await app.ainvoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "t-1"}})
        assert state["messages"][-1].text == f"{text}|{text}"
        assert (await desk.counted(app))["writer"]["calls"] == 2


async def test_a_call_that_the_small_model_cannot_take_is_the_own_models(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    app = desk.deployed(ALL)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    state = await app.ainvoke({"messages": [("user", [image])]}, {"configurable": {"thread_id": "t-1"}})
    assert state["messages"][-1].text == PAID
    assert "the small model cannot take a call" in caplog.text


async def test_what_the_server_refuses_is_logged_with_its_reason(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    app = desk.deployed({"writer": TakeoverPlan(model="nobody", stages=(0.5, 1))})
    assert await said(app, "t-1") == (PAID, PAID)
    assert "404" in caplog.text and "nobody" in caplog.text


async def test_a_server_that_hangs_costs_one_wait_and_no_call(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    monkeypatch.setattr(takeover_sides, "ASK_SECONDS", 0.2)
    connected: list[asyncio.StreamWriter] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        await reader.read()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    wrapped = trainable(desk.graph, model=SELECTED, reward="logged")
    app = wrapped.deployed(ALL, url=f"http://127.0.0.1:{port}")
    started = time.monotonic()
    answers = [await said(app, f"t-{number}") for number in range(5)]
    assert answers == [(PAID, PAID)] * 5
    assert len(connected) <= 2 and time.monotonic() - started < 20  # one question, one report
    for writer in connected:
        writer.close()
    server.close()


async def test_a_call_that_json_cannot_hold_is_lost_alone(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    app = desk.deployed()
    reports = app._serving._sides.reports
    call = takeover_sides.AskedCall(
        "writer", "t-1", {"messages": [{"role": "user", "content": "half a pair: \ud83d"}]}, "paid", None
    )
    for _ in range(3):
        reports.add("writer", call.answered(None))
        await said(app, "t-1")
    assert (await desk.counted(app))["writer"]["calls"] == 3
    assert reports.lost == 3 and "surrogates" in caplog.text


async def test_numbers_beyond_64_bits_are_told_and_asked_about(desk: Desk) -> None:
    call = {"messages": [{"role": "user", "content": "hi"}], "metadata": {"n": 2**70}}
    told = {"request": call, "answer": {"n": 2**70}, "model": "paid", "started_at": 1, "ended_at": 2}
    answer = await desk.http.post("/api/routes/writer/calls", json={"calls": [told]})
    assert (answer.status_code, answer.json()) == (200, 1), answer.text
    answer = await desk.http.post("/api/routes/writer/side", json={"request": call, "thread_id": "t"})
    assert answer.status_code == 200, answer.text
    [route] = [route for route in desk.services.app_routes if route.traffic.name == "writer"]
    await route.traffic.settled()
    [state] = [state for state in (await desk.http.get("/api/routes")).json() if state["name"] == "writer"]
    assert state["calls"] == 1


async def test_a_kill_in_mid_run_loses_no_call_and_the_takeover_goes_on_after_it(tmp_path: Path) -> None:
    async with serving(PaidApi()) as paid_url, scripted_sampler() as sampler:
        flags = ("--inference-only", "--vllm-url", sampler.url, "--name", "writer")
        server = await asyncio.to_thread(RunningServer, tmp_path / "dir", *flags)
        try:
            small = TrainableModel("writer", base_model="tiny")
            wrapped = trainable(graph_of(paid_url), model={small: {"node": "writer"}}, reward="logged")
            app = wrapped.deployed(TakeoverPlan(**PLAN), url=server.url)
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
            app = wrapped.deployed(TakeoverPlan(**PLAN), url=again.url)
            for thread, answer in before.items():
                assert await said(app, thread) == answer
        finally:
            await asyncio.to_thread(again.__exit__, None, None, None)


async def test_the_block_of_the_page_deploys_a_graph(desk: Desk) -> None:
    text = (ROOT / "docs" / "gateway.md").read_text("utf-8").replace("http://127.0.0.1:8000", desk.url)
    [block] = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if ".deployed(" in block]
    page: dict[str, Any] = {"graph": desk.graph}
    await asyncio.to_thread(exec, block, page)  # the page's own lines
    assert await said(page["app"], "t-1") == (PAID, PAID)
    for route in NODES:
        state = await desk.state(route)
        assert (state.status, state.share, state.plan.margin) == ("running", 0.0, 0.1)
    counts = await desk.counted(page["app"])
    assert counts["writer"]["calls"] == 2 and counts["writer"]["cost"] == pytest.approx(2 * 116e-6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": {"nobody": ALL}}, "there is no model 'nobody' here"),
        ({"policy": 0.1}, "an offbook.TakeoverPlan is needed"),
        ({"model": TrainableModel("n" * 60, base_model="tiny")}, "at most 55 characters"),
        ({"url": None, "model": TrainableModel("a", base_model="tiny", backend=offbook.LocalBackend())}, "OFFBOOK_URL"),
    ],
)
def test_mistakes_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    wrapped = trainable(graph_of("http://127.0.0.1:1"), model=SELECTED, reward="logged")
    with pytest.raises(ConfigError, match=told):
        wrapped.deployed(**({"url": "http://127.0.0.1:1"} | options))
