"""Apps that make calls at once: fan-out, batches, pools, threads, tasks, and event loops of their own."""

from __future__ import annotations

import asyncio
import operator
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.pool import ThreadPool
from queue import Queue
from typing import Annotated, Any, NotRequired

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from .apps import asked, double, last, own_model
from .policy import Policy, origins

WORDS: list[Any] = ["red", "green", "blue"]
HEARD = [f"heard: {word}" for word in WORDS]


class Words(TypedDict):
    words: list[str]
    heard: NotRequired[Annotated[list[str], operator.add]]


class Word(TypedDict):
    word: str


def hear(state: Any) -> dict[str, Any]:
    return {"heard": [own_model().invoke(state["word"]).text]}


async def ahear(state: Word) -> dict[str, Any]:
    return {"heard": [(await own_model().ainvoke(state["word"])).text]}


def fan_out(state: Words) -> list[Send]:
    return [Send("hear", {"word": word}) for word in state["words"]]


def in_a_node(work: Any) -> Any:
    """A graph of one node that puts what `work(words)` returns into the state."""

    def node(state: Words) -> dict[str, Any]:
        return {"heard": work(state["words"])}

    return StateGraph(Words).add_node("node", node).add_edge(START, "node").compile()


def heard_by(policy: Policy, app: Any) -> list[str]:
    """What a graph heard, its three calls recorded with their node."""
    with policy.rollout() as made:
        state = app.invoke({"words": WORDS})
    assert [origin.node for origin in origins(made.calls(3))] == ["node"] * 3
    return state["heard"]


def said(word: str) -> str:
    """One call."""
    return own_model().invoke(word).text


def test_fan_out_with_send(policy: Policy) -> None:
    app = StateGraph(Words).add_node("hear", hear).add_conditional_edges(START, fan_out, ["hear"]).compile()
    with policy.rollout() as made:
        assert app.invoke({"words": WORDS})["heard"] == HEARD
    calls = made.calls(3)
    assert {origin.node for origin in origins(calls)} == {"hear"}
    assert len({origin.namespace for origin in origins(calls)}) == 3


async def test_fan_out_with_send_async(policy: Policy) -> None:
    app = StateGraph(Words).add_node("hear", ahear).add_conditional_edges(START, fan_out, ["hear"]).compile()
    async with policy.rollout() as made:
        assert (await app.ainvoke({"words": WORDS}))["heard"] == HEARD
    made.calls(3)


def test_map_and_reduce_with_send_over_subgraphs(policy: Policy) -> None:
    class Order(MessagesState):
        heard: NotRequired[Annotated[list[str], operator.add]]

    worker = create_agent(own_model(), [double], name="worker")

    def work(state: Any) -> dict[str, Any]:
        return {"heard": [last(worker.invoke(asked(state["order"])))]}

    def orders(state: Any) -> list[Send]:
        return [Send("work", {"order": f"double(x={number})"}) for number in (1, 2)]

    def reduce(state: Any) -> dict[str, Any]:
        return {"messages": [own_model().invoke(" and ".join(state["heard"]))]}

    graph = StateGraph(Order).add_node("work", work).add_node("reduce", reduce)
    app = graph.add_conditional_edges(START, orders, ["work"]).add_edge("work", "reduce").compile()
    with policy.rollout() as made:
        assert last(app.invoke({"messages": []})) == "heard: the tools said 2 and the tools said 4"
    nodes = [origin.node for origin in origins(made.calls(5))]
    assert nodes == ["model"] * 4 + ["reduce"]


def test_nodes_that_run_in_the_same_step(policy: Policy) -> None:
    graph = StateGraph(Words)
    for word in WORDS:
        graph.add_node(word, RunnableLambda(lambda state, word=word: hear({"word": word}))).add_edge(START, word)
    with policy.rollout() as made:
        assert sorted(graph.compile().invoke({"words": []})["heard"]) == sorted(HEARD)
    assert {origin.node for origin in origins(made.calls(3))} == set(WORDS)


def test_runnables_in_parallel(policy: Policy) -> None:
    chain = RunnableParallel(one=own_model(), two=own_model().bind(stop=["END"]))
    with policy.rollout() as made:
        found = chain.invoke("hi")
    assert (found["one"].text, found["two"].text) == ("heard: hi", "heard: hi")
    made.calls(2)
    assert sorted(request.get("stop") or [] for request in made.requests) == [[], ["END"]]


def test_a_batch(policy: Policy) -> None:
    app = in_a_node(lambda words: [message.text for message in own_model().batch(words, {"max_concurrency": 2})])
    assert heard_by(policy, app) == HEARD


async def test_an_async_batch(policy: Policy) -> None:
    async with policy.rollout() as made:
        assert [message.text for message in await own_model().abatch(WORDS)] == HEARD
    made.calls(3)


def test_a_batch_as_completed(policy: Policy) -> None:
    app = in_a_node(lambda words: [each[1].text for each in sorted(own_model().batch_as_completed(words))])
    assert heard_by(policy, app) == HEARD


async def test_an_async_batch_as_completed(policy: Policy) -> None:
    async with policy.rollout() as made:
        found = {place: message.text async for place, message in own_model().abatch_as_completed(WORDS)}
    assert [found[place] for place in range(3)] == HEARD
    made.calls(3)


def test_a_batch_of_a_graph(policy: Policy) -> None:
    app = in_a_node(lambda words: [said(word) for word in words])
    with policy.rollout() as made:
        states = app.batch([{"words": [word]} for word in WORDS])
    assert [state["heard"] for state in states] == [[text] for text in HEARD]
    made.calls(3)


