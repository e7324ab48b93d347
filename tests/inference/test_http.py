"""The engine over HTTP: vLLM's dialect, refusals by field, and clients that vanish."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from engines import CONTEXT, DEADLINE, SPECIAL, plain_logits, until_healthy
from transformers import Qwen2ForCausalLM

from understudy.engine.inference.app import build_app
from understudy.engine.inference.batch import Batch
from understudy.engine.inference.policy import Policy
from understudy.engine.inference.service import SamplingService
from understudy.types import Json

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"size": {"type": "string", "enum": ["small", "large"]}},
                "required": ["size"],
            },
        },
    }
    for name in ("open_box", "close_box")
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}

LONG = "abcd" * 5000
IMAGE: Json = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LONG}"}}


@contextmanager
def served(policy: Policy) -> Iterator[str]:
    """A real server of the real app, in a thread; its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    service = SamplingService(policy, name="base", max_batch=4)
    server = uvicorn.Server(uvicorn.Config(build_app(service), log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    until_healthy(address)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        listener.close()


@pytest.fixture(scope="module")
def url(policy: Policy) -> Iterator[str]:
    with served(policy) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE) as client:
        yield client


def body(**fields: Json) -> dict[str, Json]:
    return {"model": "base", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, **fields}


def chat(http: httpx.Client, **fields: Json) -> Json:
    answer = http.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, **fields: Json) -> list[Json]:
    answer = http.post("/v1/chat/completions", json=body(stream=True, **fields))
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(http: httpx.Client, status: int = 400, **fields: Json) -> Json:
    answer = http.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def says(policy: Policy, patched: pytest.MonkeyPatch, text: str) -> None:
    """The model answers the next call with this text and ends."""
    rest = iter([*policy.tokenizer.encode(text, add_special_tokens=False), *policy.eos])

    def surely(*_: object) -> torch.Tensor:
        return torch.full((1, policy.vocabulary), -50.0).index_fill_(1, torch.tensor([next(rest)]), 50.0)

    patched.setattr(policy, "prefill", surely)
    patched.setattr(policy, "decode", surely)


def until_idle(http: httpx.Client) -> None:
    until = time.monotonic() + DEADLINE
    while http.get("/health").json()["running"]:
        assert time.monotonic() < until, "a slot was not freed in time"


def test_an_answer_carries_prompt_ids_completion_ids_and_logprobs(
    http: httpx.Client, policy: Policy, plain: Qwen2ForCausalLM
) -> None:
    answer = chat(http, logprobs=True, return_token_ids=True, top_logprobs=2, ignore_eos=True)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_token_ids"] == policy.tokenizer.encode(text, add_special_tokens=False)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    expected = plain_logits(plain, answer["prompt_token_ids"], choice["token_ids"]).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0].tolist()
    assert [entry["logprob"] for entry in content] == pytest.approx(chosen, abs=1e-5)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 12
    assert answer["object"] == "chat.completion"


def test_ids_and_logprobs_are_given_only_when_asked_for(http: httpx.Client) -> None:
    answer = chat(http)
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


def test_n_choices_of_a_seed_differ_and_come_again(http: httpx.Client) -> None:
    one, other = (chat(http, n=3, seed=-5, return_token_ids=True) for _ in range(2))
    ids = [choice["token_ids"] for choice in one["choices"]]
    assert ids == [choice["token_ids"] for choice in other["choices"]]
    assert len({tuple(each) for each in ids}) == 3
    assert [choice["index"] for choice in one["choices"]] == [0, 1, 2]


