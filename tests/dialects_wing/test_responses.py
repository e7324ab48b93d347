"""What OpenAI's own client gets of the gateway's Responses API: answers, streams, tools, thoughts, errors; what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from offbook.base.types import Call
from offbook.server.calls.sampled_calls import SampledCalls, TrajectoryCalls
from offbook.server.dialects import DialectRequest
from offbook.server.errors import ApiError
from offbook.testing import Action, ScriptedServer, scripted_server
from offbook_dialects.responses import Responses
from offbook_dialects.responses.answer import ResponseAnswer

RAW = '{"box":  7, "shelf" : null}'
"""Arguments as no serialiser writes them."""
BROKEN = '{"box": 7'
TOOLS: list[Any] = [
    {"type": "function", "name": "look_up", "description": "Where a box is", "parameters": {"type": "object"}}
]
TASK: list[Any] = [{"role": "user", "content": "Where is box 7?"}]
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


class NoRecord(SampledCalls):
    """No call is recorded."""

    def __init__(self) -> None:
        """Without a store."""

    async def call(self, call_id: str) -> Call | None:
        return None


def understood(items: Any) -> list[Any]:
    request = DialectRequest({"model": "default", "input": items}, {}, {}, TrajectoryCalls(), NoRecord())
    return asyncio.run(Responses().translate(request)).body["messages"]


def policy(body: Any) -> Action:
    """Look something up twice, once with broken JSON, then answer. To "patch": call what takes free text."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return Action("It is on shelf 7.")
    if last["content"] == "patch":
        return Action(calls=(("fs__patch", '{"input":  "*** Begin"}'),))
    if last["content"] == "hello":
        return Action("Hi.")
    return Action("I look.", calls=(("look_up", RAW), ("look_up", BROKEN)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(policy, tmp_path_factory.mktemp("responses")) as running:
        yield running


def client(server: ScriptedServer, trajectory: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/t/{trajectory}/v1", api_key="any", max_retries=0)


def said(api: openai.OpenAI, given: Any, *, stream: bool = False, **more: Any) -> Any:
    fields: Any = {"model": "default", "tools": TOOLS, "input": given} | more
    if not stream:
        return api.responses.create(**fields)
    with api.responses.stream(**fields) as events:
        return events.get_final_response()


def results(response: Any) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "shelf 7"}
        for item in response.output
        if item.type == "function_call"
    ]


def extends(calls: tuple[Call, ...]) -> bool:
    sampled = [*calls[0].prompt_ids, *calls[0].outputs[0].token_ids]
    return list(calls[1].prompt_ids[: len(sampled)]) == sampled


def posted(server: ScriptedServer, trajectory: str = "", **body: Any) -> httpx.Response:
    prefix = f"/t/{trajectory}" if trajectory else ""
    fields = {"model": "default", "input": TASK} | body
    return httpx.post(f"{server.url}{prefix}/v1/responses", json=fields, trust_env=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["items", "dumped", "re-serialised", "previous", "references"])
def test_a_loop_of_two_calls_extends_its_prompt(server: ScriptedServer, stream: bool, how: str) -> None:
    """However the client sends back what the model said."""
    name = f"loop-{how}-{stream}"
    api = client(server, name)
    first = said(api, TASK, stream=stream, instructions="Help.")
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert first.status == "completed"
    more: Any = {}
    items = [item.to_dict() for item in first.output]
    if how == "previous":
        given, more = results(first), {"previous_response_id": first.id}
    elif how == "references":
        given = [*TASK, *({"type": "item_reference", "id": item["id"]} for item in items), *results(first)]
    else:
        if how == "re-serialised":
            items[1]["arguments"] = json.dumps(json.loads(RAW))
        if how == "items":
            items = [{key: value for key, value in item.items() if key != "id"} for item in items]
        given = [*TASK, *items, *results(first)]
    second = said(api, given, stream=stream, instructions="Help.", **more)
    assert second.output_text == "It is on shelf 7."
    calls = server.calls(name)
    assert len(calls) == 2 and extends(calls)
    assert second.usage.input_tokens == len(calls[1].prompt_ids)
    sent = calls[1].messages
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "tool"]
    assert [call["function"]["arguments"] for call in sent[2]["tool_calls"]] == [RAW, BROKEN]
    assert sent[2]["content"] == "I look."


def test_the_record_is_the_store_across_a_restart(tmp_path: Path) -> None:
    with scripted_server(policy, tmp_path) as server:
        first = said(client(server, "t"), TASK)
    with scripted_server(policy, tmp_path) as server:
        api = client(server, "t")
        said(api, results(first), previous_response_id=first.id)
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        said(api, [*TASK, *references, *results(first)])
        _, second, third = server.calls("t")
        assert second.prompt_ids == third.prompt_ids and extends((server.calls("t")[0], second))


