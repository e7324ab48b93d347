"""`offbook improve`, killed while it trains by reward, and run again. For `train_sft` see the campaign, for observing, which is a
comparison's part, `tests/compare_wing`."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from offbook.testing import LlmReply, LlmRequest, resets, scripted_llm
from tests.fakes.scripted_desk import desk_expert
from tests.paths import ROOT

TRAIN, HELD_OUT, CONCURRENCY = 12, 4, 3
RIGHT = 0.9


def desk(folder: Path, train: int, held_out: int) -> None:
    """The quickstart's app and its scenarios, in this folder."""
    shutil.copy(ROOT / "examples" / "quickstart" / "app.py", folder / "improved_desk.py")
    subprocess.run([sys.executable, "improved_desk.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for name, count in (("train.jsonl", train), ("held_out.jsonl", held_out)):
        lines = (folder / name).read_text().splitlines()[:count]
        (folder / name).write_text("\n".join(lines) + "\n")


@dataclass
class Watch:
    """What is known of the command from outside: what it wrote and asked the teacher. It is killed as soon as the next of
    `KILLS` is due."""

    folder: Path
    kills: list[tuple[str, Callable[[Watch], bool]]]
    answered: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    process: subprocess.Popen[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    expert: Callable[[LlmRequest], LlmReply] = field(default_factory=lambda: desk_expert(RIGHT))

    def teacher(self, request: LlmRequest) -> LlmReply:
        """The teacher's answer, unless nobody is there any more."""
        with self.lock:
            self.kill_if_due()
            if self.process is None:
                return resets()
            self.answered.append((question_of(request), content_of(request)))
        return self.expert(request)

    def kill_if_due(self) -> None:
        """Kill the command where the next kill is due. The lock is held."""
        if self.process is not None and self.kills and self.kills[0][1](self):
            self.kills.pop(0)
            self.process.kill()
            self.process = None

    def run(self, words: list[str], url: str) -> int:
        """Run the command to its end, which may be a kill; its exit code."""
        environment = {**os.environ, "OPENAI_API_BASE": url, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "offbook", *words]
        with subprocess.Popen(command, env=environment, cwd=self.folder) as process:
            with self.lock:
                self.process = process
            while process.poll() is None:
                with self.lock:
                    self.kill_if_due()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
            with self.lock:
                self.process = None
        return process.returncode

    def rows(self, pattern: str) -> list[dict[str, Any]]:
        """The whole lines of the journals of this name in the output folder."""
        files = sorted((self.folder / "out").glob(f"{pattern}/rollouts.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines(True) if line.endswith("\n")]

    def kept(self) -> set[str]:
        """The requests to the desk whose runs on the teacher were kept."""
        told = [json.loads(line) for name in ("train", "held_out") for line in (self.folder / f"{name}.jsonl").open()]
        questions = {str(one["id"]): str(one["question"]) for one in told}
        rows = [*self.rows("observed"), *self.rows("comparison*")]
        return {questions[row["scenario"]] for row in rows if row["candidate"].startswith("as-is") and not row["error"]}

    def steps(self) -> int:
        """The steps that the server has applied, of all models."""
        return len(list((self.folder / "own").glob("**/checkpoints/[0-9]*/adapter_config.json")))


def question_of(request: LlmRequest) -> str:
    """What the user asked the desk."""
    return next(str(message["content"]) for message in request.messages if message["role"] == "user")


def content_of(request: LlmRequest) -> str:
    """What a request says, without the ids of its tool calls."""
    told = [
        (message["role"], message.get("content"), [call["function"] for call in message.get("tool_calls") or ()])
        for message in request.messages
    ]
    return json.dumps(told, sort_keys=True)


KILLS: list[tuple[str, Callable[[Watch], bool]]] = [
    ("in a round", lambda watch: watch.steps() > updates(watch)),
]


def updates(watch: Watch) -> float:
    """The updates of the supervised training; infinite until it has ended."""
    stages = watch.folder / "out" / "stages.json"
    return json.loads(stages.read_text()).get("sft") or math.inf if stages.exists() else math.inf


@pytest.mark.slow("a whole improvement, killed")
def test_improve_killed_in_a_round_pays_and_records_nothing_twice(folder: Path) -> None:
    desk(folder, TRAIN, HELD_OUT)
    words = [
        "improve",
        "improved_desk:agent",
        "--scenarios",
        "train.jsonl",
        "--eval",
        "held_out.jsonl",
        "--output",
        "out",
    ]
    words += ["--teacher", "as-is?prompt_price=1&completion_price=1", "--concurrency", str(CONCURRENCY)]
    words += ["--sft-epochs", "1", "--sft-batch-size", "4", "--sft-learning-rate", "1e-3"]
    words += ["--rounds", "1", "--round-steps", "2", "--group-size", "4", "--scenarios-per-step", "2"]
    watch = Watch(folder, list(KILLS))
    codes: list[int] = []
    with scripted_llm(watch.teacher) as endpoint:
        while len(codes) <= len(KILLS) and 0 not in codes:
            codes.append(watch.run(words, endpoint.url))
    assert codes == [-signal.SIGKILL] * len(KILLS) + [0], f"{[name for name, _ in watch.kills]} did not come"

    report, answered = (folder / "out" / "report.md").read_text(), watch.answered
    assert "| base | 0 |" in report and "| supervised |" in report and "| round 1 |" in report

    assert max(Counter(answered).values()) == 1
    assert watch.kept() == {question for question, _ in answered} and len(watch.kept()) == TRAIN + HELD_OUT
    rows = [*watch.rows("observed"), *watch.rows("comparison*")]
    assert max(Counter(row["key"] for row in rows).values()) == 1
    paid = sum(len(row["calls"]) for row in rows if row["candidate"].startswith("as-is"))
    ledger = [json.loads(line) for line in (folder / "out" / "spending.jsonl").open()]
    assert sum(row["requests"] for row in ledger) == paid <= len(answered)

    state = json.loads((folder / "out" / "stages.json").read_text())
    good = (folder / "out" / "good.jsonl").read_text().count("\n")
    assert state["sft"] == -(-good // 4) and len(state["rounds"]) == 1
    with closing(sqlite3.connect(folder / "own" / "records.db")) as database:
        results = [
            json.loads(told)["result"] for (told,) in database.execute("SELECT status FROM trains WHERE state = 'done'")
        ]
        compared = database.execute("SELECT count(*) FROM trajectories WHERE split = 'compare'").fetchone()[0]
    # A step of equal rewards is answered, and applies nothing.
    applied = [one["step"] for one in results if one["applied"]]
    assert sorted(applied) == list(range(1, state["sft"] + 3))
    assert compared == len(rows)
