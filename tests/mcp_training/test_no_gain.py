"""After a run without gain, a block of lines says why."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from offbook import Trajectory, TrajectoryGroup
from offbook_mcp.scenarios.scenario import McpScenario
from offbook_mcp.training.comparison import Measured, RunRecord
from offbook_mcp.training.mcp_trainer import gained
from tests.mcp_training.conftest import told

TEXT = {"type": "object", "properties": {"who": {"type": "string"}, "unit": {"type": "string"}}}


def rolled(scenario: McpScenario, *arguments: dict[str, Any] | str, success: float = 0.0) -> Trajectory:
    """A scored rollout that called the scenario's tool with these arguments."""
    calls = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {
                "name": scenario.tools[0],
                "arguments": written if isinstance(written, str) else json.dumps(written),
            },
        }
        for number, written in enumerate(arguments)
    ]
    messages = [{"role": "user", "content": scenario.task}, {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": name, "parameters": TEXT}} for name in scenario.tools]
    return Trajectory(
        messages_and_choices=cast(Any, messages),
        tools=cast(Any, tools),
        reward=success,
        metrics={"success": success, "argument_match": success},
        metadata={"scenario_id": scenario.id},
    )


def lines_after(scenarios: list[McpScenario], *rollouts: Trajectory) -> list[str]:
    record = RunRecord(scenarios)
    record.add([TrajectoryGroup(list(rollouts))])
    return list(record.lines())


def test_what_was_never_and_always_solved_and_never_written_right_is_named() -> None:
    desk, dept = (
        told("where is Ada?", ("desk", {"who": "Ada"})),
        told("Bo's room in cm", ("size", {"who": "Bo", "unit": "cm"})),
    )
    people, far = told("who is here?", ("people", {})), told("how far?", ("far", {"who": "Ada"}))
    later = told("later", ("desk", {"who": "Bo"}), difficulty=3)
    record = RunRecord([desk, dept, people, far, later])
    groups = [
        [rolled(desk, {"who": "ada l"}), rolled(desk, {"who": "Ada", "unit": "m"}, success=0.0)],
        [rolled(dept, {"who": "Bo", "unit": "centimetres"}), rolled(dept, "{"), rolled(dept, {"who": "Bo"})],
        [rolled(people, {}, success=1.0), rolled(people, {}, success=1.0)],
        [rolled(far), rolled(far)],
    ]
    record.add([TrajectoryGroup(group) for group in groups])
    record.opened(3, " (success at 1: 12%)")
    assert list(record.lines()) == [
        "No gain: of 4 scenarios trained on,",
        "  never solved: 3 (desk 1, size 1, far 1), such as 'where is Ada?'",
        "  always solved, which teaches nothing: 1 (people 1)",
        "  never called: far (in 1)",
        '  never written right: size.unit (in 1 scenario, such as "centimetres" for "cm")',
        "  difficulty 3 opened after 1 iteration (success at 1: 12%)",
        "  not tried: 1 of difficulty 3",
        "Easier scenarios may help (`offbook mcp scenarios TARGET --max-difficulty 1`), or a larger --base-model.",
    ]


def test_an_argument_that_is_always_left_out_is_named_and_no_hidden_one() -> None:
    scenario = told("a", ("size", {"who": "Bo", "bound": "x"}))
    shown = lines_after([scenario], rolled(scenario, {"unit": "cm"}))
    assert "  never written right: size.who (in 1 scenario, always left out)" in shown
    assert "bound" not in str(shown)


def test_scenarios_that_are_sometimes_solved_are_counted() -> None:
    scenario = told("a", ("desk", {"who": "Ada"}))
    assert lines_after([scenario], rolled(scenario), rolled(scenario, {"who": "Ada"}, success=1.0)) == [
        "No gain: of 1 scenario trained on,",
        "  sometimes solved: 1",
    ]


def test_rollouts_without_a_success_give_no_reasons() -> None:
    scenario = told("a", ("desk", {"who": "Ada"}))
    failed, judged = rolled(scenario), rolled(scenario)
    failed.reward = None
    del judged.metrics["success"]
    assert lines_after([scenario], failed, judged) == []


@pytest.mark.parametrize(("before", "after", "gain"), [(0.0, 0.0, False), (0.5, 0.25, False), (0.0, 0.25, True)])
def test_success_on_held_out_scenarios_decides_on_gain(before: float, after: float, gain: bool) -> None:
    measured = [Measured(step=step, rates={"success": rate}) for step, rate in ((0, before), (9, after))]
    assert gained(cast(Any, None), *measured) is gain
