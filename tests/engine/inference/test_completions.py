"""Completions of a prompt over HTTP, which no chat template changes: vLLM's `/v1/completions`."""

from __future__ import annotations

import json

import httpx
import pytest
import torch
from openai.types import Completion
from transformers import Qwen2ForCausalLM

from offbook.base.types import Json
from offbook.engine.inference.decoding.model import ModelRunner
from tests.engine.inference.engines import plain_logits
from tests.engine.inference.served import says

PROMPT = "<|im_start|>user\nhello"


def post(http: httpx.Client, **fields: Json) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "base", "prompt": PROMPT, "max_tokens": 12, **fields})


def completed(http: httpx.Client, **fields: Json) -> Json:
    answer = post(http, **fields)
    assert answer.status_code == 200, answer.text
    Completion.model_validate(answer.json())
    return answer.json()


def streamed(http: httpx.Client, **fields: Json) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in post(http, stream=True, **fields).text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_text_prompt_is_tokenized_as_it_stands(
    http: httpx.Client, policy: ModelRunner, plain: Qwen2ForCausalLM
) -> None:
    answer = completed(http, logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True, ignore_eos=True)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == policy.tokenizer.encode(PROMPT, add_special_tokens=False)
    expected = plain_logits(plain, choice["prompt_token_ids"], choice["token_ids"]).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0].tolist()
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(chosen, abs=1e-5)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(choice["token_ids"]) == 12
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert (answer["object"], choice["finish_reason"]) == ("text_completion", "length")
    assert answer["usage"]["completion_tokens"] == 12


def test_token_ids_and_their_text_are_the_same_prompt(http: httpx.Client, policy: ModelRunner) -> None:
    ids = policy.tokenizer.encode(PROMPT, add_special_tokens=False)
    texts = {completed(http, prompt=prompt, seed=3)["choices"][0]["text"] for prompt in (PROMPT, [PROMPT], ids, [ids])}
    assert len(texts) == 1


def test_a_stream_adds_up_to_the_whole_answer(http: httpx.Client, policy: ModelRunner) -> None:
    fields: dict[str, Json] = {"seed": 4, "logprobs": 0, "return_token_ids": True, "n": 2, "max_tokens": 40}
    whole = completed(http, **fields)
    chunks = streamed(http, stream_options={"include_usage": True}, **fields)
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    for choice in whole["choices"]:
        parts = [item for chunk in chunks for item in chunk["choices"] if item["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


def test_sixteen_tokens_are_the_limit_without_one(http: httpx.Client) -> None:
    body = {"model": "base", "prompt": PROMPT, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16
    whole = completed(http, max_tokens=None, ignore_eos=True)["usage"]
    assert whole["total_tokens"] == http.get("/v1/models").json()["data"][0]["max_model_len"]


def test_markup_and_stop_strings_are_text(
    http: httpx.Client, policy: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        says(policy, patched, '<tool_call>\n{"name": "f"}\n</tool_call> and STOP here')
        choice = completed(http, stop="STOP", max_tokens=100)["choices"][0]
    assert choice["text"] == '<tool_call>\n{"name": "f"}\n</tool_call> and '
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "hello " * 10_000}, "prompt"),
        ({"prompt": [1] * 100_000}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(http: httpx.Client, fields: dict[str, Json], param: str) -> None:
    answer = post(http, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
