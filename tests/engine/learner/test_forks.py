"""Forks are counted by what came back instead of what was sampled. Tokens here are characters; 0 ends a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from offbook.engine.learner.targets.prompt_forks import find_forks
from offbook.engine.protocol import JobTrajectory, Sample
from offbook.engine.token_file import Fork
from tests.engine.learner.jobs import sample

END = 0
ENDS = frozenset({END, 0xE001})
JOINED = 0xE000  # one token for the two characters "ab"
PROMPT = "ask\0"


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join("ab" if token == JOINED else chr(token) for token in tokens)


def found(samples: Sequence[Sample]) -> list[Fork]:
    return find_forks(JobTrajectory("traj", 1.0, tuple(samples)), decode, ENDS)


def forks(answer: str | list[int], prompt: str | list[int], **changes: Any) -> dict[str, int]:
    first = sample("a", ids(PROMPT), answer if isinstance(answer, list) else ids(answer), **changes)
    second = sample("b", prompt if isinstance(prompt, list) else ids(prompt), ids("x"))
    return Counter(fork.cause for fork in found([first, second]))


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2}}</tool_call>\0'


@pytest.mark.parametrize(
    ("answer", "prompt", "cause"),
    [
        ("fine\0", PROMPT + "fine\0\nnext\0", None),
        ("fine\ue001", PROMPT + "fine \ue001\nnext\0", "template"),  # another end token of the model
        ("fine \0", PROMPT + "fine\0\nnext\0", "template"),
        ("<think>hm</think>fine\0", PROMPT + "fine\0\nnext\0", "template"),
        ([JOINED, END], PROMPT + "ab\0next\0", "retokenised"),
        (CALL, PROMPT + '<tool_call>{"arguments":{"b":2,"a":1},"name":"f"}</tool_call>\0next\0', "tools"),
        ("so " + CALL, PROMPT + "so \0next\0", "tools"),
        (CALL, PROMPT + '<tool_call>{"name": "g", "arguments": {}}</tool_call>\0next\0', "history_edited"),
        (CALL, PROMPT + CALL.replace(", ", ",") + "next\0", "tools"),
        (CALL, PROMPT + CALL.replace("</tool_call>", "\n</tool_call>\n") + "next\0", "template"),
        ("fine\0", PROMPT + "good\0next\0", "history_edited"),
        ("fi", PROMPT + "fo\0next\0", "truncated"),
        ("fi", PROMPT + "fi\0next\0", None),
        ("fine\0", PROMPT, "retried"),
        ("fine\0", "other\0", "other_prompt"),
        ("fine\0", "ask\0and\0", "history_edited"),
    ],
)
def test_a_fork_is_counted_under_its_cause(answer: str | list[int], prompt: str | list[int], cause: str | None) -> None:
    assert forks(answer, prompt) == ({cause: 1} if cause else {})


def test_interleaved_agents_are_held_against_their_own_calls() -> None:
    calls = []
    prompts = {"A": ids("agent A\0"), "B": ids("Bob\0")}
    for turn in range(3):
        for name in "AB":
            answer = ids(f"{name}{turn}\0")
            calls.append(sample(f"{name}{turn}", prompts[name], answer))
            prompts[name] = prompts[name] + answer + ids("go\0")
    assert Counter(fork.cause for fork in found(calls)) == {"other_prompt": 1}


def test_a_fork_says_where_the_later_prompt_leaves_which_call() -> None:
    fork = found([sample("a", ids(PROMPT), ids("fine\0")), sample("b", ids(PROMPT + "good\0next\0"), ids("x"))])
    assert fork == [
        Fork(trajectory="traj", later=("b", 0), earlier=("a", 0), position=len(PROMPT), cause="history_edited")
    ]
