"""litellm, in a captured rollout. `tests/art_wing` has the rollouts that keep its choices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offbook import TrainableModel
from offbook.base.types import new_id
from offbook.testing import ScriptedServer

from .rollouts import recorded, shown, trained

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "box_size",
        "parameters": {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]},
    },
}


async def answer(litellm: Any, streamed: bool, **request: Any) -> Any:
    """The message of one call."""
    response = await litellm.acompletion(**request, stream=streamed)
    if streamed:
        response = litellm.stream_chunk_builder([chunk async for chunk in response])
    return response.choices[0].message


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.slow("whole trainings")
async def test_an_agent_on_litellm_is_trained_on_its_own_tokens(
    litellm: Any, model: TrainableModel, streamed: bool
) -> None:
    async def run(question: str) -> int:
        messages: list[Any] = [{"role": "user", "content": question}]
        for turn in range(1, 4):
            request = model.litellm_completion_params() | {"messages": messages, "tools": [TOOL], "max_tokens": 48}
            message = await answer(litellm, streamed, **request)
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                text = json.loads(call.function.arguments).get("box", "")[::-1]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                return turn
        return 3

    await trained(model, run)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_loop_through_its_responses(litellm: Any, served: ScriptedServer, streamed: bool) -> None:
    rollout = new_id("traj")
    tool = {"type": "function", **TOOL["function"]}
    items: list[Any] = [{"role": "user", "content": "box_size(box='4821') then box_size(box='17')"}]
    text = ""
    for _ in range(3):
        response = await litellm.aresponses(
            model="openai/default",
            api_base=f"{served.url}/t/{rollout}/v1",
            api_key="unused",
            input=items,
            tools=[tool],
            stream=streamed,
        )
        if streamed:
            response = [event async for event in response][-1].response
        output = [item.model_dump(exclude_none=True) for item in response.output]
        items += output
        for item in output:
            if item["type"] == "function_call":
                size = json.loads(item["arguments"])["box"][::-1]
                items.append({"type": "function_call_output", "call_id": item["call_id"], "output": size})
            else:
                text = item["content"][0]["text"]
    assert text == "the tools said 1284, 71"
    shown(served, "litellm", "Responses", recorded(served, rollout, 3))
