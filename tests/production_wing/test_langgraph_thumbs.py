"""A thumb of an app of LangGraph finds the thread or the run whose calls passed here, as docs/gateway.md shows it."""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.context import collect_runs
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from tests.paths import ROOT

from .conftest import Opening, Passing

ASKED = {"messages": [("user", "Where is box 4821?")]}


def shown(route: Passing) -> list[str]:
    """The Python blocks of the page, for this server."""
    text = (ROOT / "docs" / "gateway.md").read_text("utf-8").replace("/r/order-desk", "/r/desk")
    text = text.replace("http://127.0.0.1:8000", route.url)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def app_of(model: Any) -> Any:
    """A graph whose node calls the model."""

    def answer(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke(state["messages"])]}

    async def answer_async(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", RunnableLambda(answer, answer_async))
    graph.add_edge(START, "answer")
    return graph.compile(checkpointer=InMemorySaver())


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")


async def rewards(route: Passing) -> dict[str, tuple[int, float | None]]:
    """The number of calls and the reward of each thread."""
    return {str(one.record.metadata["thread_id"]): (len(one.calls), one.record.reward) for one in await route.threads()}


async def test_a_late_thumb_for_a_thread_of_a_graph_or_an_agent_becomes_its_reward(passing: Opening) -> None:
    async with passing() as route:
        page: dict[str, Any] = {}
        exec(shown(route)[0], page)  # the page's own lines
        agent: Any = create_agent(page["model"], [], checkpointer=InMemorySaver())
        graph = app_of(page["model"])
        for app, names in ((graph, ("g-1", "g-2")), (agent, ("a-1", "a-2"))):
            for name in names:
                config = {"configurable": {"thread_id": name}}
                await asyncio.to_thread(app.invoke, ASKED, config)
                await app.ainvoke(ASKED, config)
        await route.gateway.traffic.settled()
    async with passing() as route, httpx.AsyncClient() as http:  # after a restart
        for name, score in (("g-1", 1), ("a-2", 0)):
            body = {"thread_id": name, "route": "desk", "score": score}
            assert (await http.post(f"{route.url}/api/feedback", json=body)).status_code == 200
        assert await rewards(route) == {"g-1": (2, 1.0), "g-2": (2, None), "a-1": (2, None), "a-2": (2, 0.0)}


async def test_a_thumb_by_the_run_id_of_a_callback_is_for_that_turn_of_the_thread(passing: Opening) -> None:
    async with passing() as route:
        page: dict[str, Any] = {}
        first, second = shown(route)[:2]
        exec(first, page)  # the page's own lines
        exec(second + first[first.index("model = ") :], page)
        app, ids = app_of(page["model"]), list[str]()
        for _ in range(2):
            with collect_runs() as runs:
                await app.ainvoke(ASKED, page["config_of"]("t-1", str(uuid.uuid4())))
            ids.append(str(runs.traced_runs[-1].id))  # the graph's own run ends last
        await route.gateway.traffic.settled()
        await asyncio.to_thread(page["thumb"], ids[1], 1.0)
        assert await rewards(route) == {ids[0]: (1, None), ids[1]: (1, 1.0)}
