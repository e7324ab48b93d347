"""MCPTrainer from a server to a LoRA, with the tiny policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from offbook import OffbookError, RemoteBackend, TrainableModel, Trajectory, TrajectoryGroup
from offbook.base.errors import ConfigError, RolloutError
from offbook.testing import Action, scripted_server
from offbook.testing.asgi import Body
from offbook_mcp import Limits, McpStartError
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, save_scenarios
from offbook_mcp.training.defaults import default_config
from offbook_mcp.training.mcp_trainer import Comparison, MCPTrainer, Measured, TrainingState
from offbook_mcp.training.scenario_rollouts import ScenarioJudge
from tests.mcp_adapter.conftest import misbehaving
from tests.mcp_training.conftest import told
from tests.mcp_training.order_server import READS, make_server, scenarios

QUICK: dict[str, Any] = {"group_size": 6, "scenarios_per_step": 4, "max_completion_tokens": 48, "temperature": 1.5}


def trainer(model: TrainableModel, **options: Any) -> tuple[MCPTrainer, list[str]]:
    said: list[str] = []
    options = QUICK | {"say": said.append} | options
    return MCPTrainer(make_server(), model, options.pop("scenarios", scenarios()), **options), said


@pytest.mark.slow("whole trainings")
async def test_the_tiny_policy_is_trained_on_a_server_and_goes_on_where_it_was(model: TrainableModel) -> None:
    first, _ = trainer(model)
    report = await first.atrain(1)
    assert (report.started, report.step) == (0, 1)
    assert report.checkpoint is not None
    assert [each.step for each in report.evaluations] == [0, 1]
    assert {"success", "success.order_status", "tool_match"} <= set(report.evaluations[0].metrics)
    kept = (await model.read_state())["mcp"]
    assert kept["before"]["step"] == 0

    again, _ = trainer(model)
    assert (await again.atrain(1)).iterations == ()
    assert again.comparison is not None
    assert (again.comparison.before, again.comparison.after) == (first.comparison.before, first.comparison.after)  # type: ignore[union-attr]
    lines = list(again.comparison.lines())
    assert lines[0] == f"success on 3 held-out scenarios (greedy), scenarios {scenarios().digest[:16]}"
    assert lines[2].startswith("all")
    assert lines[3].startswith("order_status")


async def test_evaluation_leaves_the_model_as_it_is(stand_in: TrainableModel) -> None:
    evaluated = await trainer(stand_in)[0].aevaluate(rollouts=2, temperature=1.0)
    assert (evaluated.scenarios, evaluated.scored, evaluated.failed) == (3, 3, 0)
    assert await stand_in.get_step() == 0


async def test_success_before_training_is_kept_as_soon_as_the_first_step_begins(tmp_path: Path) -> None:
    def right(body: Body) -> Action:
        said = body["messages"][-1]
        if said["role"] == "tool":
            text = said["content"] if isinstance(said["content"], str) else said["content"][0]["text"]
            return Action(text)
        order = "".join(char for char in str(body["messages"][-1]["content"]) if char.isdigit())
        return Action(calls=(("order_status", f'{{"order": "{order}"}}'),))

    with scripted_server(right, tmp_path) as running:
        model = TrainableModel("right", base_model="tiny", backend=RemoteBackend(running.url))
        chosen, _ = trainer(model, patience=1, eval_every=0)
        with pytest.raises(OffbookError):  # the scripted server has no learner
            await chosen.atrain(1)
        kept = (await model.read_state())["mcp"]
    assert kept["before"]["rates"]["success"] == 1.0


async def test_scenarios_come_from_a_file_and_a_changed_server_is_told(
    stand_in: TrainableModel, tmp_path: Path
) -> None:
    made = [each.model_copy(update={"server": "of-old"}) for each in scenarios().scenarios]
    save_scenarios(type(scenarios())(tuple(made), "of-old"), tmp_path / "s.jsonl")
    chosen, said = trainer(stand_in, scenarios=tmp_path / "s.jsonl")
    await chosen.aevaluate()
    assert "its fingerprint was of-old" in said[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scenarios": [told("a", ("nothing", {}))]}, "1 of 1 use the tool 'nothing', which the target does not offer"),
        ({"scenarios": [told("a", ("order_status", {}), split="eval")]}, "none of 1 is for training"),
        ({"scenarios": [{"task": "a"}]}, "McpScenarios are needed, got dict"),
        ({"scenarios": "nowhere.jsonl"}, "there is no file .nowhere.jsonl."),
        ({"max_turns": 0}, "max_turns: a whole number of at least 1 is needed, got 0"),
        ({"group": 3}, "there is no option 'group'"),
    ],
)
async def test_what_cannot_work_is_refused_before_the_first_rollout(
    wrong: dict[str, Any], words: str, model: TrainableModel
) -> None:
    with pytest.raises(ConfigError, match=words):
        await trainer(model, **wrong)[0].atrain(1)


def test_reward_and_eval_belong_to_the_scenarios(model: TrainableModel) -> None:
    with pytest.raises(ConfigError, match="reward: an MCPTrainer takes it from the scenarios"):
        trainer(model, reward=len)


async def test_scenarios_for_a_judge_need_one(model: TrainableModel) -> None:
    open_task = McpScenario(id="a", task="do", difficulty=1, tools=("order_status",), check=CheckKind.JUDGE)
    with pytest.raises(ConfigError, match=r"1 of 1 can only be scored by a judge: pass judge=offbook.Ruler"):
        await trainer(model, scenarios=[open_task])[0].atrain(1)


async def test_a_judge_that_no_scenario_needs_is_told(stand_in: TrainableModel) -> None:
    chosen, said = trainer(stand_in, judge=give_one)
    assert "judge      none: rewards come from execution" in await chosen.aplan(2)
    await chosen.aevaluate()
    assert said == [
        'judge: not asked, since every scenario is scored by execution; those with "check": "judge" need one'
    ]


async def test_scenarios_that_are_all_held_out_can_be_evaluated(stand_in: TrainableModel) -> None:
    held_out = [each.model_copy(update={"split": "eval"}) for each in scenarios().scenarios]
    chosen, _ = trainer(stand_in, scenarios=held_out)
    assert (await chosen.aevaluate()).scenarios == 12
    with pytest.raises(ConfigError, match="none of 12 is for training"):
        await chosen.atrain(1)


def test_a_learning_rate_of_ones_own_falls_like_the_default() -> None:
    schedule = default_config("tiny-mcp", 20, 1e-3)
    assert callable(schedule)
    assert schedule(1).learning_rate == pytest.approx(1e-3)
    assert schedule(11).learning_rate == pytest.approx(5e-4)
    assert schedule(1).kl_coef == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="learning_rate"):
        default_config("tiny-mcp", 20, -1.0)


async def test_a_server_that_fails_in_every_rollout_ends_the_run_with_the_causes(stand_in: TrainableModel) -> None:
    target = misbehaving("die", limits=Limits(start_seconds=20, call_seconds=5))
    chosen = MCPTrainer(target, stand_in, [told("goad()", ("goad", {}))], group_size=2, say=print)
    with pytest.raises(RolloutError, match="McpConnectionError: MCP server 'odd'"):
        await chosen.atrain(1)


async def test_a_plan_tells_what_would_happen_and_does_nothing(model: TrainableModel) -> None:
    lines = await trainer(model)[0].aplan(20)
    assert "scenarios  9 to train on, 3 held out" in "\n".join(lines)
    assert "tools      2; all are shown; rollouts share" in "\n".join(lines)
    assert "steps      20, each 4 scenarios x 6 rollouts, 32 at once, at most 8 turns" in lines
    assert model._server() is None  # pyright: ignore[reportPrivateUsage]  # nothing was registered


def judged_group(reward: float, name: str) -> TrajectoryGroup:
    return TrajectoryGroup([Trajectory(reward=reward)], metadata={"scenario_id": name})


async def give_one(group: TrajectoryGroup) -> TrajectoryGroup:
    copies = [each.model_copy(update={"reward": 1.0}) for each in group]
    return group.model_copy(update={"trajectories": copies})


@pytest.mark.parametrize(("check", "reward"), [(CheckKind.CALLS, 0.4), (CheckKind.JUDGE, 1.4)])
def test_a_judge_scores_what_cannot_be_executed(check: CheckKind, reward: float) -> None:
    one = told("a", ("t", {}), check=check)
    judged = asyncio.run(ScenarioJudge(give_one, [one])(judged_group(0.4, one.id)))
    assert judged is not None
    assert judged.trajectories[0].reward == pytest.approx(reward)


def test_a_table_shows_each_tool_without_control_characters() -> None:
    before = Measured(step=0, rates={"success": 0.25, "success.a\x1b[2J": 0.25})
    after = Measured(step=20, rates={"success": 0.75, "success.a\x1b[2J": 0.5, "success.b": 1.0})
    lines = list(Comparison("f" * 64, 4, before, after).lines())
    assert lines[1].split() == ["step", "0", "step", "20"]
    assert [line.split() for line in lines[2:]] == [
        ["all", "25%", "75%"],
        [r"a\x1b[2J", "25%", "50%"],
        ["b", "-", "100%"],
    ]
    assert list(Comparison("f", 0).lines()) == ["success was not measured: no scenario is held out"]


def test_a_table_says_how_many_scenarios_each_column_is_of_where_rollouts_failed() -> None:
    before = Measured(step=0, rates={"success": 0.5}, scored=6)
    lines = list(Comparison("f" * 64, 16, before, Measured(step=1, rates={"success": 0.75}, scored=12)).lines())
    assert lines[-1].startswith("Rollouts failed, so step 0 was scored on 6 of the 16 scenarios and step 1 on 12:")
    whole = Measured(step=0, rates={"success": 0.5}, scored=16)
    assert not any("failed" in line for line in Comparison("f" * 64, 16, whole, whole).lines())


@pytest.mark.parametrize(("before", "hint"), [(0.85, False), (0.9, True)])
def test_a_table_says_that_scenarios_solved_before_training_leave_little_to_learn(before: float, hint: bool) -> None:
    table = Comparison(
        "f" * 64, 4, Measured(step=0, rates={"success": before}), Measured(step=2, rates={"success": 1.0})
    )
    assert any("leave more to learn" in line for line in table.lines()) == hint


def test_a_table_of_scenarios_that_a_judge_scores_says_how_to_compare_them() -> None:
    measured = Measured(step=0, rates={"answered": 1.0})
    assert "a judge scores the held-out scenarios" in next(Comparison("f" * 64, 4, measured, measured).lines())


def test_kept_state_of_other_scenarios_or_of_another_version_is_dropped() -> None:
    class Kept:
        def __init__(self, state: object) -> None:
            self.state = state

        async def read_state(self) -> dict[str, object]:
            return {"mcp": self.state} if self.state is not None else {}

    state = TrainingState(scenarios="a", before=Measured(step=0, rates={}))
    for kept, name, same in [(state.model_dump(), "a", True), (state.model_dump(), "b", False), ([1], "a", False)]:
        found = asyncio.run(TrainingState.of(Kept(kept), name))  # type: ignore[arg-type]
        assert (found.before is not None) is same
        assert found.scenarios == name


async def test_scenarios_are_made_where_there_are_none_and_kept_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(body: Body) -> Action:
        """Calls what the task names, of orders with an even number."""
        said = body["messages"][-1]
        text = said["content"] if isinstance(said["content"], str) else said["content"][0]["text"]
        if said["role"] == "tool":
            return Action(text)
        order = "".join(char for char in text if char.isdigit())
        even = order.isdigit() and int(order) % 2 == 0
        return (
            Action(calls=(("order_status" if "status" in text else "order_owner", f'{{"order": "{order}"}}'),))
            if even
            else Action("?")
        )

    server = make_server()

    @server.tool(annotations=READS)
    def list_orders() -> list[str]:
        """The numbers of all orders."""
        return [str(4_000 + 37 * number) for number in range(40)]

    monkeypatch.chdir(tmp_path)
    with scripted_server(half, tmp_path) as running:
        model = TrainableModel("half", base_model="tiny", backend=RemoteBackend(running.url))
        said: list[str] = []
        chosen = MCPTrainer(server, model, count=20, say=said.append)
        first = await chosen.aevaluate()
        again = await MCPTrainer(server, model, count=9, say=said.append).aevaluate()
    assert first.metrics == again.metrics | {
        "duration": first.metrics["duration"],
        "tool_seconds": first.metrics["tool_seconds"],
    }
    assert (tmp_path / ".offbook/mcp/half.jsonl").is_file()
    assert sum(line.startswith("making scenarios for orders") for line in said) == 1
    assert "held out, kept in " in said[-2]
    assert "not used: count, since no scenarios are made" in said[-1]


async def test_a_server_that_never_starts_is_named_before_anything_else(stand_in: TrainableModel) -> None:
    with pytest.raises(McpStartError, match="'nowhere-at-all': cannot be started"):
        await MCPTrainer("nowhere-at-all --now", stand_in, scenarios()).atrain(1)


def test_training_in_a_running_loop_names_its_twin(stand_in: TrainableModel) -> None:
    async def inside() -> None:
        trainer(stand_in)[0].train(1)

    with pytest.raises(OffbookError, match=r"use `await atrain\(\.\.\.\)`"):
        asyncio.run(inside())