def test_instructions_are_of_one_response_and_system_items_stay(server: ScriptedServer) -> None:
    api = client(server, "instructed")
    first = said(api, [{"role": "developer", "content": "Be kind."}, *TASK], instructions="Be brief.")
    second = said(api, results(first), previous_response_id=first.id, instructions="Be long.")
    said(api, "more", previous_response_id=second.id)
    roles = ["user", "assistant", "tool", "tool", "assistant", "user"]
    messages = server.calls("instructed")[2].messages
    assert [message["role"] for message in messages] == ["developer", *roles]
    assert server.calls("instructed")[1].messages[0]["content"] == "Be long."
    third = said(api, [{"role": "system", "content": "Stay."}, *TASK])
    said(api, results(third), previous_response_id=third.id)
    assert server.calls("instructed")[4].messages[0] == {"role": "system", "content": "Stay."}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_call-0"}, "previous_response_id"),
        ({"previous_response_id": "resp_of_openai"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_call-0"}]}, "input[0]"),
    ],
)
def test_what_is_not_recorded_is_not_found(server: ScriptedServer, body: Any, param: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not found") as caught:
        client(server, "lost").responses.create(model="default", **({"input": TASK} | body))
    assert caught.value.param == param and not server.calls("lost")


@pytest.mark.parametrize("text", ["Where is box 7?", "patch", "hello"])
def test_every_event_of_a_stream_is_one_of_the_sdks_types(server: ScriptedServer, text: str) -> None:
    patch = {"type": "namespace", "name": "fs", "description": "Files", "tools": [{"type": "custom", "name": "patch"}]}
    answer = posted(server, f"events-{text[:5]}", stream=True, tools=[*TOOLS, patch], input=text)
    framed = [event.split("\n") for event in answer.text.split("\n\n") if event]
    events = [json.loads(data.removeprefix("data: ")) for _, data in framed]
    assert [name for name, _ in framed] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=False)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    output = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == output
    for index, item in enumerate(output):
        placed = [event for event in events if event.get("output_index") == index]
        assert added[index] == item["id"] and {event.get("item_id", item["id"]) for event in placed} == {item["id"]}
        pieces = "".join(event["delta"] for event in placed if event["type"].endswith(".delta"))
        shown = item["content"][0]["text"] if item["type"] == "message" else item.get("arguments", item.get("input"))
        assert pieces == shown
    whole = posted(server, f"whole-{text[:5]}", tools=[*TOOLS, patch], input=text).json()
    Response.model_validate(whole, strict=False)
    assert whole.keys() == events[-1]["response"].keys()
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in output]


def test_custom_tools_and_namespaces_of_codex(server: ScriptedServer) -> None:
    """Free text comes out of the arguments and goes back into what was sampled."""
    tools: list[Any] = [
        {"type": "namespace", "name": "fs", "description": "Files", "tools": [{"type": "custom", "name": "patch"}]},
        {"type": "web_search", "external_web_access": False},
    ]
    api = client(server, "codex")
    first = said(api, [{"role": "user", "content": "patch"}], tools=tools)
    [call] = first.output
    assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "fs", "patch", "*** Begin")
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    said(api, [{"role": "user", "content": "patch"}, call.to_dict(), result], tools=tools)
    calls = server.calls("codex")
    assert extends(calls) and calls[1].tools is not None
    assert [tool["function"]["name"] for tool in calls[1].tools] == ["fs__patch"]


def test_strict_is_what_the_client_says_and_no_default(server: ScriptedServer) -> None:
    for number, strict in enumerate((None, True)):
        assert posted(server, f"strict-{number}", tools=[TOOLS[0] | {"strict": strict}]).status_code == 200
    shown: list[Any] = [server.calls(f"strict-{number}")[0].tools or () for number in (0, 1)]
    assert [tools[0]["function"].get("strict") for tools in shown] == [None, True]


def test_images_of_results_follow_all_results() -> None:
    calls = [{"type": "function_call", "call_id": name, "name": "look_up", "arguments": "{}"} for name in "ab"]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    outputs = [
        {"type": "function_call_output", "call_id": name, "output": [{"type": "input_text", "text": name}, image]}
        for name in "ab"
    ]
    messages = understood([*TASK, *calls, *outputs, {"role": "user", "content": [image]}])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user", "user"]
    assert [part["type"] for part in messages[4]["content"]] == ["image_url", "image_url"]


HOOK = {"type": "message", "role": "developer", "content": "The hook has checked it."}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Next."}]}


@pytest.mark.parametrize(
    ("between", "after", "roles"),
    [
        (
            [HOOK],
            [],
            ["user", "assistant", "tool", "tool", "developer"],
        ),  # a hook of Codex: deepseek-ai/DeepSeek-V3#1588
        ([THOUGHT], [], ["user", "assistant", "tool", "tool", "assistant"]),  # awesome-deepseek-integration#740
        ([HOOK, THOUGHT], [HOOK], ["user", "assistant", "tool", "tool", "developer", "assistant", "developer"]),
    ],
)
def test_a_result_belongs_to_its_call_whatever_stands_between_them(between: Any, after: Any, roles: list[str]) -> None:
    calls = [{"type": "function_call", "call_id": name, "name": "look_up", "arguments": "{}"} for name in "ab"]
    first, second = ({"type": "function_call_output", "call_id": name, "output": name} for name in "ab")
    messages = understood([*TASK, *calls, *between, first, *after, second])
    assert [message["role"] for message in messages] == roles
    assert [message["tool_call_id"] for message in messages[2:4]] == ["a", "b"]
    orphan = understood([*TASK, calls[0], first, HOOK, first])
    assert [message["role"] for message in orphan] == ["user", "assistant", "tool", "developer", "tool"]


