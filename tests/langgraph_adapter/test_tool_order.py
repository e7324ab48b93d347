"""Tools that run side by side, a node for each: their results arrive in another order than their calls, and are read and
trained in the order of the calls."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from transformers import AutoTokenizer

from offbook import TrainableModel
from offbook.base.types import RenderedHistory
from offbook.engine.chat_template import ChatTemplate
from offbook.engine.learner.targets.render import render_history
from offbook.tiny import path
from offbook_langgraph import capture
from tests.langgraph_adapter.kinds.apps import own_model

ASKED = HumanMessage("where are box 1 and box 2?")
CALLED = AIMessage(
    "",
    tool_calls=[
        {"id": "call_1", "name": "find_box", "args": {"box": "1"}},
        {"id": "call_2", "name": "weigh_box", "args": {"box": "2"}},
    ],
)


class State(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


def fan_out() -> Any:
    """The first tool takes one step more than the second, so its result is appended last."""
    model = own_model(max_tokens=4)

    async def answer(state: State) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph: Any = StateGraph(State)
    graph.add_node("ask", lambda state: {"messages": [ASKED, CALLED]})
    graph.add_node("look", lambda state: {})
    graph.add_node("find_box", lambda state: {"messages": [ToolMessage("on shelf 7", tool_call_id="call_1")]})
    graph.add_node("weigh_box", lambda state: {"messages": [ToolMessage("3 kg", tool_call_id="call_2")]})
    graph.add_node("answer", answer)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda state: ["look", "weigh_box"], ["look", "weigh_box"])
    graph.add_edge("look", "find_box")
    graph.add_edge(["find_box", "weigh_box"], "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def test_results_of_a_fan_out_are_sampled_and_trained_under_their_calls(model: TrainableModel) -> None:
    async def rollout() -> tuple[list[AnyMessage], Any]:
        async with capture(model) as trajectory:
            state = await fan_out().ainvoke({"messages": []})
        api = await model.api()
        [call] = (await api.trajectory(trajectory.id)).calls
        return state["messages"], call

    messages, call = asyncio.run(rollout())
    assert [message.content for message in messages[2:4]] == ["3 kg", "on shelf 7"]  # as they arrived

    tokenizer = AutoTokenizer.from_pretrained(path())
    text = tokenizer.decode(call.prompt_ids)
    assert text.index("on shelf 7") < text.index("3 kg")
    target = {"role": "assistant", "content": "shelf 7"}
    history = RenderedHistory(messages=(*call.messages, target), tools=call.tools, targets=(len(call.messages),))
    [sample] = render_history(ChatTemplate(tokenizer), frozenset({tokenizer.eos_token_id}), history, "t", 0)
    assert tuple(sample.prompt_ids.tolist()) == call.prompt_ids
