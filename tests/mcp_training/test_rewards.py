"""Rewards come from what the policy called and answered; every number here was computed by hand."""

from __future__ import annotations

import pytest

from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ReferenceCall
from offbook_mcp.tools.tool import Schema, ServerDescription, ServerTool, ToolKind
from offbook_mcp.tools.toolset import Toolset, make_toolset
from offbook_mcp.training.rewards import (
    LONGEST_ANSWER,
    EpisodeEnd,
    PolicyCall,
    ToolEpisode,
    answer_score,
    argument_score,
    contains,
    same_value,
    score,
    value_score,
)

ZONES: Schema = {
    "type": "object",
    "properties": {"source": {"type": "string"}, "time": {"type": "string"}, "target": {"type": "string"}},
    "required": ["source", "time", "target"],
}
NOTE: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "text": {"type": "string"},
        "mode": {"type": "string", "default": "new"},
    },
    "required": ["name", "text"],
}
TOOLS = [
    ServerTool("s", "convert", "", ZONES, kind=ToolKind.READ),
    ServerTool("s", "now", "", {"type": "object"}, kind=ToolKind.READ),
    ServerTool("s", "write", "", NOTE, kind=ToolKind.WRITE),
]
CONVERSION: dict[str, object] = {"source": "Asia/Tokyo", "time": "16:30", "target": "UTC"}


def toolset(bind: dict[str, object] | None = None) -> Toolset:
    return make_toolset([ServerDescription("s", None, None, "1", tuple(TOOLS))], bind=bind)


def scenario(
    *calls: ReferenceCall, check: CheckKind = CheckKind.ANSWER, answer: tuple[str, ...] = ("7:30",)
) -> McpScenario:
    names = tuple(dict.fromkeys(call.tool for call in calls))
    return McpScenario(id="a", task="do", difficulty=1, tools=names, check=check, calls=calls, answer=answer)


CONVERT = scenario(ReferenceCall(tool="convert", arguments=CONVERSION))
RIGHT = PolicyCall("convert", CONVERSION)


def test_the_right_call_and_answer_are_worth_one() -> None:
    result = score(CONVERT, ToolEpisode((RIGHT,), "It is 7:30.", turns=2), toolset())
    assert result.reward == pytest.approx(1.0)
    assert result.metrics == {
        "success": 1.0,
        "tool_match": 1.0,
        "argument_match": 1.0,
        "answer_match": 1.0,
        "needless_calls": 0.0,
        "errors": 0.0,
        "turns": 2.0,
        "answered": 1.0,
        "success.convert": 1.0,
    }


@pytest.mark.parametrize(
    ("calls", "answer", "reward"),
    [
        ((), "", 0.0),
        ((), "7:30", 0.0),  # a guess
        ((PolicyCall("now", {}),), "", -0.05),
        ((PolicyCall("convert", {}),), "", 0.2),
        ((PolicyCall("convert", {**CONVERSION, "time": "9:00"}),), "8", 0.2 + 0.4 * 2 / 3),
        ((PolicyCall("convert", {**CONVERSION, "time": "9:00"}),), "7:30", 0.2 + 0.4 * 2 / 3 + 0.4 * 2 / 3),
        ((RIGHT,), "no idea", 0.6),
        ((RIGHT, RIGHT), "7:30", 0.95),
        ((PolicyCall("convert", None), RIGHT), "7:30", 0.95),  # malformed, then right
        ((PolicyCall("nothing", None),) * 9, "", -0.2),
    ],
)
def test_partial_credit_grows_with_what_is_right(calls: tuple[PolicyCall, ...], answer: str, reward: float) -> None:
    assert score(CONVERT, ToolEpisode(calls, answer), toolset()).reward == pytest.approx(reward)


def test_an_answer_counts_only_where_the_rollout_ended_with_it() -> None:
    cut = score(CONVERT, ToolEpisode((RIGHT,), "7:30", EpisodeEnd.TURN_LIMIT), toolset())
    assert (cut.reward, cut.metrics["success"]) == (pytest.approx(0.6), 0.0)


def test_a_volatile_answer_is_checked_by_its_calls_and_must_be_given() -> None:
    volatile = scenario(ReferenceCall(tool="now"), check=CheckKind.CALLS, answer=())
    assert score(volatile, ToolEpisode((PolicyCall("now", {}),), "noon"), toolset()).reward == pytest.approx(1.0)
    silent = score(volatile, ToolEpisode((PolicyCall("now", {}),), " "), toolset())
    assert (silent.reward, silent.metrics["success"]) == (pytest.approx(0.6), 0.0)


def test_an_answer_without_reference_calls_is_worth_its_values() -> None:
    bare = McpScenario(id="a", task="do", difficulty=1, tools=("now",), check=CheckKind.ANSWER, answer=("7:30",))
    assert score(bare, ToolEpisode((PolicyCall("now", {}),), "7:30"), toolset()).reward == pytest.approx(1.0)


def test_calls_are_matched_best_pairs_first_whatever_their_order() -> None:
    other = {**CONVERSION, "target": "Europe/Paris"}
    both = scenario(ReferenceCall(tool="convert", arguments=CONVERSION), ReferenceCall(tool="convert", arguments=other))
    turned = score(both, ToolEpisode((PolicyCall("convert", other), RIGHT), "7:30"), toolset())
    assert turned.reward == pytest.approx(1.0)
    half = score(both, ToolEpisode((RIGHT,), "7:30"), toolset())
    assert half.metrics["tool_match"] == half.metrics["argument_match"] == 0.5
    assert half.reward == pytest.approx(0.2 * 0.5 + 0.4 * 0.5 + 0.4 * 0.5)


