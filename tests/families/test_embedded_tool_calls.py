"""The embedded engine reads a family's own tool calls, and its template takes them back in the next turn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbook.engine.inference.app import build_app
from offbook.engine.inference.chat.tool_calls import format_of
from offbook.engine.inference.decoding.model import load_model
from offbook.engine.inference.service import SamplingService
from tests.families.builders import LLAMA3, MISTRAL, QWEN2_5, Family, build
from tests.families.tool_calls import ARGUMENTS, ASKED, TOOL

GIVEN = json.dumps(ARGUMENTS)
WRITES = {
    QWEN2_5: ("<tool_call>", f'\n{{"name": "find_order", "arguments": {GIVEN}}}\n', "</tool_call>"),
    LLAMA3: (f'{{"name": "find_order", "parameters": {GIVEN}}}',),
    MISTRAL: ("[TOOL_CALLS]", f' [{{"name": "find_order", "arguments": {GIVEN}, "id": "a1b2c3d4e"}}]'),
}


def parrot(family: Family, folder: Path) -> Path:
    """A model that answers a question with its family's tool call: what it says depends on the last token alone."""
    build(family, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([text for text in WRITES[family] if text not in tokenizer.get_vocab()])
    prompt = tokenizer.apply_chat_template(ASKED, tools=[TOOL], add_generation_prompt=True, return_dict=True)
    chain = [prompt["input_ids"][-1], *tokenizer.convert_tokens_to_ids([*WRITES[family], family.eos])]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = False
    seen = model.get_input_embeddings().weight.detach()
    said = torch.zeros_like(seen)
    for token, following in itertools.pairwise(chain):
        said[following] = seen[token]
    model.set_output_embeddings(torch.nn.Linear(*reversed(said.shape), bias=False))
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(said)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # what a layer adds
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def engine(folder: Path) -> Iterator[TestClient]:
    policy = load_model(folder, device="cpu", dtype="float32", max_model_len=None)
    service = SamplingService(policy, name="base", max_batch=2, calls=format_of(folder))
    with TestClient(build_app(service)) as http:
        yield http


@pytest.fixture(params=WRITES, ids=lambda family: family.name)
def http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestClient]:
    with engine(parrot(request.param, tmp_path)) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": ASKED, "tools": [TOOL], "temperature": 0, "max_tokens": 8, **fields}


def test_a_call_in_the_familys_own_format_is_a_tool_call_and_its_result_is_rendered(http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json=body())
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["parse_failure"] is False
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("find_order", ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "on its way"}
    again = http.post("/v1/chat/completions", json=body(messages=[*ASKED, choice["message"], result]))
    assert again.status_code == 200, again.text


def test_streamed_it_is_the_same_call(http: TestClient) -> None:
    lines = http.post("/v1/chat/completions", json=body(stream=True)).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("find_order", ARGUMENTS)
    assert "".join(delta.get("content") or "" for delta in deltas) == ""


def test_without_tools_the_same_text_is_content(http: TestClient) -> None:
    (choice,) = http.post("/v1/chat/completions", json=body(tool_choice="none")).json()["choices"]
    assert "find_order" in choice["message"]["content"] and not choice["message"].get("tool_calls")


def test_a_forced_call_is_read_whatever_the_familys_format(http: TestClient) -> None:
    bounded = {"type": "object", "properties": {"order": {"enum": ["4821"]}}, "required": ["order"]}
    tool = {"type": "function", "function": {"name": "find_order", "parameters": bounded}}
    forced = body(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=300)
    (choice,) = http.post("/v1/chat/completions", json=forced).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["find_order"]
