"""What is said of rollouts that fail, and how a tool that raises becomes a low reward."""

from __future__ import annotations

import asyncio
import io
import itertools
import linecache
import re
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolErrorMiddleware
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, InjectedStore, ToolNode, ToolRuntime, tools_condition
from langgraph.store.memory import InMemoryStore
from rich.console import Console

from offbook import TrainableModel, TrainConfig
from offbook.base.errors import RolloutError, TrainError
from offbook.trainer.progress import PlainProgress
from offbook_langgraph import capture, trainable
from tests.langgraph_adapter.kinds.apps import asked, last, own_model

HERE = __file__.rpartition("/")[2]
SIZES = {"teal": 7}
SMALL: dict[str, Any] = {"group_size": 2, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=1e-3)}
TEAL, PINK, GREY = ({"id": name, "question": f"size(city='{name}')"} for name in ("teal", "pink", "grey"))


@tool
def size(city: str) -> int:
    """The size of a city."""
    return SIZES[city]


def told(scenario: Any, state: Any) -> float:
    return float("the tools said" in last(state))


def output() -> tuple[PlainProgress, io.StringIO]:
    out = io.StringIO()
    return PlainProgress(Console(file=out, width=4000), 1), out


def place_in(text: str) -> str:
    """The source of the first line of this file that is named as `file:line`."""
    number = re.search(rf"{re.escape(HERE)}:(\d+)", text)
    assert number is not None, text
    return linecache.getline(__file__, int(number[1])).strip()


def test_an_evaluation_names_each_cause_once_with_the_apps_own_line(stand_in: TrainableModel) -> None:
    app = trainable(create_agent(own_model(), [size]), model=stand_in, reward=told)
    result = app.evaluate([TEAL, PINK, GREY])
    [kind] = result.failures
    assert (result.failed, kind.count, kind.type, kind.message) == (2, 2, "KeyError", "…")
    assert place_in(kind.place) == "return SIZES[city]"
    *_, source, marks, error, task, hint = kind.traceback.splitlines()
    assert (source.strip(), set(marks.strip())) == ("return SIZES[city]", {"~", "^"})
    assert error in ("KeyError: 'pink'", "KeyError: 'grey'")
    assert task.startswith("During task with name 'tools'")
    assert "site-packages" not in kind.traceback
    assert hint.startswith(f"The tool 'size' raised on the policy's arguments {{'city': {error[10:]}}}")


