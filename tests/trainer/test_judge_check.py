"""How far a judge agrees with a person's ranks: the file, the numbers, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import ConfigError, LlmError
from offbook.commands.main import app, guarded
from offbook.contracts import GroupsFinished
from offbook.testing import LlmReply, LlmRequest, fails, says, scripted_llm
from offbook.testing.sinks import sample_rollout
from offbook.tracing.jsonl import JsonlSink
from offbook.trainer.judge_check import check_judge_on, read_ranked
from tests.rewards.scripted_judge import by_last_number, entries, group_of, honest, judge_at, verdict


def row(group: object, number: int, **fields: Any) -> dict[str, Any]:
    return {"group": group, "messages": group_of(number).trajectories[0].messages(), **fields}


def written(folder: Path, *rows: object) -> Path:
    file = folder / "ranked.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file


async def test_a_judge_of_the_same_mind_has_tau_1_and_one_of_the_opposite_minus_1(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        row("a", 10, rank=3), row("a", 50, rank=2), row("a", 90, rank=1),
        row(7, 10, score=0.9), row(7, 90, score=0.1), row(7, 20),
    )  # fmt: skip
    with scripted_llm(honest) as endpoint:
        check = await check_judge_on(read_ranked(file), judge_at(endpoint))
    assert [(group.group, group.tau, group.pairs_right, group.pairs) for group in check.groups] == [
        ("a", 1.0, 3.0, 3),
        ("7", -1.0, 0.0, 1),
    ]
    assert (check.tau, check.accuracy) == (0.0, 0.75)
    assert check.lines()[:4] == [
        "2 groups scored, 5 rollouts",
        "Kendall's tau-b 0.00 (1: the same order, 0: no relation, -1: reversed)",
        "pairs in the right order 75% of 4 (a tie of the judge's counts half)",
        "least alike: group 7, tau-b -1.00",
    ]
    assert check.lines()[4].startswith("judge: 2 questions, 2 requests, 20 + 10 tokens")
    assert check.cost is None, "the price of the scripted model is unknown"


async def test_a_group_that_the_judge_cannot_score_is_counted_and_a_wrong_key_is_an_error(tmp_path: Path) -> None:
    def script(request: LlmRequest) -> LlmReply:
        return says("no") if "count 11" in request.messages[1]["content"] else verdict(entries(request, by_last_number))

    file = written(tmp_path, row("a", 10, rank=2), row("a", 50, rank=1), row("b", 11, rank=1), row("b", 90, rank=1))
    with scripted_llm(script) as endpoint:
        check = await check_judge_on(read_ranked(file), judge_at(endpoint))
    assert [group.group for group in check.groups] == ["a"] and list(check.unscored) == ["b"]
    assert any(line.startswith("group b was not scored: ") for line in check.lines())
    with scripted_llm([fails(401, "wrong key")]) as endpoint, pytest.raises(LlmError):
        await check_judge_on(read_ranked(file), judge_at(endpoint))


async def test_where_nothing_is_ordered_there_is_no_number(tmp_path: Path) -> None:
    file = written(tmp_path, row("a", 10, rank=1), row("a", 50, rank=1))
    with scripted_llm(honest) as endpoint:
        check = await check_judge_on(read_ranked(file), judge_at(endpoint))
    assert check.tau is check.accuracy is None and "rank rollouts of different quality" in check.lines()[1]


def test_lines_of_a_sink_with_ranks_added_can_be_read(tmp_path: Path) -> None:
    for step in (0, 1):
        rollouts = tuple(sample_rollout(index, step=step) for index in range(8))
        JsonlSink(tmp_path).groups_finished(GroupsFinished("run", "train", step, (), rollouts))
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    ranked = read_ranked(written(tmp_path, *({**line, "rank": number} for number, line in enumerate(lines, 1))))
    assert {name: len(each) for name, each in ranked.items()} == {
        f"run-conformance-train-{step}-{group}": 4 for step in (0, 1) for group in (0, 1)
    }
    [history] = next(iter(ranked.values()))[0].histories
    assert [each["role"] for each in history.messages()] == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("a", 1, rank=1, score=1), row("a", 1, rank=1)], "ranked.jsonl:1: `score` and `rank`: one of the two"),
        ([row("a", 1, rank="best"), row("a", 1, rank=1)], "`rank` must be a number, got 'best'"),
        ([{"group": "a", "rank": 1}, row("a", 1, rank=1)], "`messages` is missing"),
        ([{"group": "a", "rank": 1, "messages": "hi"}, row("a", 1, rank=1)], "cannot be read"),
        ([row(None, 1, rank=1)], "`group` must be a name"),
        ([row("a", 1, rank=1)], "group a has one ranked rollout; two are needed"),
        ([row("a", 1), row("a", 2)], "no line has a `score` or a `rank`"),
        (["text"], "an object is needed"),
    ],
)
def test_a_file_with_faults_names_each_line(rows: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read_ranked(written(tmp_path, *rows))
    assert message in str(raised.value)


def test_the_command_prints_the_result_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    file = written(tmp_path, row("a", 10, rank=2), row("a", 50, rank=1))
    (tmp_path / "rubric.md").write_text("- Count well.")
    with scripted_llm(honest) as endpoint:
        words = (
            f"judge-check {file} --judge openai/judge --judge-api-base {endpoint.url} --rubric {tmp_path / 'rubric.md'}"
        )
        with pytest.raises(SystemExit) as end:
            guarded(lambda: app([*words.split(), "--results", str(tmp_path / "out.json")]))
    assert end.value.code == 0 and "tau-b 1.00" in capsys.readouterr().out
    assert "- Count well." in endpoint.requests[0].messages[0]["content"]
    results = json.loads((tmp_path / "out.json").read_text())
    assert (results["tau"], results["accuracy"], len(results["groups"])) == (1.0, 1.0, 1)


def test_a_file_or_a_rubric_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, row("a", 10, rank=2), row("a", 50, rank=1))
    for words, message in (
        (f"judge-check {tmp_path / 'none.jsonl'} --judge openai/o3", "none.jsonl cannot be read"),
        (f"judge-check {file} --judge openai/o3 --rubric {tmp_path / 'none.md'}", "--rubric: "),
        ("train app:agent --scenarios s.jsonl --rubric r.md", "need --judge too"),
    ):
        assert guarded(lambda words=words: app(words.split())) == 2
        assert message in capsys.readouterr().err
