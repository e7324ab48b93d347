"""One trained model, exported in both formats, and what the app says on it, for all tests of production."""

from __future__ import annotations

import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook_langgraph import trainable
from tests.production.order_desk import QUESTIONS, conversation, make_agent

Conversations = list[list[dict[str, Any]]]
NOWHERE = "http://127.0.0.1:9/v1"
"""The app's own model cannot be reached: what is said comes from the policy."""


@dataclass(frozen=True)
class Trained:
    """A model at step 1, its folder on the server and its exports; `trained` and `base` are what the app says on
    `.trained(temperature=0.0)`, at steps 1 and 0."""

    model: offbook.TrainableModel
    folder: Path
    lora: Path
    merged: Path
    trained: Conversations
    base: Conversations


def drawn(scenario: Any, state: dict[str, Any]) -> float:
    """A reward that differs from rollout to rollout, however sure the policy is."""
    return zlib.crc32(str([message.id for message in state["messages"]]).encode()) % 97 / 97


@pytest.fixture(scope="session")
def desk(local_backend: offbook.LocalBackend, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained with a rate so high that the answers change."""
    model = offbook.TrainableModel(name="production-desk", base_model="tiny", backend=local_backend)
    app = trainable(make_agent(NOWHERE, "own"), model=model, reward=drawn)
    scenarios = [{"id": str(at), "question": question} for at, question in enumerate(QUESTIONS)]
    config = offbook.TrainConfig(learning_rate=5e-3)
    report = app.train(scenarios, steps=1, group_size=4, scenarios_per_step=4, config=config)
    assert report.step == 1
    exports = tmp_path_factory.mktemp("exports")
    lora, merged = exports / "lora", exports / "merged"
    for format, output in (("peft", lora), ("merged", merged)):
        command("export", model.name, "--dir", str(local_backend.dir), "--format", format, "--output", str(output))
    said = [said_by(app.trained(step=step, temperature=0.0)) for step in (None, 0)]
    assert sum(one != other for one, other in zip(*said, strict=True)) >= 2, "the step changed too little to be seen"
    return Trained(model, local_backend.dir / "default" / "models" / model.name, lora, merged, *said)


def command(*words: str) -> str:
    """The command `offbook`, as a user types it."""
    done = subprocess.run([sys.executable, "-m", "offbook", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def said_by(agent: Any) -> Conversations:
    return [conversation(agent, question) for question in QUESTIONS]