def test_a_step_the_report_and_its_last_line_say_why_rollouts_failed(model: TrainableModel) -> None:
    """The policy is real here; every third rollout meets a node that fails."""
    turns = itertools.count()

    def node(state: MessagesState) -> Any:
        turn = next(turns)
        if turn % 3 == 0:
            raise ValueError(f"no desk is free, ticket {turn}")
        return {"messages": [own_model(max_tokens=8).invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile()
    progress, out = output()
    rewards = itertools.count()
    agent = trainable(graph, model=model, reward=lambda scenario, state: float(next(rewards)))
    options = {**SMALL, "group_size": 4}
    report = agent.train([TEAL, PINK], steps=1, progress=progress, **options)
    assert report.iterations[0].failed == 3
    [kind] = report.failures
    assert (kind.count, kind.type, kind.message) == (3, "ValueError", "no desk is free, ticket …")
    note = f"3 rollouts failed: 3 x ValueError: no desk is free, ticket … at {kind.place}"
    _, *said, closing = out.getvalue().splitlines()
    step, *traceback = [line for line in said if not line.endswith(" ...")]
    assert step.startswith("step 1/1") and note in step
    assert traceback[0].startswith("why rollouts failed: 3 x ValueError")
    assert any(re.fullmatch(r"ValueError: no desk is free, ticket \d", line) for line in traceback)
    assert note in closing and note.partition(": ")[2] in repr(report)
    assert place_in(step) == 'raise ValueError(f"no desk is free, ticket {turn}")'


@pytest.mark.parametrize(("failing", "error"), [(3, TrainError), (4, RolloutError)])
def test_the_error_of_a_step_that_cannot_be_trained_has_cause_and_traceback(
    model: TrainableModel, failing: int, error: type[Exception]
) -> None:
    turns = itertools.count()

    def node(state: MessagesState) -> Any:
        if next(turns) < failing:
            raise ValueError("no desk is free")
        return {"messages": [own_model(max_tokens=8).invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile()
    agent = trainable(graph, model=model, reward=lambda scenario, state: 1.0)
    options = {**SMALL, "group_size": 4, "concurrency": 1}
    with pytest.raises(error) as refused:
        agent.train([TEAL], steps=1, progress=output()[0], **options)
    text = str(refused.value)
    assert f"{failing} x ValueError: no desk is free at {HERE}:" in text
    assert place_in(text) == 'raise ValueError("no desk is free")'
    assert f'File "{__file__}"' in text and "site-packages" not in text
    assert text.count("Traceback (most recent call last)") == 1


def test_a_tool_that_raises_says_how_to_make_that_a_low_reward_in_a_capture_by_hand(stand_in: TrainableModel) -> None:
    app = create_agent(own_model(), [size])
    with pytest.raises(KeyError) as raised, capture(stand_in), capture(stand_in):
        app.invoke(asked(PINK["question"]))
    [hint] = [note for note in raised.value.__notes__ if "policy" in note]
    assert "ToolErrorMiddleware" in hint and "handle_tool_errors=True" in hint and "except KeyError: return 0.0" in hint

    with pytest.raises(ValueError, match="no tool") as raised_elsewhere, capture(stand_in):
        raise ValueError("no tool")
    assert not hasattr(raised_elsewhere.value, "__notes__")


@tool
def injected(
    city: str, state: Annotated[Any, InjectedState], store: Annotated[Any, InjectedStore], runtime: ToolRuntime
) -> int:
    """The size of a city, for a tool that also reads what LangGraph injects."""
    return SIZES[city]


async def test_what_langgraph_injects_is_not_shown_as_the_policys_arguments(stand_in: TrainableModel) -> None:
    app = create_agent(own_model(), [injected], store=InMemoryStore())
    for ask in (
        lambda: app.invoke(asked("injected(city='pink')")),
        lambda: asyncio.run(app.ainvoke(asked("injected(city='pink')"))),
    ):
        with pytest.raises(KeyError) as raised, capture(stand_in):
            await asyncio.to_thread(ask)
        [hint] = [note for note in raised.value.__notes__ if "policy" in note]
        assert hint.startswith("The tool 'injected' raised on the policy's arguments {'city': 'pink'}. ")
        assert "HumanMessage" not in hint


def with_middleware() -> Any:
    return create_agent(own_model(), [size], middleware=[ToolErrorMiddleware(lambda error, request: repr(error))])


def with_a_tool_node() -> Any:
    model = own_model().bind_tools([size])

    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([size], handle_tool_errors=True))
    graph.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    return graph.compile()


@pytest.mark.parametrize("make", [with_middleware, with_a_tool_node])
def test_a_model_that_is_shown_the_error_earns_what_its_rollout_is_worth(make: Any, stand_in: TrainableModel) -> None:
    app = trainable(
        make(), model=stand_in, reward=lambda scenario, state: float("KeyError" not in str(state["messages"]))
    )
    result = app.evaluate([TEAL, PINK])
    assert (result.reward, result.failed, result.failures) == (0.5, 0, ())


def test_a_function_that_catches_the_error_gives_the_low_reward_itself(stand_in: TrainableModel) -> None:
    app = create_agent(own_model(), [size])

    @trainable(model=stand_in)
    async def agent(scenario: Any) -> float:
        try:
            return told(scenario, await app.ainvoke(asked(scenario["question"])))
        except KeyError:
            return 0.0

    result = agent.evaluate([TEAL, PINK])
    assert (result.reward, result.failed) == (0.5, 0)
