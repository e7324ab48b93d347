"""`offbook mcp improve`: from a server and a large model to a small one that uses the server's tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbook.testing import LlmReply, LlmRequest, calls_tool, says, scripted_llm
from offbook_mcp.scenarios.files import load_scenarios, save_scenarios
from tests.mcp_adapter.conftest import python_module
from tests.mcp_training.order_server import scenarios
from tests.mcp_training.test_training_commands import Called, called  # noqa: F401  # a fixture

TEACHER = "openai/large?api_base={}&api_key_variable=OPENAI_API_KEY&prompt_price=1&completion_price=4"


@pytest.fixture(autouse=True)
def key(litellm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "own"))


def test_a_dry_run_tells_the_stages_and_writes_nothing(called: Called, tmp_path: Path) -> None:  # noqa: F811
    before = sorted(tmp_path.iterdir())
    words = ["improve", "orders:server", "--teacher", "openai/large", "--dry-run", "--rounds", "2", "--group-size", "4"]
    code, page, complaint = called(*words, "--scenarios", "s.jsonl")
    assert code == 0, complaint
    assert "observe: 9 runs of the app on openai/large" in page and "train: 2 rounds at most" in page
    code, page, complaint = called(*words, "--count", "20")
    assert code == 0, complaint
    assert "observe: 15 runs of the app" in page
    assert [each for each in sorted(tmp_path.iterdir()) if each not in before and each.name != "__pycache__"] == []


def test_what_cannot_be_improved_is_named(called: Called, tmp_path: Path) -> None:  # noqa: F811
    code, _, complaint = called("improve", "orders:server", "--teacher", "as-is", "--scenarios", "s.jsonl")
    assert code == 2 and "--teacher: a server has no model of its own" in complaint
    own = scenarios()
    save_scenarios(type(own)(own.train, ""), tmp_path / "train.jsonl")
    words = ["improve", "orders:server", "--teacher", "openai/large", "--scenarios", "train.jsonl", "--dry-run"]
    code, _, complaint = called(*words)
    assert code == 2 and "scenarios: none of 9 is held out" in complaint


class Large:
    """A model that solves each generated scenario as its reference does."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.asked: list[str] = []

    def __call__(self, request: LlmRequest) -> LlmReply:
        task = str(next(message["content"] for message in request.messages if message["role"] == "user"))
        done = sum(message["role"] == "tool" for message in request.messages)
        scenario = next(each for each in load_scenarios(self.file).scenarios if each.task == task)
        self.asked.append(f"{done} {scenario.split} {task}")
        if done < len(scenario.calls):
            return calls_tool(scenario.calls[done].tool, dict(scenario.calls[done].arguments))
        return says(" and ".join(scenario.answer) or "done")


@pytest.mark.slow("a whole improvement on a real server")
def test_a_server_and_a_large_model_make_a_small_one(called: Called, tmp_path: Path) -> None:  # noqa: F811
    large = Large(tmp_path / "own" / "mcp" / "clock.jsonl")
    target = python_module("mcp_server_time", "--local-timezone", "UTC")
    words = ["improve", target, "--model", "clock", "--count", "16", "--output", "out", "--dir", str(tmp_path / "own")]
    words += ["--sft-batch-size", "4", "--sft-learning-rate", "2e-3", "--rounds", "1", "--round-steps", "1"]
    words += ["--group-size", "2", "--scenarios-per-step", "2", "--concurrency", "4"]
    with scripted_llm(large) as endpoint:
        words += ["--teacher", TEACHER.format(endpoint.url)]
        code, page, complaint = called(*words)
        assert code == 0, complaint
        asked = list(large.asked)
        code, again, complaint = called(*words)
        assert code == 0 and large.asked == asked, complaint
    assert len(set(asked)) == len(asked) and any(" eval " in each for each in asked)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| base | 0 |" in report and "| supervised |" in report and "| round 1 |" in report
    rows = [json.loads(line) for line in (tmp_path / "out" / "good.jsonl").read_text().splitlines()]
    assert rows and all(row["tools"] and row["messages"][-1]["role"] == "assistant" for row in rows)
    assert "use it: clock" in page or "no stage was better than the base" in page
    assert again.splitlines()[-1] == page.splitlines()[-1]