ANSWER: Any = {
    "choices": [
        {
            "finish_reason": "length",
            "message": {
                "role": "assistant",
                "content": "I look.",
                "reasoning": "Where, \u00fc?",
                "tool_calls": [
                    {"id": name, "type": "function", "function": {"name": "look_up", "arguments": BROKEN}}
                    for name in "ab"
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}


def rendering(**body: Any) -> ResponseAnswer:
    fields = {"model": "default", "input": TASK, "tools": TOOLS} | body
    request = DialectRequest(fields, {}, {}, TrajectoryCalls(), NoRecord())
    answer = asyncio.run(Responses().translate(request)).rendering
    assert isinstance(answer, ResponseAnswer)
    return answer


def streamed() -> list[Any]:
    """Chunks of the answer: thoughts, text and arguments by characters."""
    message = ANSWER["choices"][0]["message"]
    deltas: list[Any] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": letter} for letter in message["reasoning"]]
    deltas += [{"content": letter} for letter in message["content"]]
    for index, call in enumerate(message["tool_calls"]):
        begun = call | {"index": index, "function": call["function"] | {"arguments": ""}}
        deltas += [{"tool_calls": [begun]}]
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": letter}}]} for letter in BROKEN]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    return [*chunks, last, {"choices": [], "usage": ANSWER["usage"]}]


def read(events: bytes) -> list[Any]:
    found = [json.loads(item.split(b"data: ", 1)[1]) for item in events.split(b"\n\n") if item]
    for event in found:
        EVENT.validate_python(event, strict=False)
    return found


@pytest.mark.parametrize("kept", ["all", "content", "encrypted_content"])
def test_thoughts_survive_both_ways_and_a_turn_is_one_message(kept: str) -> None:
    """Also where a client keeps no content of them, as with `store: false`."""
    include = ["reasoning.encrypted_content"]
    whole: Any = rendering(include=include).whole(ANSWER, "call-1")
    Response.model_validate(whole, strict=False)
    stream = rendering(include=include)
    events = read(stream.start("call-1") + b"".join(map(stream.feed, streamed())) + stream.end())
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["response"]["output"] == whole["output"] and events[-1]["response"]["usage"] == whole["usage"]
    assert [item["id"] for item in whole["output"]] == ["rs_call-1", "msg_call-1", "fc_call-1_0", "fc_call-1_1"]
    items = whole["output"]
    if kept != "all":
        items = [{name: value for name, value in item.items() if name != "id"} for item in items]
        items[0] = {"type": "reasoning", "summary": [], kept: items[0][kept]}
    [message] = understood(items)
    assert message == ANSWER["choices"][0]["message"]


def test_a_stream_that_breaks_ends_as_a_failed_response() -> None:
    stream = rendering()
    events = stream.start("call-1")
    for chunk in streamed()[:12]:
        events += stream.feed(chunk)
    failed = read(events + stream.error(ApiError(502, "the sampler died")))[-1]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the sampler died"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"made_up": 1}, "made_up"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}]}, None),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": "hi", "tool_choice": {"type": "web_search"}, "tools": TOOLS}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(server: ScriptedServer, body: Any, param: str | None) -> None:
    answer = posted(server, "refused", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in (None, error["param"]) and error["type"] == "invalid_request_error"
    assert not server.calls("refused")


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_request_gets_the_recorded_answer(server: ScriptedServer, stream: bool) -> None:
    name = f"repeated-{stream}"
    given: Any = {"model": "default", "input": TASK, "tools": TOOLS, "stream": stream}
    url, headers = f"{server.url}/t/{name}/v1/responses", {"idempotency-key": "k"}
    answers = [httpx.post(url, json=given, headers=headers, trust_env=False) for _ in range(2)]
    if stream:
        output = [json.loads(answer.text.rsplit("data: ", 1)[1])["response"]["output"] for answer in answers]
    else:
        output = [answer.json()["output"] for answer in answers]
    assert output[0] == output[1] and len(output[0]) == 3
    assert len(server.calls(name)) == 1


def test_other_methods_and_paths_of_the_api_are_refused(server: ScriptedServer) -> None:
    for method, path, status, words in (
        ("GET", "/v1/responses", 405, "GET"),
        ("GET", "/v1/responses/resp_1", 404, "GET"),
        ("DELETE", "/v1/responses/resp_1", 404, "DELETE"),
        ("POST", "/v1/responses/resp_1/cancel", 404, "POST"),
    ):
        answer = httpx.request(method, server.url + path, trust_env=False)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