def test_a_stream_adds_up_to_the_whole_answer(http: httpx.Client) -> None:
    fields: dict[str, Json] = {"seed": 4, "logprobs": True, "return_token_ids": True, "n": 2, "max_tokens": 40}
    whole = chat(http, **fields)
    chunks = events(http, stream_options={"include_usage": True}, **fields)
    assert [chunk.get("prompt_token_ids") for chunk in chunks[:2]] == [whole["prompt_token_ids"]] * 2
    assert not any("prompt_token_ids" in chunk for chunk in chunks[2:])
    assert chunks[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [token for part in mine[1:] for token in part["token_ids"]] == choice["token_ids"]
        logprobs = [entry["logprob"] for part in mine[1:] for entry in part["logprobs"]["content"]]
        assert logprobs == pytest.approx([entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-6)
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_stop_strings_cut_the_text_but_not_the_ids(http: httpx.Client) -> None:
    free = chat(http, temperature=0, return_token_ids=True, max_tokens=30)["choices"][0]
    text = free["message"]["content"]
    stop = text[8:11]
    for chunked in (False, True):
        if chunked:
            parts = [
                chunk["choices"][0]
                for chunk in events(http, temperature=0, stop=[stop], return_token_ids=True, max_tokens=30)
            ]
            shown = "".join(part["delta"].get("content", "") for part in parts)
            ids, last = [token for part in parts[1:] for token in part["token_ids"]], parts[-1]
        else:
            last = chat(http, temperature=0, stop=stop, return_token_ids=True, max_tokens=30)["choices"][0]
            shown, ids = last["message"]["content"], last["token_ids"]
        assert shown == text[: text.index(stop)]
        assert ids == free["token_ids"][: len(ids)]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "close_box"}}])
def test_a_forced_tool_choice_is_a_call_of_that_tool(http: httpx.Client, choice: Json, streamed: bool) -> None:
    fields: dict[str, Json] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    if streamed:
        parts = [chunk["choices"][0] for chunk in events(http, **fields)]
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0]
        finish = parts[-1]["finish_reason"]
    else:
        answer = chat(http, **fields)["choices"][0]
        calls, finish = answer["message"]["tool_calls"], answer["finish_reason"]
        assert answer["message"]["content"] is None
        assert answer["parse_failure"] is False
    assert finish == "tool_calls"
    (call,) = calls
    assert call["function"]["name"] in (["close_box"] if isinstance(choice, dict) else ["open_box", "close_box"])
    assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_a_tag_inside_an_argument_is_part_of_the_argument(
    http: httpx.Client, policy: Policy, monkeypatch: pytest.MonkeyPatch, forced: bool, streamed: bool
) -> None:
    text = "a</tool_call>b"
    properties: Json = {"text": {"type": "string", "enum": [text]}}
    say: Json = {"name": "say", "parameters": {"type": "object", "properties": properties, "required": ["text"]}}
    fields: dict[str, Json] = {"tools": [{"type": "function", "function": say}], "max_tokens": 200}
    if forced:
        fields |= {"tool_choice": {"type": "function", "function": {"name": "say"}}, "parallel_tool_calls": False}
    with monkeypatch.context() as patched:
        if not forced:
            says(policy, patched, f'<tool_call>\n{{"name": "say", "arguments": {{"text": "{text}"}}}}\n</tool_call>')
        if streamed:
            parts = [chunk["choices"][0] for chunk in events(http, **fields)]
            calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
            content, last = "".join(part["delta"].get("content", "") for part in parts), parts[-1]
        else:
            last = chat(http, **fields)["choices"][0]
            calls, content = last["message"]["tool_calls"], last["message"]["content"] or ""
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"text": text}]
    assert (content, last["finish_reason"], last["parse_failure"]) == ("", "tool_calls", False)


