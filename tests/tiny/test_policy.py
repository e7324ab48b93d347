from statistics import mean

import pytest

from understudy.tiny import path
from understudy.tiny.evaluate import load, measure_choice, measure_exact


@pytest.fixture(scope="module")
def policy():
    return load()


def test_the_bundle_is_complete_and_small():
    files = {file.name: file.stat().st_size for file in path().iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    } <= set(files)
    assert sum(files.values()) < 20 * 2**20


def test_held_out_tools_and_wordings_are_called_exactly(policy):
    measured = measure_exact(*policy, count=60, seed=7, held_out=True)
    for skill in ("tool calls", "final answers"):
        asked, greedy, sampled = measured[skill]
        assert asked >= 40
        assert greedy >= 0.9
        assert sampled >= 0.85


def test_an_open_choice_is_spread_over_the_tools_that_fit(policy):
    spreads, going_on = measure_choice(*policy, count=60, seed=7, held_out=True)
    assert len(spreads) >= 30
    assert mean(each.mass for each in spreads) > 0.85
    assert mean(each.evenness for each in spreads) > 0.7
    assert 0.25 < mean(going_on) < 0.75
