"""`trainable` on functions and graphs, against a real server with the bundled policy."""

from __future__ import annotations

import asyncio
import inspect
import zlib
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.pregel import Pregel
from pydantic import SecretStr

from offbook import TrainableModel, TrainConfig, Trajectory, current_trajectory
from offbook.base.errors import ConfigError, RolloutError, WrongLoopError
from offbook.testing import says, scripted_llm
from offbook_langgraph import capture, trainable

SCENARIOS = [{"id": str(number), "question": f"what is the size of box {number}?"} for number in (4821, 5913)]
SMALL: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=1e-3)}


@tool
def box_size(box: str) -> dict[str, str]:
    """The size of a box."""
    return {"size": box[::-1]}


def make_app(**options: Any) -> Any:
    """An app as its author wrote it: its own model cannot be reached."""
    model = ChatOpenAI(
        model="gpt-4.1-mini", api_key=SecretStr("unused"), base_url="http://127.0.0.1:9/v1", max_retries=0, **options
    )
    return create_agent(model.model_copy(update={"max_tokens": 48}), [box_size])


def lottery(scenario: Any, state: dict[str, Any]) -> dict[str, float]:
    """A reward that differs from rollout to rollout, however sure the policy is."""
    return {"reward": zlib.crc32(str(state["messages"][-1].id).encode()) % 97 / 97, "success": 1.0}


async def recorded(model: TrainableModel, trajectory_id: str) -> int:
    return len((await (await model.api()).trajectory(trajectory_id)).calls)


def test_an_async_function_is_trained_and_every_call_is_recorded(model: TrainableModel) -> None:
    seen: dict[str, int] = {}
    app = make_app()

    @trainable(model=model, temperature=1.5)  # at 1 all rollouts may sample the same, which trains nothing
    async def agent(scenario: dict[str, str]) -> float:
        """Answers."""
        state = await app.ainvoke({"messages": [("user", scenario["question"])]})
        trajectory = current_trajectory()
        assert trajectory is not None
        seen[trajectory.id] = sum(message.type == "ai" for message in state["messages"])
        return lottery(scenario, state)["reward"]

    report = agent.train(SCENARIOS, steps=1, **SMALL)
    assert report.step == 1
    assert (
        seen and len(seen) % 8 == 0
    )  # when all rollouts sampled the same, an iteration trains nothing and the next one follows
    assert seen == {name: asyncio.run(recorded(model, name)) for name in seen}
    assert (agent.__name__, agent.__doc__) == ("agent", "Answers.")  # type: ignore[attr-defined]


def test_a_sync_function_runs_in_a_thread_with_its_capture(model: TrainableModel) -> None:
    app = make_app()

    @trainable(model=model, reward=lottery)
    def agent(scenario: dict[str, str]) -> dict[str, Any]:
        return app.invoke({"messages": [("user", scenario["question"])]})

    assert agent.train(SCENARIOS, steps=1, **SMALL).step == 1
    assert agent.evaluate(SCENARIOS).success == 1.0


def test_a_compiled_graph_is_trained_and_stays_what_it_was(model: TrainableModel) -> None:
    plain = make_app()
    app = trainable(plain, model=model, reward=lottery)
    assert isinstance(app, type(plain))
    assert isinstance(app, Pregel)
    assert not hasattr(plain, "train")
    assert app.get_graph().to_json() == plain.get_graph().to_json()
    assert app.with_config(tags=["x"]).train(SCENARIOS, steps=1, **SMALL).step == 1  # type: ignore[attr-defined]


def test_the_trained_app_is_answered_by_the_policy_in_every_way_of_running(model: TrainableModel) -> None:
    question = {"messages": [("user", SCENARIOS[0]["question"])]}
    trained = trainable(make_app(), model=model, reward=lottery).trained(temperature=0.0)

    async def run_async() -> tuple[Any, list[Any]]:
        return await trained.ainvoke(question), [item async for item in trained.astream(question)]

    state, items = asyncio.run(run_async())
    expected = state["messages"][-1].text
    assert trained.invoke(question)["messages"][-1].text == expected
    assert len(items) == len(list(trained.stream(question))) == len(state["messages"]) - 1


