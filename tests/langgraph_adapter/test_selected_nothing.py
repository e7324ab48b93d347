"""Selections that take no call, and calls that no selection takes: they would go to the app's own model, which costs money."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from rich.console import Console

from offbook import LocalBackend, TrainableModel, TrainConfig
from offbook.base.errors import CaptureError, RolloutError
from offbook.base.types import new_id
from offbook.testing import ScriptedLlm, says, scripted_llm
from offbook.trainer.progress import PlainProgress
from offbook_langgraph import capture, trainable
from tests.langgraph_adapter.kinds.apps import own_model

SCENARIOS = [{"id": "a", "question": "hi"}, {"id": "b", "question": "ho"}]
SMALL: dict[str, Any] = {"group_size": 2, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=1e-3)}


@pytest.fixture
def own() -> Iterator[ScriptedLlm]:
    """The app's own models."""
    with scripted_llm([says("mine")]) as running:
        yield running


def desk(own: ScriptedLlm) -> Any:
    """A planner, then a writer, each with a model of its own name."""

    def node(name: str) -> Any:
        model: ChatOpenAI = own_model(model=f"gpt-{name}", base_url=own.url, max_tokens=8)
        return lambda state: {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("plan", node("plan")).add_node("write", node("write"))
    return graph.add_edge(START, "plan").add_edge("plan", "write").compile(name="desk")


def reward(scenario: Any, state: Any) -> float:
    """Differs from rollout to rollout."""
    return zlib.crc32(str(state["messages"][-1].id).encode()) % 97 / 97


PLANNED = "agent 'desk', node 'plan', model 'gpt-plan', kind 'ChatOpenAI'"
WRITTEN = "agent 'desk', node 'write', model 'gpt-write', kind 'ChatOpenAI'"


@pytest.mark.parametrize("way", ["train", "evaluate"])
def test_a_selection_that_takes_nothing_ends_the_run_with_the_origins(
    way: str, model: TrainableModel, own: ScriptedLlm
) -> None:
    app = trainable(desk(own), model=model, reward=reward, select={"agent": "planner"})
    with pytest.raises(RolloutError, match="select=, exclude=: no call went to the policy") as refused:
        app.train(SCENARIOS, steps=1, **SMALL) if way == "train" else app.evaluate(SCENARIOS)
    count = 4 if way == "train" else 2
    assert f"  {count} x {PLANNED} -> the app's own model" in str(refused.value)
    assert f"  {count} x {WRITTEN} -> the app's own model" in str(refused.value)


def test_a_call_that_none_of_several_models_takes_is_not_made(
    model: TrainableModel, local_backend: LocalBackend, own: ScriptedLlm
) -> None:
    other = TrainableModel(name=new_id("other"), base_model="tiny", backend=local_backend)
    models: Any = {model: {"node": "plan"}, other: {"node": "wirte"}}
    with pytest.raises(CaptureError, match="no selection takes the call") as refused, capture(models):
        desk(own).invoke({"messages": [("user", "hi")]})
    assert "add it to exclude=" in str(refused.value)
    assert f"  1 x {PLANNED} -> {model.name}" in str(refused.value)
    assert f"  1 x {WRITTEN} -> the app's own model" in str(refused.value)
    with pytest.raises(CaptureError, match="no selection takes the call"):
        trainable(desk(own), model=models, reward=reward).evaluate(SCENARIOS)
    assert own.requests == []
    with capture(models, exclude={"node": "write"}):
        desk(own).invoke({"messages": [("user", "hi")]})
    assert [request.body["model"] for request in own.requests] == ["gpt-write"]


def test_one_of_several_selections_that_takes_nothing_ends_the_first_iteration(
    model: TrainableModel, local_backend: LocalBackend, own: ScriptedLlm
) -> None:
    other = TrainableModel(name=new_id("other"), base_model="tiny", backend=local_backend)
    app = trainable(desk(own), model={model: {"agent": "desk"}, other: {"node": "write"}}, reward=reward)
    with pytest.raises(RolloutError, match=f"the selection of {other.name} took no call") as refused:
        app.train(SCENARIOS, steps=1, **SMALL)
    assert f"  4 x {WRITTEN} -> {model.name}" in str(refused.value)


def test_a_function_that_never_runs_the_app_is_told_so(model: TrainableModel) -> None:
    @trainable(model=model)
    async def agent(scenario: dict[str, str]) -> float:
        return 0.5

    with pytest.raises(RolloutError, match="no rollout of the first iteration called a LangChain chat model"):
        agent.train(SCENARIOS, steps=1, **SMALL)


def test_the_first_iteration_says_what_went_to_the_apps_own_model(model: TrainableModel, own: ScriptedLlm) -> None:
    out = io.StringIO()
    app = trainable(desk(own), model=model, reward=reward, select={"node": "plan"})
    app.train(SCENARIOS, steps=2, progress=PlainProgress(Console(file=out, width=200), 2), **SMALL)
    said = out.getvalue()
    assert said.count("4 calls that select= does not take went to the app's own model:") == 1
    assert f"  4 x {WRITTEN}\n" in said
