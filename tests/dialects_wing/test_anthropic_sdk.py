"""Anthropic's own client against a real server with the embedded engine: a tool's result extends the prompt."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic

from offbook import LocalBackend
from offbook.base.types import new_id

HELLO: list[Any] = [{"role": "user", "content": "Where is order 17?"}]
FIND: Any = {
    "name": "find_order",
    "input_schema": {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_prompt_extends_the_first(local_backend: LocalBackend, stream: bool) -> None:
    api = await local_backend.connect("tiny")
    rollout = new_id("traj")

    async with AsyncAnthropic(base_url=f"{api.url}/t/{rollout}", api_key=api.key or "any", max_retries=0) as client:

        async def said(messages: list[Any], **fields: Any) -> Any:
            asked: Any = {"model": "tiny", "max_tokens": 8_000, "tools": [FIND], "messages": messages, **fields}
            if not stream:
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                return await events.get_final_message()

        first = await said(HELLO, tool_choice={"type": "tool", "name": "find_order"})
        uses = [block for block in first.content if block.type == "tool_use"]
        assert uses and first.stop_reason == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "on its way"} for use in uses]
        turns = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        asked: Any = {"model": "tiny", "tools": [FIND], "messages": turns}
        counted = await client.messages.count_tokens(**asked)
        await said(turns)
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"authorization": f"Bearer {api.key}"} if api.key else {}
        read = await http.get(f"{api.url}/api/trajectories/{rollout}", headers=headers)
    one, two = read.json()["calls"]
    assert counted.input_tokens == len(two["prompt_ids"])
    sampled = [*one["prompt_ids"], *one["outputs"][0]["token_ids"]]
    assert two["prompt_ids"][: len(sampled)] == sampled
