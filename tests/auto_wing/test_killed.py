"""`offbook auto`, killed while it writes and while it compares, and run again: the ledger shows nothing paid twice."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offbook.testing import LlmReply, LlmRequest, attempts_shown, resets, scripted_llm
from tests.fakes.scripted_writer import DESCRIPTION, TOOLS, writer

KILLS = ["Write that rubric", "judge"]
"""What the question asks at whose arrival the command is killed, once each; the judgement is one of the comparison."""


class Killer:
    """The LLM: it kills the command instead of answering the next question of `KILLS`, when the earlier ones are kept."""

    def __init__(self, cache: Path) -> None:
        self.pid = 0
        self.trained = False
        self.kills = list(KILLS)
        self.answered: list[str] = []
        self._cache = cache
        self._lock = threading.Lock()
        self._write = writer()

    def __call__(self, request: LlmRequest) -> LlmReply:
        with self._lock:
            if self.pid and self.kills and self._is_due(request):
                self._wait_until_kept()
                os.kill(self.pid, signal.SIGKILL)
                self.pid = 0
                self.kills.pop(0)
            if not self.pid:
                return resets()  # nobody is there any more
            self.answered.append(json.dumps(request.body, sort_keys=True))
            return self._write(request)

    def _is_due(self, request: LlmRequest) -> bool:
        if self.kills[0] != "judge":
            return self.kills[0] in str(request.messages[-1]["content"])
        return bool(attempts_shown(request.messages)) and self.trained

    def _wait_until_kept(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self._kept() == len(self.answered):
                return
            time.sleep(0.05)
        raise AssertionError(f"{len(self.answered)} answers, of which {self._kept()} are in the cache")

    def _kept(self) -> int:
        if not self._cache.exists():
            return 0
        with sqlite3.connect(self._cache) as database:
            return database.execute("SELECT count(*) FROM answers").fetchone()[0]


@pytest.mark.slow("killed at every stage")
def test_a_run_that_is_killed_in_each_stage_pays_nothing_twice(folder: Path) -> None:
    (folder / "tools.json").write_text(json.dumps(TOOLS))
    killer = Killer(folder / "own" / "llms.sqlite")
    codes: list[int] = []
    with scripted_llm(killer) as endpoint:
        name = (
            f"openai/writer?api_base={endpoint.url}&api_key_variable=OPENAI_API_KEY&prompt_price=1&completion_price=4"
        )
        words = ["auto", DESCRIPTION, "--llm", name, "--base-model", "tiny", "--tools", "tools.json", "--output", "out"]
        words += [
            "--train-inputs",
            "10",
            "--held-out",
            "5",
            "--steps",
            "2",
            "--group-size",
            "4",
            "--scenarios-per-step",
            "2",
        ]
        words += ["--max-completion-tokens", "48", "--concurrency", "4"]
        while len(codes) <= len(KILLS):
            process = subprocess.Popen([sys.executable, "-m", "offbook", *words], stdout=subprocess.PIPE, text=True)
            killer.pid = process.pid
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="")
                killer.trained = killer.trained or "The LoRA is in" in line
            codes.append(process.wait(300))
            killer.pid = 0
    assert codes == [-signal.SIGKILL] * len(KILLS) + [0]
    assert len(set(killer.answered)) == len(killer.answered)
    ledger = [json.loads(line) for line in (folder / "out" / "spending.jsonl").read_text().splitlines()]
    assert sum(row.get("requests", 0) for row in ledger) == len(killer.answered)
    assert len(list((folder / "own/auto/models").glob("*/checkpoints/000?"))) == 2
    assert "## What did it take?" in (folder / "out" / "report.md").read_text()