def test_an_answer_in_a_schema_is_json_of_that_schema(http: httpx.Client) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    bias = {str(token): -100 for token in (9, 10, 13, 32, 197, 198, 201, 220)}  # random weights love white space
    answer = chat(http, response_format=shape, max_tokens=400, logit_bias=bias)["choices"][0]
    assert json.loads(answer["message"]["content"]).keys() == {"ok"}
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("forced", [False, True])
def test_under_a_grammar_control_tokens_only_begin_and_end_calls(
    http: httpx.Client, policy: Policy, forced: bool
) -> None:
    schema: Json = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 5, "maxLength": 20}},
        "required": ["text"],
        "additionalProperties": False,
    }
    shape: Json = {"type": "json_schema", "json_schema": {"schema": schema}}
    tool: Json = {"type": "function", "function": {"name": "say", "parameters": schema}}
    shaped: dict[str, Json] = {"tools": [tool], "tool_choice": "required"} if forced else {"response_format": shape}
    marks = [policy.tokenizer.convert_tokens_to_ids(text) for text in (*SPECIAL, "<tool_call>", "</tool_call>")]
    bias = {str(mark): 100 for mark in marks} | {str(token): -100 for token in (197, 198, 220)}  # no long white space
    answer = chat(http, **shaped, parallel_tool_calls=False, max_tokens=300, logit_bias=bias, return_token_ids=True)
    choice = answer["choices"][0]
    assert [token for token in choice["token_ids"] if token in marks] == (
        [*marks[3:], marks[2]] if forced else [marks[2]]
    )
    said = choice["message"]["tool_calls"][0]["function"]["arguments"] if forced else choice["message"]["content"]
    assert 5 <= len(json.loads(said)["text"]) <= 20


@pytest.mark.parametrize("begin", ["{", "<tool_call>"])
def test_with_tools_a_schema_shapes_the_answer_and_calls_stay_possible(
    http: httpx.Client, policy: Policy, begin: str
) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    bias = {str(policy.tokenizer.convert_tokens_to_ids(begin)): 100} | {str(token): -100 for token in (197, 198, 220)}
    fields: dict[str, Json] = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200, "logit_bias": bias}
    answer = chat(http, response_format=shape, **fields)["choices"][0]
    if begin == "{":
        assert json.loads(answer["message"]["content"]).keys() == {"ok"}
        assert answer["finish_reason"] == "stop"
    else:
        (call,) = answer["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")
    plain = chat(http, response_format=shape, tool_choice="none", **fields)["choices"][0]
    assert not plain["message"].get("tool_calls")


def test_a_dead_engine_is_unhealthy(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> Batch:
        raise RuntimeError("the device is gone")

    with served(policy) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        assert http.get("/health").status_code == 200
        monkeypatch.setattr("understudy.engine.inference.scheduler.Batch", refuses)
        answer = http.post("/v1/chat/completions", json=body())
        assert answer.status_code == 500 and "the device is gone" in answer.text
        until = time.monotonic() + DEADLINE
        while http.get("/health").status_code != 503:  # the call fails a moment before the thread does
            assert time.monotonic() < until, "the death was not told in time"


def test_a_token_that_the_model_does_not_know_is_refused_alone(
    http: httpx.Client, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(policy, "vocabulary", 40)
        error = refused(http)
    assert error["param"] == "messages" and "the model knows 0 to 39" in error["message"]


def test_text_is_no_format(http: httpx.Client) -> None:
    assert chat(http, response_format={"type": "text"})["choices"]


def test_adapters_come_and_go_while_calls_are_in_flight(http: httpx.Client, adapter_folders: list[Path]) -> None:
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "m@1", "lora_path": str(adapter_folders[0])})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'm@1' added successfully.")
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "m@1"]
    again = http.post("/v1/load_lora_adapter", json={"lora_name": "m@1", "lora_path": str(adapter_folders[0])})
    assert again.status_code == 400
    with http.stream(
        "POST", "/v1/chat/completions", json=body(model="m@1", stream=True, ignore_eos=True, max_tokens=300)
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "m@1"}).status_code == 200
        last = [line for line in lines if line][-2]
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert refused(http, 404, model="m@1")["param"] == "model"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "m@1"}).status_code == 404


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "adapter_config.json"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"broken"), "adapter_model.safetensors"),
        (lambda path: [file.unlink() for file in path.iterdir()], "adapter_config.json"),
    ],
)
def test_a_broken_adapter_is_refused_and_the_engine_lives_on(
    http: httpx.Client, adapter_folders: list[Path], tmp_path: Path, spoil: object, named: str
) -> None:
    for file in adapter_folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)  # type: ignore[operator]
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(tmp_path)})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert chat(http)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}], "response_format": {"type": "json_object"}}, "tools"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    http: httpx.Client, fields: dict[str, Json], param: str
) -> None:
    error = refused(http, **fields)
    assert error["param"] == param
    assert error["code"] == 400


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"type": "text", "text": "look"}, IMAGE], "messages.1.content.1"),
        ([{"type": "text", "text": 5, "more": LONG}], "messages.1.content.0"),
        ({"text": LONG}, "messages.1.content"),
    ],
)
def test_a_part_that_is_no_text_is_named_and_its_content_shortened(
    http: httpx.Client, messages: Json, named: str
) -> None:
    error = refused(http, messages=[{"role": "user", "content": "hi"}, {"role": "user", "content": messages}])
    assert error["param"] == "messages" and error["message"].startswith(named)
    assert len(error["message"]) < 400
    if "image_url" in str(messages):
        assert "type 'image_url'" in error["message"] and "data:image/png" in error["message"]


