"""New words of users: as rare as promised while they write as before, and found when they write of something else."""

from __future__ import annotations

import random

import pytest

from examples.on_the_job.paid import QUESTIONS
from offbook.server.takeover.inputs import SeenInputs, new_input
from offbook.server.takeover.words import EPSILON, LEAST, UNSCORED, SeenWords

ASKED = [words for each in QUESTIONS.values() for words in each]
GREETINGS = ["hello", "hi there", "good morning", "dear team", "sorry to bother you", "quick one"]
OTHER = [
    "the lamp from order {} arrived broken, may I send it back?",
    "I was charged twice for order {}, please refund one of them",
    "wo bleibt meine Bestellung {}?",
]


def question(draw: random.Random, among: list[str] = ASKED) -> str:
    greeting = draw.choice(GREETINGS) if draw.random() < 0.3 else ""
    return f"{greeting} {draw.choice(among).format(draw.randrange(1000, 9999))}".strip()


def seen(seed: int, number: int = 200) -> SeenWords:
    words, draw = SeenWords(), random.Random(seed)
    for _ in range(number):
        words.learn(question(draw))
    return words


def test_of_the_order_desks_questions_few_are_strange_and_of_others_nearly_all() -> None:
    same = other = 0
    for seed in range(20):
        words, draw = seen(seed), random.Random(1000 + seed)
        same += sum(words.strange(question(draw)) for _ in range(100))
        other += sum(words.strange(question(draw, OTHER)) for _ in range(100))
    assert same / 2000 <= EPSILON
    assert other / 2000 >= 0.95


def test_words_that_come_from_a_large_vocabulary_are_strange_as_rarely_as_promised() -> None:
    def text(draw: random.Random) -> str:  # word ranks by Zipf's law, as in natural language
        ranks = (round(1 / max(1e-4, draw.random())) for _ in range(draw.randrange(5, 40)))
        return " ".join(
            f"w{'abcdefghij'[rank % 10]}{'klmnopqrst'[rank // 10 % 10]}{'x' * (rank // 100 % 50)}" for rank in ranks
        )

    strange = 0
    for seed in range(20):
        words, draw = SeenWords(), random.Random(seed)
        for _ in range(300):
            words.learn(text(draw))
        strange += sum(words.strange(text(draw)) for _ in range(100))
    assert strange / 2000 <= EPSILON


def test_nothing_is_strange_before_enough_was_seen_and_numbers_never_are() -> None:
    assert not seen(0, UNSCORED + LEAST - 1).strange("wo bleibt meine Bestellung")
    words = seen(0)
    assert words.strange("wo bleibt meine Bestellung") and not words.strange("is order 123456789 on its way?")
    assert not words.strange("")


def test_what_is_kept_has_no_word() -> None:
    kept = seen(0).model_dump_json()
    assert SeenWords.model_validate_json(kept) == seen(0)
    assert not any(word in kept for text in ASKED for word in text.format("").split())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "hi"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            "a b",
        ),
        ({"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, "hi"),
        ({"input": "hi"}, "hi"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}, "hi"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "shelf 7"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "shelf 7"}]}]}, None),
        ({"messages": []}, None),
        ({"messages": 3}, None),
    ],
)
def test_the_newest_input_is_read_in_every_api(body: dict[str, object], text: str | None) -> None:
    assert new_input(body) == text


def test_a_call_with_new_words_is_unlike_those_that_were_seen() -> None:
    inputs, draw = SeenInputs(), random.Random(0)
    for _ in range(200):
        inputs.learn({"messages": [{"role": "user", "content": question(draw)}]}, 500)
    drifted = {"messages": [{"role": "user", "content": OTHER[1].format(1234)}]}
    assert inputs.unlike(drifted, 500) == "new words"
    assert inputs.unlike(drifted, 800) == "longer"
