"""`offbook improve`: an app on the model that it has, a trained model in its place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import offbook
from offbook.auto.good_runs import good_runs, row_of
from offbook.auto.improve_options import ImproveOptions
from offbook.auto.improve_report import CurvePoint, ImproveReport, write_report
from offbook.base.choices import choice_of
from offbook.base.errors import ConfigError
from offbook.commands.main import run as command_line
from offbook.comparison.journal import ComparedRollout
from offbook.comparison.results import CandidateResult, ComparisonReport
from offbook.supervised.conversations import read_conversations
from offbook.testing import says, scripted_llm
from offbook.trainer.statistics import Interval
from tests.paths import ROOT


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
    with pytest.raises(ConfigError, match="none of 3 scored ones has a reward of at least 1"):
        good_runs(plain, 1.0)


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
        name, trained, None, 40, 40, 0, value, value if trained else None, {}, mean, 2.0, 500.0, 20.0, (0.2, 0.4), (1.0, 2.0),
        50.0, 0.001, 0.04, 0, 0,
    )  # fmt: skip


def test_the_report_says_which_step_is_best_and_shows_the_curve(tmp_path: Path) -> None:
    curve = [CurvePoint("base", 0, result("step:0", 0.3)), CurvePoint("supervised", 9, result("step:9", 0.7))]
    curve += [CurvePoint("round 1", 19, result("step:19", 0.6))]
    teacher = result("as-is", 0.65, trained=False)
    comparison = ComparisonReport("run", "success", "as-is", (teacher, *(point.result for point in curve)))
    report = ImproveReport(
        tmp_path, "desk", "tiny", "as-is", "compare", "", "90 of 100 runs are good", "it no longer rose",
        {"sft": 60.0}, tuple(curve), comparison, {},
    )  # fmt: skip
    assert report.best is curve[1]
    assert report.verdict().startswith(
        "step 9 of desk: success 0.700 (0.600 to 0.800) held out; difference to its base"
    )
    assert (
        "the teacher as-is 0.650" in report.verdict() and "1,000 runs cost 1 USD, the teacher 1 USD" in report.verdict()
    )
    write_report(report, tmp_path)
    markdown, page = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert "| supervised | 9 | 0.700 (0.600 to 0.800) |" in markdown and "the step was chosen among 3" in markdown
    assert page.count('class="dot"') == 3 and 'class="teacher"' in page
    early = replace(report, curve=(), comparison=None, reached="observe", stopped="budget")
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


def desk(folder: Path, train: int, held_out: int) -> None:
    """The quickstart's app and its scenarios, in this folder."""
    shutil.copy(ROOT / "examples" / "quickstart" / "app.py", folder / "improved_desk.py")
    subprocess.run([sys.executable, "improved_desk.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for name, count in (("train.jsonl", train), ("held_out.jsonl", held_out)):
        lines = (folder / name).read_text().splitlines()[:count]
        (folder / name).write_text("\n".join(lines) + "\n")


WORDS = ["improve", "improved_desk:agent", "--scenarios", "train.jsonl", "--eval", "held_out.jsonl", "--output", "out"]


def test_a_dry_run_asks_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk(folder, 20, 6)
    monkeypatch.syspath_prepend(folder)
    with scripted_llm([says("unused")]) as endpoint:
        monkeypatch.setenv("OPENAI_API_BASE", endpoint.url)
        assert command_line([*WORDS, "--dry-run", "--rounds", "2"]) == 0
        assert not endpoint.requests
    told = capsys.readouterr().out
    assert "observe: 20 runs of the app on as-is; what one takes is known after the first 8" in told
    assert "train: 2 rounds at most of 10 steps, 658 runs" in told and "unknown price" in told
    assert not (folder / "out").exists()
