"""Thinking options: in every API and spelling the same variables of the base's chat template, or none and a line in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from offbook.server.calls import chat_request
from offbook.server.calls.chat_request import ChatRequest
from offbook.server.sampler.transport import Quirks
from tests.fakes.gateway import Gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GEMINI = "/v1beta/models/default:generateContent"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "default", "messages": HI},
    MESSAGES: {"model": "default", "max_tokens": 9, "messages": HI},
    RESPONSES: {"model": "default", "input": "hi"},
    GEMINI: {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
OFF: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"reasoning": {"effort": "none"}}),
    (CHAT, {"reasoning": {"enabled": False}}),
    (CHAT, {"thinking": {"type": "disabled"}}),
    (CHAT, {"thinking": False}),
    (CHAT, {"enable_thinking": False, "reasoning_effort": "high"}),
    (CHAT, {"thinking_budget": 0}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}}),
    (GEMINI, {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}),
]
ON: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"reasoning": {"effort": "low"}}),
    (CHAT, {"thinking": {"type": "enabled"}, "reasoning_effort": "low"}),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}),
    (RESPONSES, {"reasoning": {"effort": "low"}}),
    (GEMINI, {"generationConfig": {"thinkingConfig": {"thinkingLevel": "LOW"}}}),
]


async def sent(gateway: Gateway, template: set[str] | None, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What reaches the engine of a request, of a base whose template has these words."""
    words = None if template is None else frozenset(template)
    object.__setattr__(gateway.services.engine, "quirks", Quirks(template=words))
    answer = await gateway.http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    return gateway.sampler.received[-1]


@pytest.mark.parametrize(("path", "fields"), OFF)
async def test_every_api_can_turn_thoughts_off(gateway: Gateway, path: str, fields: dict[str, Any]) -> None:
    got = await sent(gateway, {"enable_thinking", "messages"}, path, fields)
    assert got["chat_template_kwargs"] == {"enable_thinking": False}
    assert not got.keys() & set(chat_request.SPELLINGS)
    named = await sent(gateway, {"thinking"}, path, fields)
    assert named["chat_template_kwargs"]["thinking"] is False


@pytest.mark.parametrize(("path", "fields"), ON)
async def test_an_effort_is_a_variable_of_the_template(gateway: Gateway, path: str, fields: dict[str, Any]) -> None:
    got = await sent(gateway, {"enable_thinking", "reasoning_effort"}, path, fields)
    assert got["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
    assert got["reasoning_effort"] == "low" and "thinking" not in got and "reasoning" not in got


@pytest.mark.parametrize(
    ("path", "fields"), [(path, it) for path, it in (*OFF, *ON) if "chat_template_kwargs" not in it]
)
async def test_a_base_that_does_not_think_is_asked_without_the_options(
    gateway: Gateway, path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    chat_request._note_dropped.cache_clear()  # pyright: ignore[reportPrivateUsage]
    caplog.set_level(logging.WARNING)
    plain = await sent(gateway, {"messages"}, path, {})
    for _ in range(2):
        assert await sent(gateway, {"messages"}, path, fields) == plain
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert said and len(said) == len(set(said))


def test_the_engine_s_own_budget_stays_where_the_engine_has_it() -> None:
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 5}'

    def budget(quirks: Quirks) -> object:
        return ChatRequest.parse(raw, {}, None, quirks).payload("base").get("thinking_token_budget")

    assert (budget(Quirks(thinking_budgets=True)), budget(Quirks())) == (5, None)
