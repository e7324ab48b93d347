import json
import re
from statistics import mean
from typing import Any

import pytest

from offbook.tiny import FOLDERS, path
from policies.evaluate import (
    called,
    complete,
    draw,
    evaluation_prompts,
    load,
    matched,
    measure_choice,
    measure_exact,
    single,
)


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    return load()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_bundle_is_complete_and_small(name: str):
    files = {file.name: file.stat().st_size for file in path(name).iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    } <= set(files)
    assert sum(files.values()) < 10 * 2**20


@pytest.fixture(scope="module")
def measured(policy):
    return measure_exact(*policy, count=24, seed=11, held_out=True)


def is_call(text):
    body = re.fullmatch(r".*\n<tool_call>\n(.*)\n</tool_call>", text)
    try:
        return body is not None and set(json.loads(body[1])) == {"name", "arguments"}
    except json.JSONDecodeError:
        return False


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_calls_are_well_formed_and_end(policy):
    model, tokenizer = policy
    asked = [
        each
        for one in draw(40, 7, True, ("named", "open"))
        for each in evaluation_prompts(tokenizer, one)
        if each.first
    ]
    texts = complete(model, tokenizer, [each.text for each in asked], sampled=False)
    assert mean(is_call(text) for text in texts) >= 0.9


@pytest.mark.slow("measures of the bundled policy")
def test_answers_and_replies_are_copied_on_held_out_words(measured):
    assert measured["second calls"].greedy >= 0.95
    assert measured["final answers"].greedy >= 0.95
    assert measured["plain replies"].greedy >= 0.95
    assert measured["tool calls"].sampled >= 0.9


@pytest.mark.slow("measures of the bundled policy")
def test_held_out_tools_are_called_exactly_from_held_out_wordings(policy):
    """Tool, arguments and values, on 80 episodes: the standard error is about two percent."""
    drawn = [evaluation_prompts(policy[1], one)[0] for one in draw(80, 11, True, ("named", "chain"))]
    asked = [each for each in drawn if single(each.turn)]
    model, tokenizer = policy
    greedy = complete(model, tokenizer, [each.text for each in asked], sampled=False)
    assert len(asked) > 75
    assert called(greedy, asked) >= 0.95
    assert matched(greedy, asked) >= 0.94  # with the line before the call, which is the policy's own


@pytest.fixture(scope="module")
def choices(policy):
    return measure_choice(*policy, count=160, seed=11, held_out=True)


@pytest.mark.slow("measures of the bundled policy")
def test_an_open_choice_is_spread_over_the_tools_that_fit_and_results_lead_on(choices):
    spreads, going_on = choices
    assert len(spreads) >= 80
    assert mean(each.mass for each in spreads) > 0.9
    assert mean(each.evenness for each in spreads) > 0.9
    assert 0.3 < mean(going_on) < 0.7
