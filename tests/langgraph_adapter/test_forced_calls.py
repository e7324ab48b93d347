"""Calls under a grammar, as `docs/captured.md` has it: the next prompt has their text as it was sampled, not always
their tokens, and both calls are trained."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from pydantic import BaseModel
from tokenizers import Tokenizer

from offbook import TrainableModel, current_trajectory
from offbook.base.types import Call, as_rollout_exception
from offbook.client.rollouts.failures import failure_kinds
from offbook.tiny import path
from offbook_langgraph import capture, trainable
from tests.langgraph_adapter.kinds.apps import own_model

QUESTION = HumanMessage("what is the size of box 4821?")


class Box(BaseModel):
    """A box, in few tokens whatever the policy is."""

    colour: Literal["teal", "red"]
    full: bool


async def by_tool(scenario: Any) -> None:
    """A forced tool call, and a free one after it."""
    answer = await own_model().bind_tools([Box], tool_choice="Box").ainvoke([QUESTION])
    result = ToolMessage("done", tool_call_id=answer.tool_calls[0]["id"])
    await own_model(max_tokens=8).bind_tools([Box]).ainvoke([QUESTION, answer, result])


async def by_format(scenario: Any) -> None:
    """A forced object, and free text after it."""
    answer: Any = await own_model().with_structured_output(Box, include_raw=True).ainvoke([QUESTION])
    await own_model(max_tokens=8).ainvoke([QUESTION, answer["raw"], HumanMessage("and now?")])


@pytest.mark.parametrize(("app", "constrained"), [(by_tool, "tool_choice"), (by_format, "response_format")])
def test_a_forced_answer_comes_back_in_the_text_in_which_it_was_sampled(
    model: TrainableModel, app: Any, constrained: str
) -> None:
    rollouts: list[str] = []

    def reward(scenario: Any, output: Any) -> float:
        trajectory = current_trajectory()
        assert trajectory is not None
        rollouts.append(trajectory.id)
        return float(len(rollouts))

    report = trainable(app, model=model, reward=reward).train(["one"], steps=1, scenarios_per_step=1)
    metrics = report.iterations[-1].metrics
    assert metrics["calls/trained"] == 2 * len(rollouts) == 16

    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    for first, second in asyncio.run(recorded(model, rollouts)):
        assert (first.constrained, second.constrained) == (constrained, None)
        sampled = first.prompt_ids + first.outputs[0].token_ids
        text, prompt = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (sampled, second.prompt_ids))
        assert prompt.startswith(text)


def test_a_failure_after_a_truncated_call_names_the_limit(model: TrainableModel) -> None:
    async def first_call() -> str:
        async with capture(model, max_completion_tokens=4):
            answer = await own_model().bind_tools([Box], tool_choice="Box").ainvoke([QUESTION])
            boxes: dict[str | None, str] = {"Box": "a box"}
            return boxes[answer.tool_calls[0]["name"] if answer.tool_calls else None]

    with pytest.raises(KeyError) as caught:
        asyncio.run(first_call())
    [kind] = failure_kinds([as_rollout_exception(caught.value)])
    assert kind.type == "KeyError" and kind.message == (
        "None (cut at the length limit: 1 of 1 model calls, at most 4 tokens each)"
    )
    assert "cut at the length limit" in kind.line()


async def recorded(model: TrainableModel, rollouts: list[str]) -> list[list[Call]]:
    """The calls of each rollout, in their order."""
    api = await model.api()
    found = [(await api.trajectory(name)).calls for name in rollouts]
    return [sorted(calls, key=lambda call: call.started_at) for calls in found]
