"""What Anthropic's own client gets of the gateway: answers, streams, tools, thoughts, errors; and what is recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from offbook.base.types import Call, CallStatus
from offbook.server.errors import StoreFullError
from offbook.testing import Action, ScriptedServer, scripted_server
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedCompletion

RAW = '{"box":  7, "shelf" : null}'
"""Arguments as no serialiser writes them."""
TOOLS: list[Any] = [
    {"name": "look_up", "description": "Where a box is", "input_schema": {"type": "object", "properties": {}}}
]
TASK: list[Any] = [{"role": "user", "content": "Where is box 7?"}]
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def policy(body: Any) -> Action:
    """Look something up twice, once with broken JSON, then answer."""
    if body["messages"][-1]["role"] == "tool":
        return Action("It is on shelf 7.")
    return Action("I look.", calls=(("look_up", RAW), ("look_up", '{"box": 7')))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(policy, tmp_path_factory.mktemp("messages")) as running:
        yield running


def client(server: ScriptedServer, trajectory: str, **fields: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{server.url}/t/{trajectory}", api_key="any", max_retries=0, **fields)


def said(api: anthropic.Anthropic, messages: list[Any], *, stream: bool) -> Any:
    fields: Any = {"model": "default", "max_tokens": 8_000, "tools": TOOLS, "messages": messages}
    if not stream:
        return api.messages.create(**fields)
    with api.messages.stream(**fields) as events:
        return events.get_final_message()


def extends(calls: tuple[Call, ...]) -> bool:
    sampled = [*calls[0].prompt_ids, *calls[0].outputs[0].token_ids]
    return list(calls[1].prompt_ids[: len(sampled)]) == sampled


def test_the_arguments_are_restored_after_a_restart(tmp_path: Path) -> None:
    with scripted_server(policy, tmp_path) as server:
        first = said(client(server, "t"), TASK, stream=False)
    with scripted_server(policy, tmp_path) as server:
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"]} for block in blocks if block["type"] == "tool_use"
        ]
        turns = [*TASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        said(client(server, "t"), turns, stream=False)
        assert extends(server.calls("t"))


def test_every_event_of_a_stream_is_one_of_the_sdks_types(server: ScriptedServer) -> None:
    body = {"model": "default", "max_tokens": 64, "stream": True, "tools": TOOLS, "messages": TASK}
    lines = httpx.post(f"{server.url}/v1/messages?beta=true", json=body, trust_env=False).text.split("\n\n")
    events = [event.split("\n") for event in lines if event]
    for name, data in events:
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENT.validate_python(value, strict=False)
    kinds = [name.removeprefix("event: ") for name, _ in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_what_claude_code_sends_beside_the_conversation(server: ScriptedServer) -> None:
    """A block whose hash changes, a system message in the middle, tools that load later, a model of its own."""

    def request(hash_: str, note: Any, *more: Any) -> list[Any]:
        body = {
            "model": "claude-sonnet-4-5",
            "max_tokens": 32_000,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={hash_}"},
                {"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}},
            ],
            "tools": [*TOOLS, {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}],
            "messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": note}, *more],
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
        }
        url = f"{server.url}/m/default/t/cc-{hash_}/v1/messages?beta=true"
        answer = httpx.post(url, json=body, trust_env=False)
        assert answer.status_code == 200, answer.text
        return list(server.calls(f"cc-{hash_}"))

    [one] = request("1", [{"type": "text", "text": "Be brief."}])
    [two] = request("2", "Be brief.")
    assert one.prompt_ids == two.prompt_ids
    assert [message["role"] for message in one.messages] == ["system", "user", "system"]
    assert one.messages[0]["content"] == "Help."
    assert one.tools is not None and [tool["function"]["name"] for tool in one.tools] == ["look_up"]
    found = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    turns = [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "look_up", "input": {}}]}]
    [three] = request("3", "Be brief.", *turns, {"role": "user", "content": [found]})
    assert three.tools is not None and [tool["function"]["name"] for tool in three.tools] == ["look_up", "later"]


def test_images_of_results_follow_all_results(server: ScriptedServer) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    results = [{"type": "tool_result", "tool_use_id": name, "content": [image]} for name in ("a", "b")]
    answer = httpx.post(
        f"{server.url}/v1/messages",
        json={"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": results}]},
        trust_env=False,
    )
    assert answer.status_code == 400 and "not a multimodal model" in answer.json()["error"]["message"]
    sent = server.sampler.received[-1]["messages"]
    assert [message["role"] for message in sent] == ["tool", "tool", "user"]
    assert [part["type"] for part in sent[2]["content"]] == ["image_url"] * 2


def test_tool_calls_in_consecutive_turns_of_the_assistant_are_one_message(server: ScriptedServer) -> None:
    calls = [{"type": "tool_use", "id": name, "name": "look_up", "input": {}} for name in ("a", "b")]
    results: list[Any] = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in ("b", "a")]
    turns: list[Any] = [{"role": "assistant", "content": [call]} for call in calls]
    said(client(server, "joined"), [*TASK, *turns, {"role": "user", "content": results}], stream=False)
    _, both, *_ = server.sampler.received[-1]["messages"]
    assert [call["id"] for call in both["tool_calls"]] == ["a", "b"]


def test_thoughts_come_back_as_they_were_sampled(server: ScriptedServer) -> None:
    thought = {"type": "thinking", "thinking": " Box 7?\n", "signature": "call-x"}
    turns = [*TASK, {"role": "assistant", "content": [thought, {"type": "text", "text": "A"}]}, *TASK]
    said(client(server, "thought"), turns, stream=False)
    [call] = server.calls("thought")
    assert call.messages[1] == {"role": "assistant", "content": "A", "reasoning": " Box 7?\n"}


@pytest.mark.parametrize("content", ["The box", [{"type": "text", "text": "The box"}]])
def test_a_text_of_the_assistant_at_the_end_is_continued(server: ScriptedServer, content: Any) -> None:
    said(client(server, "prefill"), [*TASK, {"role": "assistant", "content": content}], stream=False)
    sent = server.sampler.received[-1]
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    for last in ("", [{"type": "tool_use", "id": "x", "name": "look_up", "input": {}}]):
        said(client(server, "no-prefill"), [*TASK, {"role": "assistant", "content": last}], stream=False)
        assert "continue_final_message" not in server.sampler.received[-1]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "words"),
    [
        ("POST", "/v1/messages", {"messages": TASK, "max_tokens": 64}, 400, "invalid_request_error", "model"),
        ("POST", "/v1/messages", {"model": "nobody", "max_tokens": 64, "messages": TASK}, 404, "not_found_error", "nobody"),
        ("POST", "/v1/messages", {"model": "default", "messages": "hi"}, 400, "invalid_request_error", "messages"),
        ("POST", "/v1/messages", {"model": "default", "messages": TASK, "mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        ("POST", "/v1/messages", {"model": "default", "messages": TASK, "tools": [{"type": "code_execution_20260521", "name": "code_execution"}]}, 400, "invalid_request_error", "code_execution_20260521"),
        ("POST", "/v1/messages", {"model": "default", "messages": TASK, "tools": [{"input_schema": {}}]}, 400, "invalid_request_error", "tools.name"),
        ("GET", "/v1/messages", None, 405, "invalid_request_error", "POST"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(
    server: ScriptedServer, method: str, path: str, body: Any, status: int, kind: str, words: str
) -> None:
    answer = httpx.request(method, server.url + path, json=body, trust_env=False)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), error
    assert words in error["error"]["message"]


def test_embeddings_are_refused_by_name(server: ScriptedServer) -> None:
    answer = httpx.post(f"{server.url}/t/x/v1/embeddings", json={}, trust_env=False)
    assert (
        answer.status_code == 404
        and "embeddings are not what a language model answers" in answer.json()["error"]["message"]
    )


def test_a_repeated_key_is_answered_from_the_record(server: ScriptedServer) -> None:
    api = client(server, "again", default_headers={"idempotency-key": "k"})
    first = said(api, TASK, stream=False)
    for stream in (False, True):
        again = said(api, TASK, stream=stream)
        assert again.id == first.id
        assert [block.to_dict() for block in again.content if block.type == "tool_use"] == [
            block.to_dict() for block in first.content if block.type == "tool_use"
        ]
    assert len(server.calls("again")) == 1


def test_a_mutation_of_a_request_is_never_an_error_of_the_server(server: ScriptedServer) -> None:
    from random import Random

    dice = Random(5)
    odd: list[Any] = [None, True, -1, 1e300, "", "x", [], {}, [[]], [{}], {"type": "text"}, {"type": "tool_use"}]
    block: list[Any] = [
        {"type": "text", "text": "a"},
        {"type": "thinking", "thinking": "b", "signature": "c"},
        {"type": "tool_use", "id": "d", "name": "look_up", "input": {"e": 1}},
    ]
    result = {"type": "tool_result", "tool_use_id": "d", "content": [{"type": "text", "text": "f"}], "is_error": True}
    plain: Any = {
        "model": "default",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "g"}],
        "messages": [*TASK, {"role": "assistant", "content": block}, {"role": "user", "content": [result]}],
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "look_up"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "output_config": {"effort": "low"},
    }
    statuses: set[int] = set()
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for _ in range(60):
            body = json.loads(json.dumps(plain))
            for _ in range(dice.randint(1, 2)):
                mutate(body, dice, odd)
            answer = http.post("/v1/messages", content=json.dumps(body), headers={"content-type": "application/json"})
            assert answer.status_code < 500, (body, answer.text)
            statuses.add(answer.status_code)
    assert {200, 400} <= statuses


def mutate(value: Any, dice: Any, odd: list[Any]) -> None:
    """Replace one value somewhere inside."""
    while True:
        keys = list(cast(Any, value)) if isinstance(value, dict) else list(range(len(value)))
        key = dice.choice(keys)
        inside = value[key]
        if not (isinstance(inside, dict | list) and inside) or dice.random() < 0.3:
            value[key] = dice.choice(odd)
            return
        value = inside


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sampler_that_dies_is_anthropics_error_and_a_failed_call(gateway: Gateway, stream: bool) -> None:
    dying = ScriptedCompletion(dies_after=1 if stream else 0)
    gateway.sampler.completions.extend([dying, dying])
    body = {"model": "default", "max_tokens": 64, "stream": stream, "messages": TASK}
    answer = await gateway.http.post("/t/t1/v1/messages", json=body)
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    error = events[-1] if stream else answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert answer.status_code == (200 if stream else 502)
    if stream:
        assert [event["type"] for event in events[:3]] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
        ]
    assert {call.status for call in await gateway.calls("t1")} == {CallStatus.FAILED}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_recorded_is_not_shown_as_complete(
    gateway: Gateway, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any) -> Call:
        raise StoreFullError("no space left on the disk")

    monkeypatch.setattr(gateway.services.store, "add_call", full)
    body = {"model": "default", "max_tokens": 64, "stream": stream, "messages": TASK}
    answer = await gateway.http.post("/t/t1/v1/messages", json=body)
    assert "no space left" in answer.text and "message_stop" not in answer.text and "end_turn" not in answer.text
    assert answer.status_code == (200 if stream else 507)
