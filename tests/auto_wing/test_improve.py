"""`offbook improve`: an app on the model that it has, a trained model in its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offbook
from offbook.base.choices import choice_of
from offbook.base.errors import ConfigError, RolloutError
from offbook.client.supervised_training import SFTResult, SFTUpdate
from offbook.supervised.conversations import read_conversations
from offbook.trainer.evaluate import Interval
from offbook.trainer.report import Stopped, TrainReport
from offbook_auto.good_runs import good_runs, row_of, with_rewards
from offbook_auto.improve import Improver
from offbook_auto.options import ImproveOptions
from offbook_auto.report import CurvePoint, ImproveReport, write_report
from offbook_compare.journal import ComparedRollout
from offbook_compare.results import CandidateResult, ComparisonReport


def row(name: str, reward: float | None, success: float | None = None, error: str | None = None) -> ComparedRollout:
    metrics = {} if success is None else {"success": success}
    trajectory = offbook.Trajectory(
        messages_and_choices=[{"role": "user", "content": name}, {"role": "assistant", "content": "yes"}]
    )
    return ComparedRollout(
        key=name, candidate="as-is", scenario=name, index=0, reward=reward, metrics=metrics, error=error, seconds=1.0,
        trajectory=trajectory,
    )  # fmt: skip


def test_good_runs_are_those_with_success_or_the_reward_that_is_asked_for() -> None:
    rows = [row("a", 0.9, 1.0), row("b", 0.95, 0.0), row("c", 0.1, 1.0)]
    assert [one.key for one in good_runs(rows, None).rows] == ["a", "c"]
    assert [one.key for one in good_runs(rows, 0.5).rows] == ["a", "b"]
    plain = [row("a", 0.9), row("b", 0.2), row("c", 0.1)]
    assert [one.key for one in good_runs(plain, None).rows] == ["a"]
    with pytest.raises(ConfigError, match="none of its 3 scored runs has a reward of at least 1"):
        good_runs(plain, 1.0)
    mixed = good_runs([*rows, *plain], None)  # a judge scored those without success
    assert [one.key for one in mixed.rows] == ["a", "c", "a"]
    assert mixed.rule == "success, or where it is not reported a reward of at least the mean, 0.400"


async def test_a_judge_that_scores_none_of_what_needs_it_ends_the_observation_with_its_reason() -> None:
    async def down(group: offbook.TrajectoryGroup) -> offbook.TrajectoryGroup:
        if group.metadata["scenario_id"] != "a":
            raise OSError("nobody answers")
        return group

    rows = [row("a", 0.5), row("b", None)]
    with pytest.raises(
        RolloutError, match=r"none of 1 group was scored, the first because .*nobody answers.*run it again"
    ):
        await with_rewards(rows, down)
    kept = await with_rewards([*rows, row("a", 0.5), row("c", 0.2)], None)
    assert [one.key for one in kept] == ["a", "a", "c"]


def test_a_run_becomes_a_conversation_in_which_only_the_models_answers_have_weight(tmp_path: Path) -> None:
    example = {"role": "assistant", "content": "an example of the prompt"}
    choice = choice_of({"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}})
    history = offbook.History(messages_and_choices=[{"role": "user", "content": "2 + 2?"}, example, choice])
    told = row_of(history)
    assert [message.get("weight") for message in told["messages"]] == [None, 0, None]
    (tmp_path / "good.jsonl").write_text(json.dumps(told) + "\n")
    [conversation] = read_conversations(tmp_path / "good.jsonl").conversations
    assert conversation.weights == {1: 0.0}


def result(name: str, mean: float, trained: bool = True) -> CandidateResult:
    value = Interval(mean, mean - 0.1, mean + 0.1)
    return CandidateResult(
        name, trained, None, 40, 40, 0, value, value if trained else None, {}, mean, 2.0, 500.0, 20.0, (0.2, 0.4),
        0.001,
    )  # fmt: skip


def test_the_report_says_which_step_is_best(tmp_path: Path) -> None:
    curve = [CurvePoint("base", 0, result("step:0", 0.3)), CurvePoint("supervised", 9, result("step:9", 0.7))]
    curve += [CurvePoint("round 1", 19, result("step:19", 0.6))]
    teacher = result("as-is", 0.65, trained=False)
    comparison = ComparisonReport("run", "success", "as-is", (teacher, *(point.result for point in curve)))
    report = ImproveReport(
        folder=tmp_path, model="desk", teacher="as-is", reached="compare", good="90 of 100 runs are good",
        ended="it no longer rose", curve=curve, comparison=comparison,
    )  # fmt: skip
    assert report.best is curve[1]
    assert report.verdict().startswith(
        "step 9 of desk: success 0.700 (0.600 to 0.800) held out; difference to its base"
    )
    assert (
        "the teacher as-is 0.650" in report.verdict() and "1,000 runs cost 1 USD, the teacher 1 USD" in report.verdict()
    )
    write_report(report)
    markdown = (tmp_path / "report.md").read_text()
    assert "| supervised | 9 | 0.700 (0.600 to 0.800) |" in markdown and "the step was chosen among 3" in markdown
    early = replace(report, curve=[], comparison=None, reached="observe", stopped="budget")
    assert early.verdict() == "nothing was measured yet: max_cost is spent; the last whole stage is observe"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"teacher": "step:0"}, "untrained base"),
        ({"max_cost": 0}, "max_cost"),
        ({"rounds": -1}, "rounds"),
        ({"gpu_price": -1}, "gpu_price"),
        ({"success_at": "x"}, "success_at"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ImproveOptions(**options)  # type: ignore[arg-type]


class Measured:
    """An app whose steps are as good as `values` says, by model and step; it notes what was trained and compared."""

    def __init__(self, name: str, values: dict[tuple[str, int], float], notes: list[str]) -> None:
        self.model: Any = SimpleNamespace(name=name, base_model="tiny", train_sft=self.imitated)
        self.judge, self.values, self.notes = None, values, notes

    async def imitated(self, *_: object, **__: object) -> SFTResult:
        return SFTResult(self.model.name, 9, "sft", (SFTUpdate(9, 0, 0.5, 1e-3),))

    def scenarios(self, split: str) -> list[str]:
        return ["x"] * (20 if split == "train" else 6)

    def input_stages(self) -> list[Any]:
        return []

    def texts(self) -> dict[str, str]:
        return {}

    async def compared(self, split: str, candidates: Sequence[Any], *, output: Path, **_: object) -> ComparisonReport:
        names = [getattr(each, "name", each) for each in candidates]
        self.notes.append(f"{self.model.name} in {output.name}: {' '.join(names)}")
        means = [self.values.get((self.model.name, int(name.partition(":")[2] or 0)), 0.8) for name in names]
        results = tuple(result(name, mean) for name, mean in zip(names, means, strict=True))
        return ComparisonReport("run", "success", names[0], results)

    async def trained(self, steps: int) -> TrainReport:
        self.notes.append(f"{self.model.name} to step {steps}")
        return TrainReport(self.model.name, steps - 10, steps, Stopped.FINISHED, (), (), None)


def improved(folder: Path, values: dict[tuple[str, int], float], rounds: int = 1) -> tuple[ImproveReport, list[str]]:
    """Run the stages after the observation; rounds of ten steps."""
    (folder / "observed").mkdir(exist_ok=True)
    (folder / "observed" / "rollouts.jsonl").write_text(
        "".join(row(f"{number}", 1.0).model_dump_json() + "\n" for number in range(20))
    )
    (folder / "good.jsonl").write_text("{}\n")
    notes: list[str] = []
    improver = Improver(Measured("desk", values, notes), ImproveOptions(rounds=rounds, output=folder))
    return improver.run(), notes


def test_the_rounds_go_on_from_the_supervised_step(tmp_path: Path) -> None:
    report, notes = improved(tmp_path, {("desk", 0): 0.3, ("desk", 9): 0.3, ("desk", 19): 0.6})
    assert "desk to step 19" in notes
    assert notes[-1] == "desk in comparison: as-is step:0 step:9 step:19"
    assert (report.model, report.best and report.best.step) == ("desk", 19)


def test_a_step_is_measured_beside_all_before_it_since_a_judges_scores_hold_in_one_comparison(tmp_path: Path) -> None:
    values = {("desk", 0): 0.3, ("desk", 9): 0.4, ("desk", 19): 0.5, ("desk", 29): 0.6}
    report, notes = improved(tmp_path, values, rounds=2)
    assert "desk in comparison: step:0 step:9 step:19 step:29" in notes
    assert [point.mean for point in report.curve] == [0.3, 0.4, 0.5, 0.6]
