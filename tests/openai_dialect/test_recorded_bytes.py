"""Every server that speaks OpenAI's dialect answers as recorded, byte for byte but for ids and times."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook import TrainableModel
from offbook.base.types import new_id
from offbook.base.wire import IDEMPOTENCY_HEADER, RECORD_HEADER, TRAJECTORY_HEADER
from offbook.client.backend import RemoteBackend
from offbook.engine.inference.decoding.model import ModelRunner
from offbook.testing import (
    Action,
    LlmReply,
    PolicySampler,
    ScriptedServer,
    calls_tool,
    chooses_nothing,
    cuts,
    fails,
    filters,
    refuses,
    says,
    scripted_llm,
)
from offbook.testing.asgi import serving
from tests.engine.inference.conftest import folder, policy  # noqa: F401  # fixtures
from tests.engine.inference.served import says as engine_says
from tests.engine.inference.served import served
from tests.fakes.gateway import gateway_over
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion, ScriptedSampler, scripted_sampler
from tests.mcp_training.conftest import obedient, stand_in  # noqa: F401  # fixtures
from tests.mcp_training.test_serve import endpoint
from tests.openai_dialect.recordings import HELLO, TOOL, USAGE, check, responses, sent, told

ASK = {"model": "default", "messages": HELLO}
TOKENS = {"logprobs": True, "return_token_ids": True}
CALL = ScriptedChoice(('{"box"', ": 7}"), ((21, 22), (23,)), ((-0.1, -0.2), (-0.3,)), "tool_calls", ("look_up", ""))
TWO = ScriptedCompletion(
    (ScriptedChoice(), ScriptedChoice(("Wor", "ld"), ((31,), (32,)), ((-0.5,), (-0.25,)), "length"))
)
ERROR = {"message": "the engine broke", "type": "InternalServerError", "param": None, "code": 500}
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]}
]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        yield http


def scripted(name: str) -> ScriptedCompletion:
    """What the sampler answers in a case."""
    if "tool" in name:
        return ScriptedCompletion((CALL,))
    if "choices" in name:
        return TWO
    if "error event" in name:
        return ScriptedCompletion(dies_after=1, error=ERROR)
    if "refuses" in name:
        return ScriptedCompletion(
            status=400, error={"error": {"message": "too long", "param": "input_tokens", "code": 400}}
        )
    if "omits" in name:
        return ScriptedCompletion(omit=frozenset({"token_ids"}))
    return ScriptedCompletion()


ANSWERED: dict[str, Any] = {
    "whole": {},
    "streamed": {"stream": True},
    "streamed, usage": USAGE,
    "whole, tokens": TOKENS,
    "streamed, tokens, usage": TOKENS | USAGE,
    "whole, tool": {"tools": [TOOL]},
    "streamed, tool": {"tools": [TOOL], "stream": True},
    "whole, two choices": {"n": 2},
    "streamed, two choices, usage": {"n": 2} | USAGE,
}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.1,
    "max_completion_tokens": 9,
    "seed": 3,
    "stop": ["x"],
    "frequency_penalty": None,
    "tool_choice": None,
    "user": "me",
    "metadata": {"a": "b"},
    "reasoning_effort": "low",
    "logit_bias": {"5": 1.5},
    "guided_choice": ["a", "b"],
}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "look_up"}}]}}
OTHER_TOOL = {"type": "function", "function": {"name": "other"}}
GATEWAY: dict[str, Any] = {
    **ANSWERED,
    "all kinds of settings": SAMPLING,
    "allowed tools": {"tools": [TOOL, OTHER_TOOL], "tool_choice": ALLOWED},
    "streamed, error event": {"stream": True},
    "whole, sampler refuses": {},
    "streamed, sampler refuses": {"stream": True},
    "whole, sampler omits ids": {},
    "streamed, sampler omits ids": {"stream": True},
    "another model": {"model": "other"},
    "model is null": {"model": None},
    "no messages": {"messages": []},
    "messages are null": {"messages": None},
    "unknown field": {"temprature": 1},
    "old field": {"functions": []},
    "wrong types": {"temperature": "0.5", "n": True, "stream": "yes", "tools": [{"type": "function"}]},
    "beyond limits": {"temperature": 101, "top_p": 0, "n": 129, "top_logprobs": 21, "repetition_penalty": 0},
    "wrong message": {"messages": [{"role": "robot", "content": 7}]},
    "wrong choice of tool": {"tool_choice": "always"},
    "top_logprobs alone": {"top_logprobs": 2},
    "stream_options alone": {"stream_options": {"include_usage": True}},
    "unknown stream option": {"stream": True, "stream_options": {"usage": True}},
    "unknown allowed tool": {"tools": [OTHER_TOOL], "tool_choice": ALLOWED},
    "unknown field of ours": {"offbook": {"trajectory": "t"}},
}


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_the_gateway(tmp_path: Path) -> None:
    texts: list[str] = []
    async with scripted_sampler() as sampler, gateway_over(sampler, tmp_path) as gateway:
        for headers in ({}, {TRAJECTORY_HEADER: "t1"}):
            for name, fields in GATEWAY.items():
                sampler.received.clear()
                sampler.completions.clear()
                sampler.completions.append(scripted(name))
                response = await sent(gateway.http, ASK | fields, headers)
                received = f"payload: {json.dumps(sampler.received[-1])}" if sampler.received else ""
                texts.append(told(name + (", recorded" if headers else ""), ASK | fields, response, received))
        sampler.completions.clear()
        for name, fields in ANSWERED.items():
            sampler.completions.append(scripted(name))
            headers = {TRAJECTORY_HEADER: "t2", IDEMPOTENCY_HEADER: name}
            await sent(gateway.http, ASK | fields, headers)
            texts.append(told(f"{name}, again", ASK | fields, await sent(gateway.http, ASK | fields, headers)))
        others = {"no object": "[1]", "no JSON": "{", "read": "/v1/chat/completions", "no path": "/v1/other"}
        others |= {"models": "/v1/models", "one model": "/v1/models/default", "no model": "/v1/models/x"}
        texts.append(await responses(gateway.http, others))
        texts.append(await responses(gateway.http, {"record is neither": ASK}, {RECORD_HEADER: "yes"}))
    check("gateway", "".join(texts))


async def test_the_embedded_engine(policy: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ask = {"model": "base", "messages": HELLO, "max_tokens": 12}
    call = '<tool_call>\n{"name": "look_up", "arguments": {"box": 7}}\n</tool_call>'
    answered = {name: fields for name, fields in ANSWERED.items() if "choices" not in name}
    answered |= {"whole, top": {"logprobs": True, "top_logprobs": 1}, "cut": {"max_tokens": 2}}
    refused: dict[str, Any] = {
        "another model": {"model": "other"},
        "no messages": {"messages": []},
        "messages are null": {"messages": None},
        "unknown field": {"temprature": 1},
        "unsupported field": {"guided_regex": "a"},
        "wrong type": {"temperature": "hot"},
        "beyond limits": {"top_p": 0},
        "stream_options alone": {"stream_options": {"include_usage": True}},
        "top_logprobs alone": {"top_logprobs": 2},
        "too long": {"max_tokens": 100_000},
        "no token": {"stop_token_ids": [100_000]},
        "empty stop": {"stop": ""},
        "both prompts": {"add_generation_prompt": True, "continue_final_message": True},
        "tool choice without tools": {"tool_choice": "required"},
    }
    texts: list[str] = []
    with served(policy) as url:
        async with opened(url) as http:
            for name, fields in answered.items():
                with monkeypatch.context() as patched:
                    engine_says(policy, patched, call if "tool" in name else "Hi é!")
                    texts.append(await responses(http, {name: ask | fields}))
            texts.append(await responses(http, {name: ask | fields for name, fields in refused.items()}))
            texts.append(await responses(http, {"no object": "[1]", "no path": "/v1/other", "models": "/v1/models"}))
            for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                fields = {"lora_name": "m@1", "lora_path": "/nowhere"}
                texts.append(told(path, fields, await http.post(path, json=fields)))
    check("engine", "".join(texts))


LLM_CASES = {name: fields for name, fields in ANSWERED.items() if "two" not in name and "tokens" not in name}


def replies() -> dict[str, LlmReply]:
    tool = calls_tool("look_up", {"box": 7}, call_id="call-7")
    named = {name: tool if "tool" in name else says("It is on shelf 7.") for name in LLM_CASES}
    two = says("one")
    assert two.completion is not None
    two.completion["choices"].append(
        {"index": 1, "finish_reason": "length", "message": {"role": "assistant", "content": "two"}}
    )
    more = {
        "two choices": two,
        "cut": cuts("half"),
        "refused": refuses("not this"),
        "without usage": says("7", usage=None),
    }
    return named | more | {f"{name}, streamed": reply for name, reply in more.items()}


async def test_the_scripted_llm() -> None:
    script = replies() | {
        "no choices": chooses_nothing(),
        "filtered": filters(),
        "fails": fails(429, "later", code="busy"),
    }
    thought = says("7", reasoning_content="shelf seven")
    script |= {"thought, streamed": thought, "plain failure": fails(500)}
    texts: list[str] = []
    with scripted_llm(list(script.values())) as api:
        async with opened(api.url.removesuffix("/v1")) as http:
            for name in script:
                fields = LLM_CASES.get(name, USAGE if "streamed" in name else {})
                texts.append(await responses(http, {name: ASK | fields}))
    check("scripted_llm", "".join(texts))


async def test_the_scripted_sampler() -> None:
    sampler = ScriptedSampler()
    cases = ANSWERED | {
        "streamed, error event": {"stream": True},
        "whole, refuses": {},
        "streamed, refuses": {"stream": True},
    }
    cases |= {"whole, omits ids": TOKENS, "streamed tool, tokens": TOKENS | {"stream": True}}
    texts: list[str] = []
    async with serving(sampler) as url, opened(url) as http:
        for name, fields in cases.items():
            sampler.completions.append(scripted(name))
            texts.append(await responses(http, {name: ASK | fields}))
        texts.append(await responses(http, {"models": "/v1/models", "health": "/health"}))
    check("scripted_sampler", "".join(texts))


async def test_the_scripted_policy() -> None:
    def act(body: dict[str, Any]) -> Action:
        if body["messages"][0]["content"] == "fall":
            raise ValueError("it fell")
        return Action("It is there.", (("look_up", '{"box": 7}'),) * 2) if body.get("tools") else Action("On shelf 7.")

    sampler = PolicySampler(act)
    cases = {name: ASK | fields for name, fields in ANSWERED.items()}
    cases["one call"] = ASK | {"tools": [TOOL], "parallel_tool_calls": False}
    cases |= {"image": ASK | {"messages": PARTS}, "fall": ASK | {"messages": [{"role": "user", "content": "fall"}]}}
    async with serving(sampler) as url, opened(url) as http:
        text = await responses(http, cases)
        sampler.refusals.append((400, "too long"))
        sampler.refused_field = "messages"
        text += await responses(http, {"refused": ASK})
    check("scripted_policy", text)


async def test_a_model_with_tools_built_in(obedient: ScriptedServer) -> None:  # noqa: F811
    model = TrainableModel(name=new_id("tools"), base_model="tiny", backend=RemoteBackend(obedient.url))
    ask = {"model": "", "messages": [{"role": "user", "content": 'order_status(order="4000")'}]}
    cases: dict[str, Any] = {
        "whole": {},
        "streamed": {"stream": True},
        "streamed, usage": USAGE,
        "another model": {"model": "x"},
        "tools": {"tools": [TOOL]},
        "no messages": {"messages": []},
        "image": {"messages": PARTS},
        "last is not the user's": {"messages": [{"role": "assistant", "content": "a"}]},
        "too many": {"n": 2},
    }
    async with endpoint(model) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            text = await responses(http, {name: ask | fields for name, fields in cases.items()})
            text += await responses(http, {"no JSON": "{", "models": "/v1/models", "health": "/health"})
    async with (
        endpoint(model, key="secret") as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http,
    ):
        text += await responses(http, {"without the key": "/v1/models"})
    check("mcp_serve", text)
