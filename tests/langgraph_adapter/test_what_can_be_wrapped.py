"""Everything that `trainable` takes: functions, methods, objects, graphs, factories, entrypoints; and what it refuses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, get_type_hints

import pytest
from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt
from pydantic import BaseModel, SecretStr

import offbook
from offbook import TrainableModel, TrajectoryGroup
from offbook.base.errors import ConfigError, RolloutError
from offbook_langgraph import capture, trainable

OWN = {"model": "own", "api_key": "unused", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0}
SCENARIOS = [{"id": "a", "question": "hi"}]


def chat(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**OWN, **options)


def chat_graph(**options: Any) -> Any:
    model = chat()
    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "agent")
    return graph.compile(**options)


def heard(scenario: Any, output: Any) -> float:
    """1 when the policy answered."""
    text = output["messages"][-1].text if isinstance(output, dict) else getattr(output, "text", output)
    return float(text == "heard: hi")


# ---- functions


def test_a_bare_decorator_takes_its_model_when_it_is_trained(stand_in: TrainableModel) -> None:
    @trainable
    async def agent(scenario: dict[str, str]) -> float:
        """Answers."""
        return heard(scenario, await chat().ainvoke(scenario["question"]))

    assert agent.evaluate(SCENARIOS, model=stand_in).reward == 1.0
    assert agent.trained(model=stand_in) is not None
    for use in (agent.evaluate, agent.train):
        with pytest.raises(ConfigError, match=r"model: no model to train: pass trainable\(model="):
            use(SCENARIOS)


def test_name_doc_and_hints_survive_and_an_async_function_stays_one(stand_in: TrainableModel) -> None:
    @trainable(model=stand_in)
    async def agent(scenario: dict[str, str]) -> float:
        """Answers."""
        return 1.0

    assert (agent.__name__, agent.__doc__) == ("agent", "Answers.")  # type: ignore[attr-defined]
    assert get_type_hints(agent) == {"scenario": dict[str, str], "return": float}
    assert str(inspect.signature(agent)).startswith("(scenario")
    assert inspect.iscoroutinefunction(agent.__call__)
    graph: Any = StateGraph(dict)  # type: ignore[type-var]  # any mapping does
    graph.add_node("agent", agent)  # LangGraph asks whether it is async


def test_a_callable_object_and_a_static_method(stand_in: TrainableModel) -> None:
    class Agent:
        async def __call__(self, scenario: dict[str, str]) -> float:
            return heard(scenario, await chat().ainvoke(scenario["question"]))

        @staticmethod
        def answer(scenario: dict[str, str]) -> float:
            return heard(scenario, chat().invoke(scenario["question"]))

    assert trainable(Agent(), model=stand_in).evaluate(SCENARIOS).reward == 1.0
    assert trainable(Agent.answer, model=stand_in).evaluate(SCENARIOS).reward == 1.0


@dataclasses.dataclass
class Task:
    question: str


class Case(BaseModel):
    question: str
    id: str = "case-1"


@pytest.mark.parametrize("scenario", [{"question": "hi"}, Task("hi"), Case(question="hi"), "hi"])
def test_a_scenario_is_handed_over_unchanged_and_asked_of_a_graph(scenario: Any, stand_in: TrainableModel) -> None:
    got: list[Any] = []

    @trainable(model=stand_in)
    def agent(given: Any) -> float:
        got.append(given)
        return 1.0

    agent.evaluate([scenario])
    assert got[0] is scenario
    assert trainable(chat_graph(), model=stand_in, reward=heard).evaluate([scenario]).reward == 1.0


def test_a_scenario_without_text_lists_its_keys(stand_in: TrainableModel) -> None:
    with pytest.raises(RolloutError, match=r"no text under input, question, prompt; its keys are id, text"):
        trainable(chat_graph(), model=stand_in, reward=heard).evaluate([{"id": "a", "text": "hi"}])


# ---- rewards


@pytest.mark.parametrize(
    ("returned", "expected"),
    [(0.5, 0.5), (True, 1.0), ({"reward": 0.5, "found": 1}, 0.5), (offbook.RewardResult(0.25, {"found": 1.0}), 0.25)],
)
def test_a_function_returns_its_reward(returned: object, expected: float, stand_in: TrainableModel) -> None:
    @trainable(model=stand_in)
    def agent(scenario: Any) -> object:
        return returned

    assert agent.evaluate(SCENARIOS).reward == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_a_reward_that_is_logged_in_a_node_belongs_to_the_call_before_it(
    streaming: bool, stand_in: TrainableModel
) -> None:
    def ask(state: Any) -> Any:
        model = chat(streaming=streaming)
        return {"messages": [model.invoke(state["messages"])]}

    def check(state: Any) -> None:
        offbook.log_reward(0.1 * len(state["messages"]))

    graph = StateGraph(MessagesState)
    for number in range(2):
        graph.add_node(f"ask{number}", ask)
        graph.add_node(f"check{number}", check)
    graph.add_edge(START, "ask0")
    for before, after in (("ask0", "check0"), ("check0", "ask1"), ("ask1", "check1")):
        graph.add_edge(before, after)
    with capture(stand_in) as trajectory:
        final = graph.compile().invoke({"messages": [("user", "hi")]})  # type: ignore[arg-type]
    calls = [message.response_metadata["offbook"]["call_id"] for message in final["messages"][1:]]
    assert trajectory.call_rewards == dict(zip(calls, (pytest.approx(0.2), pytest.approx(0.3)), strict=True))


def test_a_reward_can_be_logged_from_inside_and_is_added_to_what_is_returned(stand_in: TrainableModel) -> None:
    def node(state: Any) -> Any:
        offbook.log_reward(0.3, key="format")
        offbook.log_reward(0.1, key="format")
        offbook.log_metric("turns", 1)
        return {"messages": [chat().invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    found = trainable(graph.compile(), model=stand_in, reward=heard).evaluate(SCENARIOS)
    assert found.reward == pytest.approx(1.4)
    assert (found.metrics["reward/format"], found.metrics["turns"]) == (pytest.approx(0.4), 1)
    assert trainable(graph.compile(), model=stand_in, reward="logged").evaluate(SCENARIOS).reward == pytest.approx(0.4)


def test_logging_outside_of_a_rollout_does_nothing_and_refuses_what_is_no_number() -> None:
    offbook.log_reward(1.0)
    offbook.log_metric("turns", 2)
    with pytest.raises(ConfigError, match=r"log_reward\('format'\): a finite number is needed, got nan"):
        offbook.log_reward(float("nan"), key="format")
    with pytest.raises(ConfigError, match=r"log_metric\('turns'\): a number is needed, got 'many'"):
        offbook.log_metric("turns", "many")  # type: ignore[arg-type]


def test_a_rollout_without_any_reward_says_all_ways_to_give_one(stand_in: TrainableModel) -> None:
    @trainable(model=stand_in)
    def agent(scenario: Any):
        chat().invoke("hi")

    with pytest.raises(
        RolloutError, match=r"returned NoneType None, and there is no reward: return .*judge=.*log_reward"
    ):
        agent.evaluate(SCENARIOS)
    with pytest.raises(RolloutError, match='reward="logged", but the agent did not call'):
        trainable(chat_graph(), model=stand_in, reward="logged").evaluate(SCENARIOS)


def test_a_graph_without_a_reward_is_refused_before_the_first_rollout(stand_in: TrainableModel) -> None:
    for target in (trainable(chat_graph(), model=stand_in), trainable(lambda: chat_graph(), model=stand_in)):
        with pytest.raises(ConfigError, match="judge="):
            target.evaluate(SCENARIOS)


def test_a_judge_of_the_decorator_scores_what_the_function_returned(stand_in: TrainableModel) -> None:
    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        for trajectory in group:
            trajectory.reward = float(len(trajectory.messages_and_choices))
        return group

    @trainable(model=stand_in, judge=judge)
    async def agent(scenario: dict[str, str]) -> Any:
        return await chat_graph().ainvoke({"messages": [("user", scenario["question"])]})

    assert agent.evaluate(SCENARIOS).reward == 2.0
    assert trainable(chat_graph(), model=stand_in, judge=judge).evaluate(SCENARIOS).reward == 2.0


def test_a_reward_function_that_asks_an_llm_asks_its_own(stand_in: TrainableModel) -> None:
    from offbook.testing import says, scripted_llm

    with scripted_llm([says("0.75")]) as judge:
        model = ChatOpenAI(model="judge", api_key=SecretStr("unused"), base_url=judge.url)

        async def reward(scenario: Any, output: Any) -> float:
            return float((await model.ainvoke("score it")).text)

        assert trainable(chat_graph(), model=stand_in, reward=reward).evaluate(SCENARIOS).reward == 0.75


# ---- graphs


def test_an_entrypoint_is_a_function_that_takes_the_scenario(stand_in: TrainableModel) -> None:
    @task
    def ask(text: str) -> str:
        return chat().invoke(text).text

    @trainable(model=stand_in)  # type: ignore[arg-type]  # an @entrypoint is a graph that is called as a function
    @entrypoint()
    def agent(scenario: dict[str, str]) -> float:
        return heard(scenario, ask(scenario["question"]).result())

    assert isinstance(agent, Pregel)
    assert agent.evaluate(SCENARIOS).reward == 1.0


def test_a_wrapped_graph_is_a_node_of_a_larger_one(stand_in: TrainableModel) -> None:
    inner = trainable(chat_graph(), model=stand_in, reward=heard)
    graph = StateGraph(MessagesState)
    graph.add_node("inner", inner)
    graph.add_edge(START, "inner")
    outer = graph.compile()
    assert "inner" in dict(outer.get_subgraphs())
    assert trainable(outer, model=stand_in, reward=heard).evaluate(SCENARIOS).reward == 1.0


def test_factories_make_a_graph_for_each_rollout(stand_in: TrainableModel) -> None:
    made: list[str] = []

    def plain() -> Any:
        made.append("plain")
        return chat_graph()

    async def configured(config: RunnableConfig) -> Any:
        made.append(config.get("configurable", {})["thread_id"])
        return chat_graph()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        made.append("opened")
        yield chat_graph()
        made.append("closed")

    @contextmanager
    def opened_sync() -> Iterator[Any]:
        made.append("opened")
        yield chat_graph()
        made.append("closed")

    assert trainable(plain, model=stand_in, reward=heard).evaluate(SCENARIOS, rollouts=2).reward == 1.0
    assert made == ["plain"] * 2
    made.clear()
    assert trainable(configured, model=stand_in, reward=heard).evaluate(SCENARIOS, rollouts=2).reward == 1.0
    assert len(set(made)) == 2
    for factory in (opened, opened_sync):
        made.clear()
        assert trainable(factory, model=stand_in, reward=heard).evaluate(SCENARIOS).reward == 1.0
        assert made == ["opened", "closed"]


def test_a_function_may_return_the_graph_that_fits_its_scenario(stand_in: TrainableModel) -> None:
    def agent(scenario: dict[str, str]) -> Any:
        return chat_graph(name=scenario["id"])

    assert trainable(agent, model=stand_in, reward=heard).evaluate(SCENARIOS).reward == 1.0


def test_a_chain_is_given_the_scenarios_fields(stand_in: TrainableModel) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | chat()
    assert trainable(chain, model=stand_in, reward=heard).evaluate(SCENARIOS).reward == 1.0
    assert trainable(chat(), model=stand_in, reward=heard).evaluate(["hi"]).reward == 1.0


def test_a_graph_with_a_bound_config_is_still_asked_as_a_graph(stand_in: TrainableModel) -> None:
    graph = chat_graph().with_retry()
    assert trainable(graph, model=stand_in, reward=heard).evaluate(SCENARIOS).reward == 1.0


def approving_graph() -> Any:
    def node(state: Any) -> Any:
        answer = chat().invoke(state["messages"])
        return {"messages": [answer, ("user", str(interrupt({"approve": answer.text})))]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    return graph.compile(checkpointer=InMemorySaver())


def test_an_interrupt_that_nobody_answers_ends_the_rollout_unscored_and_names_the_option(
    stand_in: TrainableModel,
) -> None:
    with pytest.raises(RolloutError, match=r"interrupted with \{'approve': 'heard: hi'\}.*on_interrupt="):
        trainable(approving_graph(), model=stand_in, reward=heard).evaluate(SCENARIOS)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_interrupt_is_answered(kind: str, stand_in: TrainableModel) -> None:
    def answer(value: Any) -> str:
        return f"yes to {value['approve']}"

    async def answer_async(value: Any) -> str:
        return answer(value)

    def reward(scenario: Any, state: Any) -> float:
        return float(state["messages"][-1].text == "yes to heard: hi")

    on_interrupt = answer if kind == "sync" else answer_async
    app = trainable(approving_graph(), model=stand_in, reward=reward, on_interrupt=on_interrupt)
    assert app.evaluate(SCENARIOS).reward == 1.0


def test_a_function_that_returns_an_interrupted_state_is_told_to_resume(stand_in: TrainableModel) -> None:
    graph = approving_graph()

    def agent(scenario: dict[str, str]) -> Any:
        thread = offbook.current_trajectory().id  # type: ignore[union-attr]
        return graph.invoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": thread}})

    def resuming(scenario: dict[str, str]) -> Any:
        agent(scenario)
        config: RunnableConfig = {"configurable": {"thread_id": offbook.current_trajectory().id}}  # type: ignore[union-attr]
        return graph.invoke(Command(resume="yes"), config)

    with pytest.raises(RolloutError, match=r"resume it in the function, with Command\(resume="):
        trainable(agent, model=stand_in, reward=heard).evaluate(SCENARIOS)
    assert trainable(resuming, model=stand_in, reward=lambda s, o: len(o["messages"])).evaluate(SCENARIOS).reward == 3


@dataclasses.dataclass
class Desk:
    """The run-scoped context of a graph."""

    greeting: str


def graph_with_context() -> Any:
    def node(state: Any, runtime: Runtime[Desk]) -> Any:
        return {"messages": [chat().invoke(runtime.context.greeting)]}

    graph = StateGraph(MessagesState, context_schema=Desk)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    return graph.compile()


@pytest.mark.parametrize("context", [Desk("hi"), {"greeting": "hi"}, lambda scenario: Desk(scenario["question"])])
def test_a_graph_gets_its_context(context: Any, stand_in: TrainableModel) -> None:
    app = trainable(graph_with_context(), model=stand_in, reward=heard, context=context)
    assert app.evaluate(SCENARIOS).reward == 1.0
    factory = trainable(graph_with_context, model=stand_in, reward=heard, context=context)
    assert factory.evaluate(SCENARIOS).reward == 1.0


# ---- refused


def test_what_is_wrapped_twice_or_with_an_unknown_option_is_refused(stand_in: TrainableModel) -> None:
    app = trainable(create_agent(chat(), []), model=stand_in, reward=heard)
    for target, options, message in [
        (app, {}, "is wrapped already"),
        (chat_graph(), {"rewards": heard}, "there is no option 'rewards': did you mean 'reward'"),
        (
            chat_graph(),
            {"sinks": ["langfuse"]},
            r"no option 'sinks': use sinks=... in Trainer\(\), MCPTrainer\(\) or app.train\(\)",
        ),
        (chat_graph(), {"reward": 1.0}, r"reward: a function \(scenario, output\) -> number"),
        (stand_in, {}, r"pass it as trainable\(model=\.\.\.\)"),
        (type(chat()), {}, r"is a class; wrap an instance"),
        (chat_graph(), {"to_input": "question"}, "to_input: a function is needed, got 'question'"),
        (chat_graph(), {"context": Desk}, "context: pass an instance of Desk"),
        (chat_graph(), {"scope": "thread"}, "scope: one of"),
        (chat_graph(), {"select": {"nod": "x"}}, "select: there is no key 'nod'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            trainable(target, model=stand_in, **options)


def test_a_process_wide_scope_runs_one_rollout_at_a_time(stand_in: TrainableModel) -> None:
    app = trainable(chat_graph(), model=stand_in, reward=heard, scope="process", on_leak="ignore")
    assert app.evaluate(SCENARIOS, rollouts=3).reward == 1.0
    with pytest.raises(ConfigError, match='concurrency: scope="process" runs one rollout at a time, got 4'):
        app.evaluate(SCENARIOS, concurrency=4)
