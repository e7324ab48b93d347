"""The engine over HTTP: vLLM's dialect, adapters, and clients that vanish."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import Qwen2ForCausalLM

from offbook.base.types import Json
from offbook.engine.inference.decoding.batch import RunningBatch
from offbook.engine.inference.decoding.model import ModelRunner
from offbook.engine.inference.service import ChatRenderer
from tests.engine.inference.engines import DEADLINE, plain_logits
from tests.engine.inference.served import body, chat, events, refused, served, until_idle


def test_an_answer_carries_prompt_ids_completion_ids_and_logprobs(
    http: httpx.Client, policy: ModelRunner, plain: Qwen2ForCausalLM
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


def test_a_dead_engine_is_unhealthy(policy: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> RunningBatch:
        raise RuntimeError("the device is gone")

    with served(policy) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        assert http.get("/health").status_code == 200
        monkeypatch.setattr("offbook.engine.inference.decoding.scheduler.RunningBatch", refuses)
        answer = http.post("/v1/chat/completions", json=body())
        assert answer.status_code == 500 and "the device is gone" in answer.text
        until = time.monotonic() + DEADLINE
        while http.get("/health").status_code != 503:  # the call fails a moment before the thread does
            assert time.monotonic() < until, "the death was not told in time"


def test_a_defect_is_an_answer_that_says_its_kind(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    with monkeypatch.context() as patched:
        patched.setattr(ChatRenderer, "prompt_ids", broken)
        error = refused(http, 500)
    assert error["message"] == "ZeroDivisionError: nobody foresaw this"
    assert chat(http)["choices"]


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


def test_template_options_reach_the_template(http: httpx.Client, policy: ModelRunner) -> None:
    ids = chat(http, chat_template_kwargs={"prefix": "Well,"}, return_token_ids=True)["prompt_token_ids"]
    assert policy.tokenizer.decode(ids).endswith("assistant\nWell,")  # type: ignore[union-attr]  # one text


def test_a_past_calls_arguments_are_rendered_as_they_were_written(http: httpx.Client, policy: ModelRunner) -> None:
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