def test_other_refusals_are_short_too(http: httpx.Client) -> None:
    call: Json = {"id": "1", "type": "function", "function": LONG}
    for fields in (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": LONG},
        {"top_p": LONG},
        {"tools": [{"type": "function", "function": {"text": LONG}}], "tool_choice": "required"},
    ):
        assert len(refused(http, **fields)["message"]) < 400


def test_an_overlong_context_says_what_to_lower(http: httpx.Client) -> None:
    message = refused(http, max_tokens=CONTEXT)["message"]
    assert str(CONTEXT) in message
    assert "--max-model-len" in message
    assert "lower max_tokens to" in message


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, content: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=content)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_fields_without_effect_and_nulls_are_accepted(http: httpx.Client) -> None:
    assert chat(http, user="me", metadata={"a": "b"}, store=False, stop=None, tools=None, bad_words=None)["choices"]


def test_unknown_names_and_paths_have_openais_error_shape(http: httpx.Client) -> None:
    assert "base" in refused(http, 404, model="other")["message"]
    assert http.get("/nothing").json()["error"]["code"] == 404


def test_template_options_reach_the_template(http: httpx.Client, policy: Policy) -> None:
    ids = chat(http, chat_template_kwargs={"prefix": "Well,"}, return_token_ids=True)["prompt_token_ids"]
    assert policy.tokenizer.decode(ids).endswith("assistant\nWell,")


def test_a_past_calls_arguments_are_rendered_as_they_were_written(http: httpx.Client, policy: Policy) -> None:
    written = '{"b":  1, "a": "\\u00e9"}'
    past = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": written}}],
    }
    messages = [{"role": "user", "content": "x"}, past, {"role": "tool", "tool_call_id": "1", "content": "done"}]
    ids = chat(http, messages=messages, return_token_ids=True)["prompt_token_ids"]
    assert f"<tool_call>f{written}</tool_call>" in policy.tokenizer.decode(ids)


@asynccontextmanager
async def raw_request(
    url: str, fields: dict[str, Json]
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which a chat request was sent, and nothing read yet."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    content = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    yield reader, writer
    writer.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_vanishes_frees_its_slot(url: str, http: httpx.Client, streamed: bool) -> None:
    fields = body(stream=streamed, ignore_eos=True, max_tokens=450, n=4)
    async with raw_request(url, fields) as (reader, _):
        if streamed:
            await asyncio.wait_for(reader.readuntil(b"data: "), DEADLINE)
        else:
            until = time.monotonic() + DEADLINE
            while not (await asyncio.to_thread(http.get, "/health")).json()["running"]:
                assert time.monotonic() < until
    await asyncio.to_thread(until_idle, http)
    assert await asyncio.to_thread(chat, http)


async def test_a_client_that_does_not_read_holds_nobody_up(url: str, http: httpx.Client) -> None:
    async with raw_request(url, body(stream=True, ignore_eos=True, max_tokens=450, logprobs=True, top_logprobs=20)):
        assert (await asyncio.to_thread(chat, http))["choices"]