def test_between_two_items_of_a_trained_stream_the_callers_own_models_are_untouched(model: TrainableModel) -> None:
    trained = trainable(make_app(), model=model, reward=lottery).trained()
    with scripted_llm([says("mine")]) as own:
        other = ChatOpenAI(model="other", api_key=SecretStr("unused"), base_url=own.url)
        items = trained.stream({"messages": [("user", "hi")]})
        next(items)
        assert other.invoke("hi").text == "mine"
        items.close()


def test_outside_training_the_app_runs_on_its_own_model(model: TrainableModel) -> None:
    with scripted_llm([says("from my own model")]) as own:
        app = create_agent(ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url=own.url), [box_size])
        wrapped = trainable(app, model=model, reward=lottery)
        assert wrapped.invoke({"messages": [("user", "hi")]})["messages"][-1].text == "from my own model"


def test_a_chain_of_runnables_can_be_wrapped(model: TrainableModel) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | ChatOpenAI(
        model="own", api_key=SecretStr("unused")
    )

    def length(scenario: Any, message: Any) -> float:
        return len(message.text) / 100

    app = trainable(chain, model=model, reward=length, to_input=lambda scenario: scenario)
    assert isinstance(app, type(chain))
    assert isinstance(app, Runnable)
    assert app.evaluate(SCENARIOS).scored == 2


def test_a_trained_chain_is_answered_by_the_policy_in_every_way_and_inside_longer_chains(model: TrainableModel) -> None:
    own = ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url="http://127.0.0.1:9/v1", max_retries=0)
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | own.model_copy(update={"max_tokens": 16})
    trained = trainable(chain, model=model, reward=lottery).trained(temperature=0.0)
    asked = {"question": "say the word teal"}
    expected = trained.invoke(asked).text
    text = StrOutputParser()
    longer = RunnablePassthrough() | trained | text
    assert (trained | text).invoke(asked) == longer.invoke(asked) == expected
    assert [message.text for message in trained.batch([asked, asked])] == [expected] * 2
    assert [message.text for _, message in trained.batch_as_completed([asked])] == [expected]
    assert "".join(message.text for message in trained.stream(asked)) == expected
    assert (
        "".join(longer.stream(asked)) == "".join(trained.with_config(tags=["x"]).pipe(text).stream(asked)) == expected
    )

    async def run_async() -> list[str]:
        found = [message.text for message in await trained.abatch([asked])]
        found += ["".join([part async for part in longer.astream(asked)])]
        found += [message.text async for _, message in trained.abatch_as_completed([asked])]
        events = [event async for event in trained.astream_events(asked, version="v2")]
        return [*found, events[-1]["data"]["output"].text]

    assert asyncio.run(run_async()) == [expected] * 4


async def test_a_sync_function_that_returns_a_coroutine_is_answered_by_the_policy(model: TrainableModel) -> None:
    app = make_app()
    await model.register()

    def agent(scenario: dict[str, str]) -> Any:
        return app.ainvoke({"messages": [("user", scenario["question"])]})

    state = await trainable(agent, model=model, reward=lottery).trained()(SCENARIOS[0])
    assert state["messages"][-1].type == "ai"


def test_a_function_that_raises_stop_iteration_fails_at_once(model: TrainableModel) -> None:
    @trainable(model=model)
    def agent(scenario: dict[str, str]) -> float:
        return next(number for number in (1.0, 2.0) if number > 3)

    with pytest.raises(RolloutError, match=r"the function raised StopIteration"):
        agent.train(SCENARIOS, steps=1, timeout=60, **SMALL)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_limit_that_was_set_for_a_larger_model_is_no_error(model: TrainableModel, streaming: bool) -> None:
    app = create_agent(
        ChatOpenAI(model="own", api_key=SecretStr("unused"), max_tokens=64_000, streaming=streaming),  # type: ignore[call-arg]  # an alias that pydantic accepts
        [box_size],
    )
    assert trainable(app, model=model, reward=lottery).evaluate(SCENARIOS).failed == 0


