"""RULER as the judge of a comparison, by the command line, over HTTP: two biased judges, and equal candidates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbook.commands.main import run
from offbook.testing import (
    LlmReply,
    LlmRequest,
    ScriptedLlm,
    ShownConversation,
    attempts_shown,
    fails,
    says,
    scripted_llm,
)

SCENARIOS = 40
APP = """
from langchain_openai import ChatOpenAI
from offbook_langgraph import trainable


@trainable
async def agent(scenario):
    await ChatOpenAI(model="gpt-4.1").ainvoke(scenario["question"])
"""


def answers(most: dict[str, int]) -> Callable[[LlmRequest], LlmReply]:
    """Each candidate says the same of a question, in its own words, with up to so many words more."""

    def reply(request: LlmRequest) -> LlmReply:
        name, question = request.body["model"], request.messages[-1]["content"]
        more = random.Random(f"{name} {question}").randint(0, most[name])
        return says(f"{name[0]} on {question}: it is so." + " indeed" * more)

    return reply


def judge(score: Callable[[int, int], float]) -> Callable[[LlmRequest], LlmReply]:
    """A judge whose score is a function of an attempt's place in the prompt and of the length of its last message."""

    def reply(request: LlmRequest) -> LlmReply:
        shown = attempts_shown(request.messages)
        scores = [
            {"id": id, "explanation": "as it is", "score": score(place, _length(conversations))}
            for place, (id, conversations) in enumerate(shown.items())
        ]
        return says(json.dumps({"scores": scores}))

    return reply


def _length(conversations: list[ShownConversation]) -> int:
    return len(str(conversations[0].messages[-1]["content"]))


@pytest.fixture
def folder(app_folder: Path) -> Path:
    (app_folder / "judged_app.py").write_text(APP)
    rows = [json.dumps({"id": str(at), "question": f"question {at}"}) for at in range(SCENARIOS)]
    (app_folder / "held_out.jsonl").write_text("\n".join(rows))
    return app_folder


def compared(candidates: ScriptedLlm, judged: ScriptedLlm) -> int:
    words = ["compare", "judged_app:agent", "--scenarios", "held_out.jsonl"]
    words += ["--judge", "openai/judge", "--judge-api-base", judged.url]
    for name in ("able", "brisk"):
        words += ["--with", f"openai/{name}?name={name}&api_base={candidates.url}"]
    return run(words)


def win_rate(folder: Path) -> dict[str, Any]:
    [found] = json.loads((folder / "comparison" / "comparison.json").read_text())["win_rates"]
    return found


def test_a_judge_that_prefers_the_first_position_finds_equal_candidates_equal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        scripted_llm(answers({"able": 0, "brisk": 0})) as candidates,
        scripted_llm(judge(lambda place, length: 0.9 - 0.4 * place)) as judged,
    ):
        assert compared(candidates, judged) == 0
        prompts = [request.messages[1]["content"] for request in judged.requests]
    found = win_rate(folder)
    assert found["rate"]["low"] < 0.5 < found["rate"]["high"]
    assert (found["scenarios"], found["ties"]) == (SCENARIOS, 0.0)
    assert "brisk: preferred to able" in capsys.readouterr().out
    # Blind: what they said is there, and the candidates' names nowhere else.
    assert len(prompts) == SCENARIOS and not any("able" in each or "brisk" in each for each in prompts)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_judge_that_answers_nothing_usable_is_said_and_one_without_an_account_ends_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_llm(answers({"able": 0, "brisk": 0})) as candidates:
        with scripted_llm([says('{"scores": []}')]) as judged:
            assert compared(candidates, judged) == 1
        assert "openai/judge" in capsys.readouterr().err
        with scripted_llm([fails(401, "who are you?")]) as judged:
            assert compared(candidates, judged) == 1
        assert "who are you?" in capsys.readouterr().err
        asked = len(candidates.requests)
    assert asked == 2 * SCENARIOS  # the rollouts were kept
