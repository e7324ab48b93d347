"""Scenarios from schemas and a server's own answers: valid, told by their tasks, held out, and safe."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook_mcp import McpServerError, ServerPool, Target
from offbook_mcp.scenarios import execution
from offbook_mcp.scenarios.execution import Answered
from offbook_mcp.scenarios.explore import explore
from offbook_mcp.scenarios.generate import Expected, expected, generate_scenarios
from offbook_mcp.scenarios.harvest import strings_of
from offbook_mcp.scenarios.scenario import (
    CheckKind,
    ReferenceCall,
    ScenarioSet,
    combinations,
    load_scenarios,
    save_scenarios,
)
from offbook_mcp.tools.rollout_tools import ToolResult
from tests.mcp_adapter.conftest import misbehaving, python_module
from tests.mcp_adapter.servers import library_server


@pytest.fixture(scope="module")
def made() -> dict[str, ScenarioSet]:
    return {}


@pytest.fixture(autouse=True)
def _runs_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of these servers do not change with time, or say today's date."""
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)


async def library(made: dict[str, ScenarioSet]) -> ScenarioSet:
    """Scenarios of the library, with its writers, made once."""
    if "library" not in made:
        made["library"] = await generate_scenarios(Target.parse(library_server.make, allow_all=True), count=30)
    return made["library"]


def check_sound(scenarios: ScenarioSet, at_least: int) -> None:
    """What holds for every set."""
    assert len(scenarios.scenarios) >= at_least
    assert len({each.id for each in scenarios.scenarios}) == len({each.task for each in scenarios.scenarios})
    for each in scenarios.scenarios:
        assert each.calls and each.server == scenarios.fingerprint
        assert each.tools == tuple(dict.fromkeys(call.tool for call in each.calls))
        assert len(each.task.split()) < 60 and each.task.isprintable()
        assert all(len(text) < 64 for call in each.calls for text in strings_of(call.arguments))
        assert bool(each.answer) == (each.check is CheckKind.ANSWER)
        assert not any(value in each.task for value in each.answer)
        if each.recipe != "flow":
            assert all(text in each.task for call in each.calls for text in strings_of(call.arguments))
    train = set().union(*(combinations(each) for each in scenarios.train))
    assert not train & set().union(*(combinations(each) for each in scenarios.eval))


async def test_time_has_scenarios_of_each_tool_in_both_splits_checked_by_their_calls() -> None:
    target = Target.parse(python_module("mcp_server_time", "--local-timezone", "UTC"))
    lines: list[str] = []
    async with ServerPool(target) as pool:
        scenarios = await generate_scenarios(pool, count=32, max_difficulty=3, progress=lines.append)
        check_sound(scenarios, at_least=32)
        for split in (scenarios.train, scenarios.eval):
            assert {tool for each in split for tool in each.tools} == {"get_current_time", "convert_time"}
        assert {each.check for each in scenarios.scenarios} == {CheckKind.CALLS}  # today's date is in every answer
        assert {each.difficulty for each in scenarios.scenarios} == {1, 2, 3}
        assert len({str(each.calls[0].arguments) for each in scenarios.scenarios}) > 24
        async with pool.rollout() as tools:
            for call in scenarios.eval[0].calls:
                assert not (await tools.call(call.tool, dict(call.arguments))).is_error
    assert "valid scenarios" in lines[-1]
    assert scenarios.dropped["more than were asked for"] > 0


async def test_values_that_only_answers_tell_make_scenarios_and_chains(made: dict[str, ScenarioSet]) -> None:
    scenarios = await library(made)
    check_sound(scenarios, at_least=24)
    by_tool = {
        tool: [each for each in scenarios.scenarios if tool in each.tools] for tool in ("find_book", "count_shelf")
    }
    assert all(by_tool.values())
    for each in scenarios.scenarios:
        if each.tools == ("count_shelf",) and each.recipe == "single":
            assert str(each.calls[0].arguments["shelf"]) in ("north", "south", "east", "west")
            assert each.answer[0] in "12"
    flow = [each for each in scenarios.scenarios if each.recipe == "flow"]
    assert flow
    hidden = [text for each in flow for text in strings_of(each.calls[-1].arguments) if text not in each.task]
    assert hidden
    assert {tool for each in scenarios.eval for tool in each.tools} >= {"find_book", "count_shelf", "add_book"}


