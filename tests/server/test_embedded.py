"""The server over the engine that it brings: what grammars, heavy bodies and questions about tokens come to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from servers import RunningServer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from understudy import tiny

FREE_TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 3, "maxLength": 12}},
    "required": ["text"],
    "additionalProperties": False,
}
SAY = {"type": "function", "function": {"name": "say", "parameters": FREE_TEXT}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("embedded") / "dir", "--inference-only") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny.path())


@pytest.mark.parametrize(
    ("shaped", "constrained"),
    [
        ({"tools": [SAY], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": FREE_TEXT}}}, "response_format"),
    ],
)
def test_a_shaped_answer_has_no_control_tokens_in_its_text_and_is_recorded_as_constrained(
    server: RunningServer, tokenizer: PreTrainedTokenizerBase, shaped: dict[str, Any], constrained: str
) -> None:
    name = f"shaped-by-{constrained}"
    answer = server.chat("Say a word", name, n=16, seed=1, temperature=9.0, max_tokens=100, **shaped)
    assert answer.status_code == 200, answer.text
    (call,) = server.http.get(f"/api/trajectories/{name}").json()["calls"]
    assert call["constrained"] == constrained
    ending, around = {tokenizer.eos_token_id}, set(tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]))
    assert len(call["outputs"]) == 16
    for output in call["outputs"]:
        marks = [token for token in output["token_ids"] if token in tokenizer.added_tokens_decoder]
        assert set(marks) <= (ending | around if constrained == "tool_choice" else ending)
        assert len(output["logprobs"]) == len(output["token_ids"]) and None not in output["logprobs"]
        if output["finish_reason"] == "tool_calls":
            for made in output["message"]["tool_calls"]:
                assert 3 <= len(json.loads(made["function"]["arguments"])["text"]) <= 12
        elif output["finish_reason"] == "stop":
            assert 3 <= len(json.loads(output["message"]["content"])["text"]) <= 12
    assert {"tool_calls", "stop"} & {output["finish_reason"] for output in call["outputs"]}
