"""Steps and other LLMs use the same server's tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbook import Ruler, TrainableModel
from offbook.base.errors import ConfigError
from offbook.commands.main import run
from offbook.testing import LlmReply, LlmRequest, ScriptedServer, calls_tool, judges, says, scripted_llm
from offbook_compare import acompare
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ScenarioSet, save_scenarios
from offbook_mcp.training.mcp_trainer import MCPTrainer
from tests.mcp_adapter.conftest import python_module
from tests.mcp_training.conftest import told
from tests.mcp_training.order_server import make_server, scenarios


def able(request: LlmRequest) -> LlmReply:
    """Asks for the status of the order that the task names, and says what the tool said."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return says(last["content"] if isinstance(last["content"], str) else last["content"][0]["text"])
    tool = "order_owner" if "owner" in last["content"] or "who" in last["content"].lower() else "order_status"
    return calls_tool(tool, {"order": "".join(char for char in str(last["content"]) if char.isdigit())})


async def test_a_step_and_another_llm_are_compared_on_the_held_out_scenarios(
    stand_in: TrainableModel, obedient: ScriptedServer, tmp_path: Path
) -> None:
    trainer = MCPTrainer(make_server(), stand_in, scenarios(), say=lambda line: None, max_completion_tokens=77)
    before = len(obedient.sampler.received)
    with scripted_llm(able) as api:
        given = ["step:0", f"openai/big?name=able&api_base={api.url}&prompt_price=1&completion_price=1"]
        found = await acompare(trainer, candidates=given, output=tmp_path)
    step, big = found.candidates
    assert (step.rollouts, big.rollouts, step.failed, big.failed) == (3, 3, 0, 0)
    assert big.value is not None and step.value is not None and big.value.mean > step.value.mean
    assert (big.calls, big.cost) == (2.0, 30e-6)
    assert step.calls >= 1 and step.prompt_tokens
    assert (tmp_path / "report.md").exists()
    assert {
        body.get("max_completion_tokens", body.get("max_tokens")) for body in obedient.sampler.received[before:]
    } == {77}, "the limit of training"
    assert {request.body["max_completion_tokens"] for request in api.requests} == {1024}


def likes_the_tool(request: LlmRequest) -> LlmReply:
    """A judge: 0.9 for an attempt in which a tool answered, 0.1 for another."""
    return judges(request, lambda shown: 0.9 if "'tool'" in str(shown) else 0.1)


def gives_up(request: LlmRequest) -> LlmReply:
    return says("I cannot.")


async def test_tasks_that_cannot_be_executed_are_compared_by_the_judge_alone(
    stand_in: TrainableModel, tmp_path: Path
) -> None:
    tasks = [McpScenario(id=f"t{at}", task=f"tell me of order {4000 + at}", difficulty=1, tools=("order_status",),
                         check=CheckKind.JUDGE, split="eval") for at in range(3)]  # fmt: skip
    with (
        scripted_llm(able) as good,
        scripted_llm(gives_up) as bad,
        scripted_llm(likes_the_tool) as judged,
    ):
        given = [f"openai/big?name={name}&api_base={api.url}" for name, api in (("bad", bad), ("good", good))]
        judge = Ruler("openai/judge", api_base=judged.url, api_key="k", cache=None)
        trainer = MCPTrainer(make_server(), stand_in, ScenarioSet(tuple(tasks), ""), say=lambda line: None)
        found = await acompare(trainer, candidates=given, output=tmp_path, judge=judge)
        with pytest.raises(ConfigError, match="judge"):
            await acompare(trainer, candidates=given, output=tmp_path)
    [rate] = found.win_rates
    assert (rate.candidate, rate.rate.mean, found.measure) == ("good", 1.0, "judge's score")
    assert [each.failed for each in found.candidates] == [0, 0]


def current_time(request: LlmRequest) -> LlmReply:
    """Asks for the time in the zone that the task names, and says what the server said."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return says(last["content"] if isinstance(last["content"], str) else last["content"][0]["text"])
    zone = next(word for word in last["content"].split() if "/" in word)
    return calls_tool("get_current_time", {"timezone": zone})


def test_one_line_compares_on_a_real_server_by_its_checks_and_by_a_judge(
    obedient: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("OFFBOOK_URL", obedient.url)
    zones = ("Europe/Oslo", "Asia/Tokyo", "America/Lima", "Africa/Cairo")
    made = [
        told(
            f"what time is it in {zone} now", ("get_current_time", {"timezone": zone}), split="train" if at else "eval"
        )
        for at, zone in enumerate(zones)
    ]
    save_scenarios(ScenarioSet(tuple(made), ""), tmp_path / "s.jsonl")
    server = python_module("mcp_server_time", "--local-timezone", "UTC")
    with scripted_llm(current_time) as good, scripted_llm(likes_the_tool) as judged:
        words = ["compare", f"mcp:{server}", "--scenarios", "s.jsonl", "--model", "clock", "--base-model", "tiny"]
        words += ["--with", "step:0", "--with", f"openai/big?name=big&api_base={good.url}"]
        words += ["--judge", "openai/judge", "--judge-api-base", judged.url]
        assert run(words) == 0
    printed = capsys.readouterr().out
    assert "step:0: success 0.000" in printed
    assert "big: success 1.000 (0.025 to 1.000), difference to step:0 +1.000" in printed
    assert "big: preferred to step:0 1.000" in printed
    assert "training scenarios" not in printed  # other zones, other words enough
    assert (tmp_path / "comparison" / "report.md").exists()
