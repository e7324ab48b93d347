"""Which calls are captured: by node, tag, model name, class, agent or function; nested captures; several models."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import SecretStr

from offbook import RemoteBackend, TrainableModel
from offbook.base.errors import CaptureError, ConfigError
from offbook.testing import ScriptedLlm, ScriptedServer, says, scripted_llm
from offbook_langgraph import capture, uncaptured


@pytest.fixture
def own() -> Iterator[ScriptedLlm]:
    """The app's own model."""
    with scripted_llm([says("mine")]) as running:
        yield running


def graph_of(server: ScriptedLlm) -> Any:
    """Three nodes in a row, each with a model of its own name and tag; `write` uses another class."""

    class Writer(ChatOpenAI):
        """A chat model class of the app."""

    def node(model: ChatOpenAI) -> Any:
        return lambda state: {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    made = {"api_key": "unused", "base_url": server.url, "max_retries": 0}
    graph.add_node("plan", node(ChatOpenAI(model="gpt-plan", **made)))
    graph.add_node("write", node(Writer(model="gpt-write", tags=["long"], **made)))
    graph.add_node("check", node(ChatOpenAI(model="o3-check", **made)))
    graph.add_edge(START, "plan").add_edge("plan", "write").add_edge("write", "check")
    return graph.compile()


ASKED = {"messages": [("user", "hi")]}


@pytest.mark.parametrize(
    ("select", "exclude", "expected"),
    [
        (None, None, ["plan", "write", "check"]),
        ({"node": "plan"}, None, ["plan"]),
        ({"node": ["plan", "check"]}, None, ["plan", "check"]),
        ({"model": "gpt-*"}, None, ["plan", "write"]),
        ({"tag": "long"}, None, ["write"]),
        ({"kind": "Writer"}, None, ["write"]),
        ({"kind": "Chat*", "model": "o3*"}, None, ["check"]),
        ([{"node": "plan"}, {"tag": "long"}], None, ["plan", "write"]),
        (lambda origin: origin.node == "check", None, ["check"]),
        (ChatOpenAI, None, ["plan", "write", "check"]),
        (ChatAnthropic, None, []),
        (None, {"node": "write"}, ["plan", "check"]),
        ({"model": "gpt-*"}, {"tag": "long"}, ["plan"]),
    ],
)
def test_calls_are_selected(
    select: Any,
    exclude: Any,
    expected: list[str],
    stand_in: TrainableModel,
    obedient: ScriptedServer,
    own: ScriptedLlm,
) -> None:
    with capture(stand_in, select=select, exclude=exclude, on_leak="ignore") as trajectory:
        graph_of(own).invoke(ASKED)
    assert [call.origin.node for call in obedient.calls(trajectory.id) if call.origin] == expected
    assert len(own.requests) == 3 - len(expected)


def test_different_selections_go_to_different_models_under_one_trajectory(
    stand_in: TrainableModel, obedient: ScriptedServer, own: ScriptedLlm
) -> None:
    writer = TrainableModel(name=f"{stand_in.name}-writer", base_model="tiny", backend=RemoteBackend(obedient.url))
    models: Any = {stand_in: {"node": "plan"}, writer: {"node": "write"}}
    with capture(models, exclude={"node": "check"}) as trajectory:
        graph_of(own).invoke(ASKED)
    assert [call.model for call in obedient.calls(trajectory.id)] == [stand_in.name, writer.name]
    assert [request.body["model"] for request in own.requests] == ["o3-check"]


def test_captures_nest_and_a_call_goes_to_the_innermost_that_selects_it(
    stand_in: TrainableModel, obedient: ScriptedServer, own: ScriptedLlm
) -> None:
    inner_model = TrainableModel(name=f"{stand_in.name}-inner", base_model="tiny", backend=RemoteBackend(obedient.url))
    with capture(stand_in) as outer, capture(inner_model, select={"node": "write"}) as inner:
        graph_of(own).invoke(ASKED)
    assert [call.origin.node for call in obedient.calls(outer.id) if call.origin] == ["plan", "check"]
    assert [call.origin.node for call in obedient.calls(inner.id) if call.origin] == ["write"]
    assert own.requests == []


def test_inside_uncaptured_a_judge_is_its_own_model(
    stand_in: TrainableModel, obedient: ScriptedServer, own: ScriptedLlm
) -> None:
    judge = ChatOpenAI(model="judge", api_key=SecretStr("unused"), base_url=own.url)
    with capture(stand_in) as trajectory:
        assert judge.invoke("hi").text == "heard: hi"
        with uncaptured():
            assert judge.invoke("hi").text == "mine"
        assert judge.invoke("hi").text == "heard: hi"
    assert len(obedient.calls(trajectory.id)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": {"knot": "plan"}}, r"select: there is no key 'knot'; it may name node, tag, model"),
        ({"select": {}}, "select: the mapping is empty"),
        ({"select": []}, "select: the list is empty"),
        ({"select": "plan"}, "select: a function of a call's origin, .* got 'plan'"),
        ({"select": {"node": 3}}, r"select\['node'\]: a text or a list of texts is needed, got 3"),
        ({"select": {"node": ["a", ""]}}, r"select\['node'\]: a text or a list"),
        ({"select": dict}, "select: dict is not a chat model class"),
        ({"exclude": [{"node": "a"}, 3]}, r"exclude\[1\]: a function"),
        ({"scope": "thread"}, "scope: one of context, process is needed, got 'thread'"),
        ({"on_leak": "raise"}, "on_leak: one of error, warn, ignore"),
        ({"shared_state": "yes"}, "shared_state: one of error, allow"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str, stand_in: TrainableModel) -> None:
    with pytest.raises(ConfigError, match=message):
        capture(stand_in, **options)


def test_models_that_are_none_are_refused_by_name(stand_in: TrainableModel) -> None:
    with pytest.raises(ConfigError, match="model: a TrainableModel, or a mapping"):
        capture("agent")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model: the keys must be TrainableModels, got 'agent'"):
        capture({"agent": {"node": "a"}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="select: with several models, each has its own"):
        capture({stand_in: {"node": "a"}}, select={"node": "a"})


def test_a_process_wide_capture_sees_threads_that_ran_before_it(
    stand_in: TrainableModel, obedient: ScriptedServer, own: ScriptedLlm
) -> None:
    model = ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url=own.url)
    asked: queue.Queue[str | None] = queue.Queue()
    answers: queue.Queue[str] = queue.Queue()

    def work() -> None:
        while (text := asked.get()) is not None:
            answers.put(model.invoke(text).text)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    with capture(stand_in):
        asked.put("hi")
        assert answers.get(timeout=30) == "mine"
    with capture(stand_in, scope="process", on_leak="ignore") as trajectory:  # the server is in this process
        asked.put("hi")
        assert answers.get(timeout=30) == "heard: hi"
    asked.put(None)
    thread.join(30)
    assert len(obedient.calls(trajectory.id)) == 1


def test_a_second_process_wide_capture_is_refused(stand_in: TrainableModel) -> None:
    with capture(stand_in, scope="process"), pytest.raises(CaptureError, match="another such capture is active"):
        capture(stand_in, scope="process").__enter__()
