"""`offbook improve mcp:COMMAND`: from a server and a large model to a small one that uses the server's tools."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook import LocalBackend
from offbook.client.connection.http import Api
from offbook.commands.main import run
from offbook.llms import llm
from offbook.testing import LlmReply, LlmRequest, calls_tool, fails, says, scripted_llm
from offbook_mcp.scenarios.scenario import CheckKind, ScenarioSet, load_scenarios, save_scenarios
from tests.compare_wing.test_mcp import current_time, likes_the_tool
from tests.mcp_adapter.conftest import python_module
from tests.mcp_training.conftest import told
from tests.mcp_training.order_server import scenarios, write_module

TEACHER = "openai/large?api_base={}&api_key_variable=OPENAI_API_KEY&prompt_price=1&completion_price=4"


@pytest.fixture(autouse=True)
def key(litellm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llm, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "own"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A running server, which the commands share."""
    with LocalBackend(tmp_path_factory.mktemp("improve"), threads=1) as backend:
        yield asyncio.run(backend.connect("tiny-mcp"))


@pytest.fixture
def url(server: Api, monkeypatch: pytest.MonkeyPatch) -> str:
    """The running server's; its key is in the environment."""
    monkeypatch.setenv("OFFBOOK_API_KEY", server.key or "")
    monkeypatch.setenv("OFFBOOK_URL", server.url)
    return server.url


Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Called]:
    """`called("improve", ...)` -> exit code, stdout, stderr, in this process and a folder with a server and scenarios."""
    write_module(tmp_path)
    save_scenarios(scenarios(), tmp_path / "s.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words: str) -> tuple[int, str, str]:
        code, printed = run(words), capsys.readouterr()
        return code, printed.out, printed.err

    yield call
    sys.modules.pop("orders", None)


def test_what_cannot_be_improved_is_named(called: Called, tmp_path: Path) -> None:
    code, _, complaint = called("improve", "mcp:orders:server", "--teacher", "as-is", "--scenarios", "s.jsonl")
    assert code == 2 and "--teacher: a server has no model of its own" in complaint
    own = scenarios()
    save_scenarios(type(own)(own.train, ""), tmp_path / "train.jsonl")
    words = ["improve", "mcp:orders:server", "--teacher", "openai/large", "--scenarios", "train.jsonl"]
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
def test_a_server_and_a_large_model_make_a_small_one(
    called: Called,
    url: str,
    tmp_path: Path,
) -> None:
    large = Large(tmp_path / "own" / "mcp" / "clock.jsonl")
    target = python_module("mcp_server_time", "--local-timezone", "UTC")
    words = ["improve", f"mcp:{target}", "--model", "clock", "--output", "out"]
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


class Moody:
    """A model that looks up the time in every second run of a task, and gives up in the others."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, request: LlmRequest) -> LlmReply:
        task = str(next(message["content"] for message in request.messages if message["role"] == "user"))
        if request.messages[-1]["role"] == "user":
            self.asked.append(task)
            if self.asked.count(task) % 2:
                return says("I do not know.")
        return current_time(request)


class Unsteady:
    """A judge that is down, then talks nonsense, then scores."""

    def __init__(self) -> None:
        self.script = [fails(503), says("The first one, I would say."), None]
        self.asked: list[str] = []

    def __call__(self, request: LlmRequest) -> LlmReply:
        self.asked.append(str(request.messages[1]["content"]))
        return self.script[0] or likes_the_tool(request)


@pytest.mark.slow("a whole improvement on a real server")
def test_a_judge_scores_what_cannot_be_executed_and_its_failures_lose_no_run(
    called: Called,
    url: str,
    tmp_path: Path,
) -> None:
    executed = ["what time is it in Europe/Oslo now", "tell the time in Asia/Tokyo now", "time in Africa/Cairo please"]
    open_tasks = ["greet me as they do in America/Lima at this hour", "wish a good day in Asia/Seoul if it is day"]
    open_tasks += ["is anybody awake in Europe/Rome right now"]
    made = [told(task, ("get_current_time", {"timezone": zone_of(task)})) for task in executed]
    made += [told(task, tools=("get_current_time",), check=CheckKind.JUDGE) for task in open_tasks]
    held_out = (executed[-1], open_tasks[-1])
    made = [one.model_copy(update={"split": "eval" if one.task in held_out else "train"}) for one in made]
    save_scenarios(ScenarioSet(tuple(made), ""), tmp_path / "s.jsonl")
    target = python_module("mcp_server_time", "--local-timezone", "UTC")
    words = ["improve", f"mcp:{target}", "--model", "judged-clock", "--output", "out"]
    words += ["--scenarios", "s.jsonl"]
    words += ["--rounds", "1", "--round-steps", "1"]
    words += ["--sft-batch-size", "4", "--sft-learning-rate", "2e-3", "--group-size", "2", "--scenarios-per-step", "2"]
    teacher, judge = Moody(), Unsteady()
    with scripted_llm(teacher) as large, scripted_llm(judge) as judging:
        words += ["--teacher", TEACHER.format(large.url), "--judge", "openai/judge", "--judge-api-base", judging.url]
        for why in ("scripted failure", "the answer does not fit, also when asked again"):
            code, _, complaint = called(*words)
            assert code == 1 and "judge: none of 2 groups was scored" in complaint, complaint
            assert why in complaint and "The rollouts are kept: run it again, or with another judge" in complaint
            judge.script.pop(0)
        assert len(teacher.asked) == 16 and not (tmp_path / "out" / "good.jsonl").exists()
        judge.asked.clear()
        code, page, complaint = called(*words)
    assert code == 0, complaint
    assert len(teacher.asked) == 16 + 2  # the comparison's; no run of the observation was repeated
    observing = judge.asked[:2]
    assert sorted(task for task in open_tasks if task in "".join(observing)) == sorted(open_tasks[:2])
    assert not any(task in each for task in executed[:2] for each in judge.asked)
    assert "8 of 16 runs are good (success, or where it is not reported a reward of at least the mean" in page
    rows = [json.loads(line) for line in (tmp_path / "out" / "good.jsonl").read_text().splitlines()]
    assert rows and all(any(message["role"] == "tool" for message in row["messages"]) for row in rows)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| round 1 |" in report and "preferred" in report


def zone_of(task: str) -> str:
    return next(word for word in task.split() if "/" in word)
