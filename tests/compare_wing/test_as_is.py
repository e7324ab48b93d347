"""The candidate `as-is`: the app runs on the models that it calls by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offbook
import offbook_compare
from offbook.base.errors import BudgetExceeded, ConfigError
from offbook.llms.ledger import budget
from offbook.testing import says, scripted_llm
from offbook_compare.comparison import ROWS
from offbook_compare.journal import Journal

APP = """
import os
import offbook
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from offbook_langgraph import trainable


@trainable()
async def agent(scenario):
    model = ChatOpenAI(model="house", base_url=os.environ["APP_URL"], api_key="unused")
    answer = await model.ainvoke([HumanMessage(scenario["question"])])
    right = float(scenario["answer"] in answer.text)
    return offbook.RewardResult(right, {"success": right})
"""
SCENARIOS = [{"id": word, "question": f"say {word}", "answer": word} for word in ("blue", "teal", "gold")]


def app(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.setenv("APP_URL", url)
    (folder / f"{name}.py").write_text(APP)
    return __import__(name).agent


def test_the_apps_own_calls_are_measured_priced_and_resumed(app_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_llm(lambda request: says("I say blue.", usage=(100, 50))) as endpoint:
        agent = app(endpoint.url, app_folder, monkeypatch, "as_is_measured")
        candidate = "as-is?prompt_price=1&completion_price=2"
        with budget() as spent:
            report = offbook_compare.compare(agent, SCENARIOS, [candidate])
        again = offbook_compare.compare(agent, SCENARIOS, [candidate])
        assert len(endpoint.requests) == len(SCENARIOS)
    [result] = report.candidates
    assert result.name == "as-is" and not result.trained
    assert result.value is not None and result.value.mean == pytest.approx(1 / 3)
    assert (result.calls, result.prompt_tokens, result.completion_tokens) == (1.0, 100.0, 50.0)
    assert result.cost == pytest.approx(200e-6) and again.of("as-is").cost == result.cost
    assert result.latency is not None and result.latency[0] > 0
    totals = spent.by_purpose()["app"]
    assert (totals.requests, totals.prompt_tokens, totals.cost) == (3, 300, pytest.approx(600e-6))
    [row, *_] = Journal(app_folder / "comparison" / ROWS).rows.values()
    assert row.trajectory.outside_calls[0].model == "house" and not row.trajectory.captured
    assert [message["role"] for message in row.trajectory.messages()] == ["user", "assistant"]


def test_a_budget_ends_the_apps_own_calls_and_keeps_what_was_paid(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_llm(lambda request: says("blue", usage=(1_000_000, 0))) as endpoint:
        agent = app(endpoint.url, app_folder, monkeypatch, "as_is_paid")
        with pytest.raises(BudgetExceeded):
            offbook_compare.compare(agent, SCENARIOS, ["as-is?prompt_price=1&completion_price=1"], max_cost=1.5)
        assert len(endpoint.requests) == 2
        assert len(Journal(app_folder / "comparison" / ROWS).rows) == 2
        with pytest.raises(ConfigError, match="max_cost needs the cost of the app's own calls"):
            offbook_compare.compare(agent, SCENARIOS, ["as-is"], max_cost=1.5, output=app_folder / "unpriced")


def test_a_rollout_function_has_no_model_of_its_own(app_folder: Path) -> None:
    async def rollout(model: object, scenario: object) -> offbook.Trajectory:
        return offbook.Trajectory()

    with pytest.raises(ConfigError, match="as-is: only what offbook_langgraph"):
        offbook_compare.compare(rollout, SCENARIOS, ["as-is"])
    with pytest.raises(ConfigError, match="takes name and prices only"):
        offbook_compare.compare(rollout, SCENARIOS, ["as-is?api_base=x"])
