import json
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from policies.basics import basic_episode
from policies.episodes import KINDS, Episode, episode
from policies.words import english


def test_a_seed_gives_the_same_episodes_again():
    first, second = ([episode(random.Random(seed)) for seed in range(50)] for _ in range(2))
    assert first == second
    assert first[0] != first[1]


def test_no_english_word_is_both_trained_on_and_held_out():
    assert len(english(True)) > 200
    assert not set(english(True)) & set(english(False))


@pytest.mark.parametrize("make", [basic_episode, episode])
def test_every_message_of_the_assistant_is_among_the_right_ones_of_its_turn(make: Callable[[random.Random], Episode]):
    for seed in range(300):
        drawn = make(random.Random(seed))
        spoken = [message for message in drawn.messages if message["role"] == "assistant"]
        for message, turn in zip(spoken, drawn.turns, strict=True):
            if "tool_calls" in message:
                function = message["tool_calls"][0]["function"]
                text = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
                assert any(text in call for call in turn.calls)
            else:
                assert message["content"] in turn.texts


def test_arguments_of_the_first_call_are_copied_from_the_request():
    for seed in range(300):
        drawn = episode(random.Random(seed), kind=KINDS[seed % 3])
        request, call = (next(m for m in drawn.messages if m["role"] == role) for role in ("user", "assistant"))
        arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
        assert all(str(value) in request["content"] for value in arguments.values())


def test_a_basic_request_holds_all_that_its_first_call_copies():
    for seed in range(300):
        drawn = basic_episode(random.Random(seed), naming=0.5)
        function = drawn.messages[1]["tool_calls"][0]["function"]
        request = drawn.messages[0]["content"]
        assert all(str(value) in request for value in json.loads(function["arguments"]).values())


def test_a_request_that_names_its_tool_holds_a_part_of_its_name_and_no_name_of_another():
    for seed in range(300):
        drawn = basic_episode(random.Random(seed), naming=1.0)
        name, *others = sorted(
            (tool["function"]["name"] for tool in drawn.tools),
            key=lambda name: name != drawn.messages[1]["tool_calls"][0]["function"]["name"],
        )
        said = drawn.messages[0]["content"].lower().replace("_", " ").split()
        assert set(name.split("_")) & {word.strip('?.!,"') for word in said}
        assert not any(other in drawn.messages[0]["content"] for other in others)


def test_open_requests_leave_a_choice_in_most_episodes():
    turns = [episode(random.Random(seed), kind="open").turns[0] for seed in range(300)]
    assert sum(len(turn.calls) > 1 for turn in turns) > 150


def test_asking_for_the_path_loads_neither_torch_nor_transformers():
    code = "import sys, offbook.tiny as t; t.path(); assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