def test_a_runnable_mapped_over_a_list(policy: Policy) -> None:
    with policy.rollout() as made:
        assert [message.text for message in own_model().map().invoke(WORDS)] == HEARD
    made.calls(3)


def test_several_prompts_in_one_generate(policy: Policy) -> None:
    with policy.rollout() as made:
        found = own_model().generate([[HumanMessage(word)] for word in WORDS])
    assert [each[0].text for each in found.generations] == HEARD
    made.calls(3)


def test_a_thread_pool_in_a_node(policy: Policy) -> None:
    def work(words: list[str]) -> list[str]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(said, words))

    assert heard_by(policy, in_a_node(work)) == HEARD


def test_a_thread_pool_that_is_older_than_the_capture(policy: Policy) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread lives from here on
        app = in_a_node(lambda words: [done.result() for done in as_completed([pool.submit(said, w) for w in words])])
        assert heard_by(policy, app) == HEARD


def test_a_pool_of_multiprocessing_in_a_node(policy: Policy) -> None:
    def work(words: list[str]) -> list[str]:
        with ThreadPool(2) as pool:
            return pool.map(said, words)

    assert heard_by(policy, in_a_node(work)) == HEARD


def test_langchains_own_thread_pool(policy: Policy) -> None:
    def work(words: list[str]) -> list[str]:
        with ContextThreadPoolExecutor(2) as pool:
            return list(pool.map(said, words))

    assert heard_by(policy, in_a_node(work)) == HEARD


def test_bare_threads(policy: Policy) -> None:
    class Hearing(threading.Thread):
        def run(self) -> None:
            found.append(said("blue"))

    found: list[str] = []

    def work(words: list[str]) -> list[str]:
        threads = [threading.Thread(target=lambda w=word: found.append(said(w))) for word in words[:2]]
        for thread in [*threads, Hearing()]:
            thread.start()
            thread.join()
        return found

    assert heard_by(policy, in_a_node(work)) == HEARD


def test_a_timer(policy: Policy) -> None:
    found: list[str] = []

    def work(words: list[str]) -> list[str]:
        for word in words:
            timer = threading.Timer(0, lambda w=word: found.append(said(w)))
            timer.start()
            timer.join()
        return found

    assert heard_by(policy, in_a_node(work)) == HEARD


async def test_run_in_executor_and_to_thread(policy: Policy) -> None:
    async def node(state: Words) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        red, green, blue = state["words"]
        with ThreadPoolExecutor(1) as pool:
            found = [await loop.run_in_executor(None, said, red), await loop.run_in_executor(pool, said, green)]
        return {"heard": [*found, await asyncio.to_thread(said, blue)]}

    app = StateGraph(Words).add_node("node", node).add_edge(START, "node").compile()
    async with policy.rollout() as made:
        assert (await app.ainvoke({"words": WORDS}))["heard"] == HEARD
    assert [origin.node for origin in origins(made.calls(3))] == ["node"] * 3


async def test_tasks_gathered_in_a_node(policy: Policy) -> None:
    async def node(state: Words) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(own_model().ainvoke(word)) for word in state["words"]]
        return {"heard": [task.result().text for task in tasks]}

    app = StateGraph(Words).add_node("node", node).add_edge(START, "node").compile()
    async with policy.rollout() as made:
        assert (await app.ainvoke({"words": WORDS}))["heard"] == HEARD
    made.calls(3)


def test_an_event_loop_of_its_own_in_a_sync_node(policy: Policy) -> None:
    async def ask(words: list[str]) -> list[str]:
        return [message.text for message in await asyncio.gather(*(own_model().ainvoke(word) for word in words))]

    assert heard_by(policy, in_a_node(lambda words: asyncio.run(ask(words)))) == HEARD


async def test_an_event_loop_in_a_worker_thread_of_an_async_app(policy: Policy) -> None:
    model = own_model()

    async def ask(word: str) -> str:
        return (await model.ainvoke(word)).text

    def work(word: str) -> str:
        return asyncio.run(ask(word))  # a new loop for each

    async def node(state: Words) -> dict[str, Any]:
        with ThreadPoolExecutor(2) as pool:
            return {"heard": list(pool.map(work, state["words"]))}

    app = StateGraph(Words).add_node("node", node).add_edge(START, "node").compile()
    async with policy.rollout() as made:
        assert (await app.ainvoke({"words": WORDS}))["heard"] == HEARD
    made.calls(3)


def test_calls_whose_config_drops_the_callbacks(policy: Policy) -> None:
    def work(words: list[str]) -> list[str]:
        return [own_model().invoke(word, config={"callbacks": [], "metadata": {"mine": 1}}).text for word in words]

    assert heard_by(policy, in_a_node(work)) == HEARD


def test_a_worker_thread_that_is_older_than_the_capture(policy: Policy) -> None:
    orders: Queue[str | None] = Queue()
    heard: Queue[str] = Queue()

    def work() -> None:
        while (word := orders.get(timeout=30)) is not None:
            heard.put(said(word))

    def ask(words: list[str]) -> list[str]:
        return [(orders.put(word), heard.get(timeout=30))[1] for word in words]

    worker = threading.Thread(target=work)
    worker.start()
    # Its context knows no capture. The server is in this process too, and what it sends on is no leak.
    with policy.rollout(scope="process", on_leak="ignore") as made:
        assert in_a_node(ask).invoke({"words": WORDS})["heard"] == HEARD
        orders.put(None)
        worker.join()
    made.calls(3)