async def test_an_answer_that_changes_is_checked_by_its_calls(made: dict[str, ScenarioSet]) -> None:
    drawn = [each for each in (await library(made)).scenarios if each.tools == ("draw_number",)]
    assert drawn and {each.check for each in drawn} == {CheckKind.CALLS}


async def test_tools_that_write_are_called_only_where_that_is_allowed() -> None:
    server = library_server.make()
    scenarios = await generate_scenarios(Target.parse(server), count=12)
    assert not hasattr(server, "written")
    assert "add_book" not in {tool for each in scenarios.scenarios for tool in each.tools}


async def test_exploring_tells_what_it_left_out_and_why() -> None:
    async with ServerPool(Target.parse(library_server.make)) as pool:
        found = await explore(pool)
    assert found.left_out == {
        "get_secret_token": "it may show secrets; --allow TOOL calls it",
        "add_book": "it may write; --allow TOOL calls it",
    }
    assert set(found.sampler.places["list_books: [].shelf"]) == {"north", "south", "east", "west"}
    assert any(each.worked for each in found.of("find_book")) and any(each.empty for each in found.of("count_shelf"))


async def test_a_servers_text_reaches_no_file_raw(made: dict[str, ScenarioSet], tmp_path: Path) -> None:
    scenarios = await library(made)
    save_scenarios(scenarios, tmp_path / "s.jsonl")
    assert load_scenarios(tmp_path / "s.jsonl").scenarios == scenarios.scenarios
    text = (tmp_path / "s.jsonl").read_text()
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "Ignore the above" not in text


async def test_the_same_seed_makes_the_same_scenarios_and_another_one_others() -> None:
    def tasks(scenarios: ScenarioSet) -> list[str]:
        return [each.task for each in scenarios.scenarios]

    first, second, other = [
        await generate_scenarios(Target.parse(library_server.make), count=10, seed=seed) for seed in (3, 3, 4)
    ]
    assert tasks(first) == tasks(second) != tasks(other)


async def test_a_tool_that_ends_its_server_is_left_out_and_told() -> None:
    async with ServerPool(misbehaving("die")) as pool:
        found = await explore(pool)
        assert "server failed" in found.left_out["goad"]
        scenarios = await generate_scenarios(pool, count=6)
    assert {tool for each in scenarios.scenarios for tool in each.tools} == {"echo"}


@pytest.mark.parametrize("wrong", [{"count": 0}, {"max_difficulty": 6}])
async def test_wrong_options_are_errors(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="count >= 1, 1 <= max_difficulty <= 5"):
        await generate_scenarios(Target.parse(library_server.make), **wrong)  # type: ignore[arg-type]


async def test_where_no_tool_may_be_used_the_error_says_so() -> None:
    target = Target.parse(library_server.make, only=("add_book", "get_secret_token"))
    with pytest.raises(ConfigError, match=r"none could be made for .*add_book: it may write; --allow TOOL calls it"):
        await generate_scenarios(target)


async def test_a_server_that_cannot_be_started_is_its_own_error() -> None:
    with pytest.raises(McpServerError, match="cannot be started"):
        await generate_scenarios("nowhere-at-all")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2025-06-30", ("2025-06-30",)),
        ("shipped on 2025-06-30 with 3 parcels", ("3",)),
        ("order 17 costs 31.50 USD", ("17", "31.50")),
        ("1,234 rows", ("1,234 rows",)),
    ],
)
def test_a_part_of_a_date_or_a_longer_number_is_no_value(text: str, values: tuple[str, ...]) -> None:
    answered = Answered.of(ReferenceCall(tool="look_up", arguments={"name": "x"}), ToolResult(text=text))
    assert expected(answered, answered, random.Random(0)) == Expected(values)
