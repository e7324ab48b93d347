"""examples/mcp_rl: its scenarios are solved by their reference calls on its server."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from offbook_mcp import ServerPool, Target
from offbook_mcp.training.rewards import answer_score
from offbook_mcp.training.scenario_rollouts import check_scenarios
from tests.paths import ROOT


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The modules `mcp_rl.orders` and `mcp_rl.customers`."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("mcp_rl.orders"), importlib.import_module("mcp_rl.customers")
    for name in ("mcp_rl.orders", "mcp_rl.customers"):
        sys.modules.pop(name, None)


async def test_every_scenario_is_solved_by_its_call_and_no_order_is_in_both_splits(example: tuple[Any, Any]) -> None:
    orders, customers = example
    scenarios = customers.scenarios()
    async with ServerPool(Target.parse(orders.server)) as pool:
        check_scenarios(scenarios, pool.toolset, None)
        assert len(pool.shared) == 1
        async with pool.rollout() as tools:
            for scenario in scenarios:
                [call] = scenario.calls
                result = await tools.call(call.tool, dict(call.arguments))
                assert answer_score(scenario.answer, result.text) == 1.0
                assert not any(tool.name.replace("_", " ") in scenario.task for tool in pool.toolset.tools)
    by_split = {
        split: {str(each.calls[0].arguments) for each in scenarios if each.split == split}
        for split in ("train", "eval")
    }
    assert by_split["train"].isdisjoint(by_split["eval"])
    assert {each.tools for each in scenarios if each.split == "eval"} == {(name,) for name in customers.FIELDS}
    assert customers.scenarios(0) == scenarios