def test_a_proxy_for_the_apps_own_model_is_not_the_policys(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_PROXY", "http://127.0.0.1:9")
    app = trainable(make_app(), model=model, reward=lottery)
    assert app.evaluate(SCENARIOS).failed == 0


def test_a_method_is_wrapped_with_its_object(model: TrainableModel) -> None:
    class Desk:
        def __init__(self) -> None:
            self.app = make_app()

        @trainable(model=model)
        async def answer(self, scenario: dict[str, str]) -> float:
            return lottery(scenario, await self.app.ainvoke({"messages": [("user", scenario["question"])]}))["reward"]

    assert Desk().answer.evaluate(SCENARIOS).scored == 2


def test_each_rollout_of_a_graph_has_a_thread_of_its_own(model: TrainableModel) -> None:
    threads: list[str] = []

    def note(scenario: Any, state: dict[str, Any]) -> float:
        trajectory = current_trajectory()
        assert trajectory is not None
        threads.append(trajectory.id)
        return 0.0

    trainable(make_app(), model=model, reward=note).evaluate(SCENARIOS, rollouts=3)
    assert len(set(threads)) == 6


@pytest.mark.parametrize("returned", ["good", object(), {"score": 1.0}])
def test_a_return_value_of_another_kind_is_an_error_with_both_fixes(model: TrainableModel, returned: object) -> None:
    @trainable(model=model)
    async def agent(scenario: dict[str, str]) -> object:
        return returned

    with pytest.raises(RolloutError, match=r"Return a number .*or pass reward="):
        agent.evaluate(SCENARIOS)


def test_a_function_may_return_the_trajectory_itself(model: TrainableModel) -> None:
    @trainable(model=model)
    async def agent(scenario: dict[str, str]) -> Trajectory:
        state = await make_app().ainvoke({"messages": [("user", scenario["question"])]})
        return Trajectory(reward=0.25, metrics={"messages": len(state["messages"])})

    found = agent.evaluate(SCENARIOS)
    assert found.reward == 0.25
    assert found.metrics["messages"] >= 2


def test_what_cannot_be_wrapped_is_refused_with_the_fix() -> None:
    model = TrainableModel(name="agent", base_model="tiny")

    def generator(scenario: object) -> Any:
        yield scenario

    for target, message in [(generator, "is a generator"), (dict, "is a class"), (3, "a function or a compiled graph")]:
        with pytest.raises(ConfigError, match=message):
            trainable(target, model=model)
    with pytest.raises(ConfigError, match="reward"):
        trainable(make_app(), model=model).train(SCENARIOS)


async def test_sync_training_in_a_running_loop_is_refused_before_any_work() -> None:
    model = TrainableModel(name="agent", base_model="tiny")
    app = trainable(make_app(), model=model, reward=lottery)
    with pytest.raises(WrongLoopError, match="atrain"):
        app.train(SCENARIOS)
    assert inspect.iscoroutinefunction(app.atrain)


def test_a_capture_records_the_calls_of_a_block_under_its_trajectory(model: TrainableModel) -> None:
    question = {"messages": [("user", SCENARIOS[0]["question"])]}

    async def run() -> tuple[str, int]:
        async with capture(model) as trajectory:
            state = await make_app().ainvoke(question)
        return trajectory.id, sum(message.type == "ai" for message in state["messages"])

    name, made = asyncio.run(run())
    assert asyncio.run(recorded(model, name)) == made
    with capture(model, trajectory=Trajectory(id=f"{name}-sync")) as trajectory:
        state = make_app().invoke(question)
    assert trajectory.captured
    assert asyncio.run(recorded(model, trajectory.id)) == sum(message.type == "ai" for message in state["messages"])
