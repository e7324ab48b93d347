"""Calls that the server refuses by itself: before anything is sampled, and with the connection left as it was."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.gateway import Gateway

from understudy.server.chat_request import MAX_MESSAGES, MAX_SHAPE_BYTES

LONG = "x" * MAX_SHAPE_BYTES


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]}, "tools", MAX_SHAPE_BYTES),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": LONG}}}},
            "response_format",
            MAX_SHAPE_BYTES,
        ),
        ({"guided_regex": LONG}, "guided_regex", MAX_SHAPE_BYTES),
        ({"messages": [{"role": "user", "content": "hi"}] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
    ],
)
async def test_more_than_a_call_may_bring_is_a_413_with_the_limit(
    gateway: Gateway, fields: dict[str, Any], param: str, limit: int
) -> None:
    response = await gateway.chat(**fields)
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "too_large")
    assert str(limit) in error["message"] and len(error["message"]) < 200
    assert gateway.sampler.received == []


async def test_long_messages_are_the_engines_to_judge(gateway: Gateway) -> None:
    response = await gateway.chat(messages=[{"role": "user", "content": LONG * 2}])
    assert response.status_code == 200