def test_another_call_that_may_write_is_no_success_one_that_reads_is() -> None:
    note: dict[str, object] = {"name": "a", "text": "b"}
    task = scenario(ReferenceCall(tool="write", arguments=note), check=CheckKind.CALLS, answer=())
    written = PolicyCall("write", note)
    assert score(task, ToolEpisode((written, PolicyCall("now", {})), "done"), toolset()).metrics["success"] == 1.0
    assert score(task, ToolEpisode((written, written), "done"), toolset()).metrics["success"] == 0.0


def test_what_the_server_reports_as_an_error_is_counted_and_not_scored() -> None:
    failed = score(CONVERT, ToolEpisode((PolicyCall("convert", CONVERSION, failed=True),), "7:30"), toolset())
    assert (failed.reward, failed.metrics["errors"]) == (pytest.approx(1.0), 1.0)


def test_arguments_that_are_bound_do_not_count() -> None:
    made = PolicyCall("write", {"name": "anything", "text": "b"})
    task = scenario(ReferenceCall(tool="write", arguments={"text": "b"}), check=CheckKind.CALLS, answer=())
    assert score(task, ToolEpisode((made,), "done"), toolset({"name": "fixed"})).reward == pytest.approx(1.0)


def test_a_scenario_for_a_judge_has_no_success_and_costs_for_malformed_calls() -> None:
    open_task = McpScenario(id="a", task="do", difficulty=1, tools=("now",), check=CheckKind.JUDGE)
    result = score(open_task, ToolEpisode((PolicyCall("now", None),), "x"), toolset())
    assert result.reward == pytest.approx(-0.05)
    assert "success" not in result.metrics


@pytest.mark.parametrize(
    ("expected", "actual", "schema", "name"),
    [
        (3, 3.0, {}, ""),
        ("a  b", " a b", {}, ""),
        ("Local", "local", {"enum": ["local", "remote"]}, ""),
        ("/a/b", "/a//./b/", {}, "path"),
        ("notes.txt", "./notes.txt", {}, "file"),
        ("09:05", "9:05", {}, "time"),
        (["a", "b"], ["b", "a"], {"uniqueItems": True}, ""),
        ([1, 2], [1.0, 2.0], {}, ""),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {}, ""),
        ({"a": 1}, {"a": 1, "b": 5}, {"properties": {"b": {"default": 5}}}, ""),
        (True, True, {}, ""),
    ],
)
def test_values_that_mean_the_same(expected: object, actual: object, schema: Schema, name: str) -> None:
    assert same_value(expected, actual, schema, name)


@pytest.mark.parametrize(
    ("expected", "actual", "schema", "name"),
    [
        ("Asia/Tokyo", "asia/tokyo", {}, "timezone"),
        ("/a/b", "/a/c", {}, "path"),
        ([1, 2], [2, 1], {}, ""),
        ([1], [1, 1], {"uniqueItems": True}, ""),
        (1, True, {}, ""),
        ("x", None, {}, ""),
        ("3", 3, {}, ""),
    ],
)
def test_values_that_differ(expected: object, actual: object, schema: Schema, name: str) -> None:
    assert not same_value(expected, actual, schema, name)


@pytest.mark.parametrize(
    ("expected", "actual", "worth"), [(3, "3", 0.5), ("3", 3, 0.5), (True, "true", 0.5), (3, "three", 0), ("a", 1, 0)]
)
def test_the_right_value_of_another_type_is_worth_half(expected: object, actual: object, worth: float) -> None:
    assert value_score(expected, actual, {}) == worth


def test_defaults_and_nulls_may_be_left_out_or_written() -> None:
    parameters: Schema = {"properties": {"a": {"type": "string"}, "n": {"default": 10}}, "required": ["a"]}
    assert argument_score({"a": "x"}, {"a": "x", "n": 10}, parameters) == 1.0
    assert argument_score({"a": "x", "n": 10}, {"a": "x", "other": None}, parameters) == 1.0
    assert argument_score({"a": "x"}, {"a": "x", "n": 11}, parameters) == 0.5
    assert argument_score({}, {}, parameters) == 1.0


@pytest.mark.parametrize(
    ("answer", "value", "there"),
    [
        ("It is 5.", "5", True),
        ("It is 5.0 degrees", "5", True),
        ("1,250 in all", "1250", True),
        ("It is -3.5h", "-3.5h", True),
        ("15 of 25", "5", False),
        ("0.5", "5", False),
        ("-5", "5", False),
        ("On SHELF  seven", "shelf seven", True),
        ("bookshelf", "shelf", False),
        ("in `main`", "main", True),
        ("2026-01-03T10:00:00+09:00", "2026-01-03T10:00:00+09:00", True),
        ("", "x", False),
    ],
)
def test_an_answer_contains_a_value(answer: str, value: str, there: bool) -> None:
    assert contains(answer, value) is there


def test_an_answer_is_worth_the_share_of_its_values_and_is_read_up_to_a_length() -> None:
    assert answer_score(["1", "2"], "1 and 3") == 0.5
    assert answer_score(["7"], " " * LONGEST_ANSWER + "7") == 0.0
