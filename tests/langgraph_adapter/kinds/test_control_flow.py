"""Apps with control flow of their own: functional API, subgraphs, interrupts, retries, fallbacks, caches, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache as ModelCache
from langchain_core.globals import get_llm_cache, set_llm_cache
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache
from langgraph.channels import EphemeralValue
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import NodeBuilder, Pregel
from langgraph.types import CachePolicy, Command, RetryPolicy, interrupt
from openai import InternalServerError

from offbook.base.errors import SharedStateError
from offbook.base.types import CallStatus

from .apps import add, asked, last, own_model
from .policy import Policy, origins, until

THREAD: Any = {"configurable": {"thread_id": "t-1"}}
QUICK = RetryPolicy(initial_interval=0.01, jitter=False, retry_on=Exception)


def think(state: MessagesState) -> dict[str, Any]:
    return {"messages": [own_model().invoke(state["messages"])]}


def graph_of(node: Any, **options: Any) -> Any:
    return StateGraph(MessagesState).add_node("think", node, **options).add_edge(START, "think")


def test_the_functional_api(policy: Policy) -> None:
    @task
    def hear(word: str) -> str:
        return own_model().invoke(word).text

    @entrypoint()
    def app(words: list[str]) -> list[str]:
        return [future.result() for future in [hear(word) for word in words]]

    with policy.rollout() as made:
        assert app.invoke(["red", "blue"]) == ["heard: red", "heard: blue"]
    assert [origin.node for origin in origins(made.calls(2))] == ["hear", "hear"]


async def test_the_functional_api_async(policy: Policy) -> None:
    @task
    async def hear(word: str) -> str:
        return (await own_model().ainvoke(word)).text

    @entrypoint()
    async def app(words: list[str]) -> list[str]:
        return list(await asyncio.gather(*(hear(word) for word in words)))

    async with policy.rollout() as made:
        assert await app.ainvoke(["red", "blue"]) == ["heard: red", "heard: blue"]
    assert [origin.node for origin in origins(made.calls(2))] == ["hear", "hear"]


def test_a_task_that_is_retried(policy: Policy) -> None:
    @task(retry_policy=QUICK)
    def hear(word: str) -> str:
        return own_model().invoke(word).text

    @entrypoint()
    def app(word: str) -> str:
        return hear(word).result()

    policy.refuse_next(500, "out of luck")
    with policy.rollout() as made:
        assert app.invoke("red") == "heard: red"
    assert [call.status for call in made.recorded(2)] == [CallStatus.FAILED, CallStatus.COMPLETE]


def test_a_task_that_is_not_run_again_when_its_workflow_resumes(policy: Policy) -> None:
    @task
    def hear(word: str) -> str:
        return own_model().invoke(word).text

    @entrypoint(checkpointer=InMemorySaver())
    def app(word: str) -> str:
        heard = hear(word).result()
        return f"{heard}, {interrupt('more?')}"

    with policy.rollout() as made:
        assert app.invoke("red", THREAD)["__interrupt__"][0].value == "more?"
        assert app.invoke(Command(resume="no"), THREAD) == "heard: red, no"
    made.calls(1)


def test_a_subgraph_as_a_node(policy: Policy) -> None:
    inner = graph_of(think).compile()
    app = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile()
    with policy.rollout() as made:
        assert last(app.invoke(asked("hi"))) == "heard: hi"
    origin = made.calls(1)[0].origin
    assert origin is not None
    assert origin.node == "think"
    assert str(origin.namespace).startswith("inner:")


async def test_a_subgraph_called_in_a_node(policy: Policy) -> None:
    inner = graph_of(think).compile()

    async def outer(state: MessagesState) -> dict[str, Any]:
        return {"messages": (await inner.ainvoke(state))["messages"][-1:]}

    app = StateGraph(MessagesState).add_node("outer", outer).add_edge(START, "outer").compile()
    async with policy.rollout() as made:
        assert last(await app.ainvoke(asked("hi"))) == "heard: hi"
    assert origins(made.calls(1))[0].node == "think"


def test_a_graph_made_of_channels_and_nodes(policy: Policy) -> None:
    hear = NodeBuilder().subscribe_only("asked").do(lambda text: own_model().invoke(text).text).write_to("heard")
    channels: Any = {"asked": EphemeralValue(str), "heard": EphemeralValue(str)}
    app = Pregel(nodes={"hear": hear}, channels=channels, input_channels=["asked"], output_channels=["heard"])
    with policy.rollout() as made:
        assert app.invoke({"asked": "hi"}) == {"heard": "heard: hi"}
    assert origins(made.calls(1))[0].node == "hear"


def test_a_loop_that_asks_again_until_it_is_content(policy: Policy) -> None:
    def again(state: MessagesState) -> Command[Literal["think", "__end__"]]:
        return Command(goto="think" if len(state["messages"]) < 4 else "__end__")

    app = graph_of(think).add_node("again", again).add_edge("think", "again").compile()
    with policy.rollout() as made:
        app.invoke(asked("hi"))
    assert [origin.step for origin in origins(made.calls(3))] == [1, 3, 5]


def test_an_interrupt_in_a_node_that_is_run_again_when_it_is_resumed(policy: Policy) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        draft = own_model().invoke(state["messages"])
        return {"messages": [draft] if interrupt(draft.text) == "good" else []}

    app = graph_of(node).compile(checkpointer=InMemorySaver())
    with policy.rollout() as made:
        assert app.invoke(asked("hi"), THREAD)["__interrupt__"][0].value == "heard: hi"
        assert last(app.invoke(Command(resume="good"), THREAD)) == "heard: hi"
    calls = made.calls(2)  # the second time, the same prompt
    assert calls[0].prompt_ids == calls[1].prompt_ids
    assert {origin.thread for origin in origins(calls)} == {"t-1"}


async def test_an_interrupt_inside_a_tool(policy: Policy) -> None:
    @tool
    async def book(hotel: str) -> str:
        """Book a hotel."""
        return f"booked {hotel}" if interrupt(f"book {hotel}?") else "not booked"

    app = create_agent(own_model(), [book], checkpointer=InMemorySaver())
    async with policy.rollout() as made:
        state = await app.ainvoke(asked("book(hotel='Ritz')"), THREAD)
        assert state["__interrupt__"][0].value == "book Ritz?"
        assert last(await app.ainvoke(Command(resume=True), THREAD)) == "the tools said booked Ritz"
    made.calls(2)


def test_a_conversation_that_goes_on_in_the_next_rollout(policy: Policy) -> None:
    app = graph_of(think).compile(checkpointer=InMemorySaver())
    with policy.rollout() as first:
        app.invoke(asked("hi"), THREAD)
        first.calls(1)
    with policy.rollout(shared_state="allow") as second:
        assert last(app.invoke(asked("again"), THREAD)) == "heard: again"
    assert len(second.calls(1)[0].messages) == 3
    with pytest.raises(SharedStateError, match="t-1"), policy.rollout():
        app.invoke(asked("again"), THREAD)


def test_a_fork_of_an_earlier_state(policy: Policy) -> None:
    app = graph_of(think).compile(checkpointer=InMemorySaver())
    with policy.rollout() as made:
        app.invoke(asked("hi"), THREAD)
        start = [state for state in app.get_state_history(THREAD) if state.next == ("think",)][-1]
        forked = app.update_state(start.config, asked("hi again"))
        assert last(app.invoke(None, forked)) == "heard: hi again"
    made.calls(2)


def test_a_node_with_a_retry_policy(policy: Policy) -> None:
    policy.refuse_next(500, "out of luck")
    with policy.rollout() as made:
        assert last(graph_of(think, retry_policy=QUICK).compile().invoke(asked("hi"))) == "heard: hi"
    assert [call.status for call in made.recorded(2)] == [CallStatus.FAILED, CallStatus.COMPLETE]


async def test_a_model_with_retry(policy: Policy) -> None:
    policy.refuse_next(500, "out of luck")
    model = own_model().with_retry(wait_exponential_jitter=False, stop_after_attempt=2)
    async with policy.rollout() as made:
        assert (await model.ainvoke("hi")).text == "heard: hi"
    assert [call.status for call in made.recorded(2)] == [CallStatus.FAILED, CallStatus.COMPLETE]


def test_a_model_with_fallbacks(policy: Policy) -> None:
    policy.refuse_next(500, "out of luck")
    model = own_model(model="first").with_fallbacks([own_model(model="second")]).bind_tools([add])
    with policy.rollout() as made:
        assert model.invoke("add(a=1, b=2)").tool_calls[0]["args"] == {"a": 1, "b": 2}
    calls = made.recorded(2)
    assert [call.status for call in calls] == [CallStatus.FAILED, CallStatus.COMPLETE]
    assert [origin.model for origin in origins(calls)] == ["first", "second"]


def test_an_error_of_the_engine_reaches_the_app_as_openais_own(policy: Policy) -> None:
    policy.refuse_next(500, "out of luck")
    with policy.rollout() as made, pytest.raises(InternalServerError, match="out of luck"):
        own_model(max_retries=5).invoke("hi")
    assert [call.status for call in made.recorded(1)] == [CallStatus.FAILED]


def test_a_cached_node_makes_no_call_the_second_time(policy: Policy) -> None:
    app = graph_of(think, cache_policy=CachePolicy()).compile(cache=InMemoryCache())
    given = asked("hi")
    with policy.rollout() as made:
        assert last(app.invoke(given)) == last(app.invoke(given)) == "heard: hi"
    made.calls(1)


@pytest.mark.parametrize("where", ["global", "model"])
def test_a_cache_of_answers_is_not_used(policy: Policy, where: str) -> None:
    before = get_llm_cache()
    set_llm_cache(ModelCache() if where == "global" else None)
    try:
        model = own_model(cache=ModelCache()) if where == "model" else own_model()
        with policy.rollout() as made:
            assert [model.invoke("hi").text, model.invoke("hi").text] == ["heard: hi"] * 2
        made.calls(2)
    finally:
        set_llm_cache(before)


def test_a_graph_that_reaches_its_recursion_limit(policy: Policy) -> None:
    app = graph_of(think).add_edge("think", "think").compile()
    with policy.rollout() as made, pytest.raises(GraphRecursionError):
        app.invoke(asked("hi"), {"recursion_limit": 3})
    made.calls(3)


async def test_a_rollout_that_is_cancelled(policy: Policy) -> None:
    policy.server.sampler.piece_seconds = 0.05
    app = create_agent(own_model(), [add])

    async def run() -> None:
        async with made:
            async for _ in app.astream(asked("one two three four five " * 10), stream_mode="messages"):
                pass

    made = policy.rollout()
    running = asyncio.create_task(run())
    while not made.requests:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    [call] = await asyncio.to_thread(until, lambda: policy.server.calls(made.trajectory.id), "the call is recorded")
    assert call.status == CallStatus.CANCELLED
    assert origins([call])[0].node == "model"


def test_a_model_that_is_asked_on_an_edge(policy: Policy) -> None:
    def where(state: MessagesState) -> str:
        return "think" if own_model().invoke(state["messages"]).text == "heard: hi" else "__end__"

    app = StateGraph(MessagesState).add_node("think", think).add_conditional_edges(START, where).compile()
    with policy.rollout() as made:
        assert last(app.invoke(asked("hi"))) == "heard: hi"
    assert origins(made.calls(2))[1].node == "think"


async def test_a_task_that_the_app_leaves_behind(policy: Policy) -> None:
    left: list[asyncio.Task[Any]] = []

    async def node(state: MessagesState) -> dict[str, Any]:
        left.append(asyncio.create_task(own_model().ainvoke("a summary for later")))
        return {"messages": [await own_model().ainvoke(state["messages"])]}

    async with policy.rollout() as made:
        assert last(await graph_of(node).compile().ainvoke(asked("hi"))) == "heard: hi"
    assert (await left[0]).text == "heard: a summary for later"
    made.calls(2)
