"""What visitors ask, and the app that is improved: `offbook improve observe_and_improve.visitors:guide`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from observe_and_improve.agent import PAINTINGS, make_agent

import offbook
from offbook_langgraph import trainable
from offbook_langgraph.training.trainable import TrainableRunnable

os.environ.setdefault("OPENAI_API_KEY", "unused")  # ChatOpenAI wants one, also where the teacher is a script

QUESTIONS = {
    "painter": ("who made painting {}?", "whose is painting {}?"),
    "room": ("where is painting {}?", "which way to painting {}?"),
    "year": ("how old is painting {}?", "since when is there painting {}?"),
}
"""Field of a painting -> the questions about it. None names a tool."""


def scenarios(paintings: list[str]) -> list[dict[str, str]]:
    return [
        {"question": words.format(painting), "answer": PAINTINGS[painting][field]}
        for painting in paintings
        for field, wordings in QUESTIONS.items()
        for words in wordings
    ]


def reward(scenario: dict[str, str], state: dict[str, Any]) -> float:
    """1 if the last message states the answer, else 0."""
    return float(scenario["answer"] in state["messages"][-1].text)


def make_guide(model: offbook.TrainableModel) -> TrainableRunnable:
    return trainable(make_agent(), model=model, reward=reward)


guide = make_guide(offbook.TrainableModel("guide", "examples", "tiny"))


if __name__ == "__main__":
    for name, paintings in (("train", [*PAINTINGS][:30]), ("held_out", [*PAINTINGS][30:])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in scenarios(paintings)))
