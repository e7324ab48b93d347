import json
import random
from pathlib import Path
from statistics import mean

import pytest
from transformers import AutoTokenizer

from offbook.tiny import path
from policies.evaluate import complete, load
from policies.evaluate_services import (
    SERVICE_TOKENS,
    canonical,
    is_right,
    kinds_of,
    row_names,
    server_prompts,
    service_prompts,
)
from policies.services import service_episode

SERVERS = sorted((Path(__file__).parent / "real_tools").glob("*.json"))
CALL = '<tool_call>\n{"name": "move", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def test_a_call_is_right_whatever_the_order_of_its_arguments_and_the_line_before_it():
    other = 'move<1>(a, b)\n<tool_call>\n{"name": "move", "arguments": {"b": [2], "a": 1}}\n</tool_call>'
    assert canonical(other) == canonical(CALL)
    assert canonical(CALL.replace("1", "3")) != canonical(CALL)
    assert canonical(f"{CALL}\n{CALL}") not in (canonical(CALL), canonical(other))
    for none in ("The answer is 3.", "<tool_call>\n{nothing}\n</tool_call>", CALL.replace('"name"', '"tool"')):
        assert canonical(none) == none


def test_values_are_told_apart_by_kind():
    assert kinds_of({"a": "/srv/x", "b": True, "c": 3, "d": ["x"], "e": [{"x": 1}], "f": {"x": 1}}) == {
        "with a slash",
        "flag",
        "number",
        "list",
        "list of objects",
        "object",
    }
    assert kinds_of({"u": "https://a.org", "n": "12 km"}) == {"URL", "number with a unit"}
    assert kinds_of({"a": "2026-03-14T09:30", "b": "a@b.org", "c": "two words", "d": "ab-3", "e": "word"}) == {
        "date or time",
        "e-mail address",
        "several words",
        "with other marks",
        "one word",
    }


def test_a_first_call_counts_by_tools_arguments_and_kinds():
    drawn = service_episode(random.Random(0), held_out=True, tools=8, requests=1)
    found = row_names(drawn, drawn.turns[0])
    assert found[:2] == ["all", "8 tools"]
    assert found[2].split()[1] in ("argument", "arguments", "or")


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_every_right_call_fits_into_a_measured_completion():
    tokenizer = AutoTokenizer.from_pretrained(path("tiny-mcp"))
    calls = [call for prompt, _ in service_prompts(tokenizer, count=200, seed=11) for call in prompt.turn.calls]
    assert max(len(ids) for ids in tokenizer(calls)["input_ids"]) < SERVICE_TOKENS


@pytest.mark.parametrize("file", SERVERS, ids=lambda file: file.stem)
def test_each_server_has_twenty_requests_whose_calls_fit_its_tools(file):
    tokenizer = AutoTokenizer.from_pretrained(path("tiny-mcp"))
    asked = server_prompts(tokenizer, file)
    assert len(asked) == 20
    server = json.loads(file.read_text())
    schemas = {tool["name"]: tool["parameters"] for tool in server["tools"]}
    for each, (probe, names) in zip(server["requests"], asked, strict=True):
        schema = schemas[each["name"]]
        assert set(schema.get("required", [])) <= set(each["arguments"]) <= set(schema["properties"])
        assert each["request"] in probe.text
        assert names == [file.stem]


@pytest.mark.slow("measures of the bundled policy")
def test_the_policy_for_mcp_servers_calls_held_out_tools_and_those_of_real_servers():
    """The first calls of 16 episodes (standard error: 8 %), and of 20 requests to five servers (10 %)."""
    model, tokenizer = load(path("tiny-mcp"))
    held_out = [prompt for prompt, _ in service_prompts(tokenizer, count=16, seed=11) if prompt.first]
    greedy = complete(model, tokenizer, [prompt.text for prompt in held_out], sampled=False)
    assert len(held_out) > 14
    assert mean(is_right(text, prompt) for text, prompt in zip(greedy, held_out, strict=True)) >= 0.68
    asked = [probe for file in SERVERS for probe, _ in server_prompts(tokenizer, file)[::5]]
    greedy = complete(model, tokenizer, [probe.text for probe in asked], sampled=False)
    assert len(asked) == 20
    assert mean(is_right(text, probe) for text, probe in zip(greedy, asked, strict=True)) >= 0.6
