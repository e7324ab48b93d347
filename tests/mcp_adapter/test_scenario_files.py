"""Scenario files, the split, and what is set aside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.base.errors import ConfigError, StoreError
from offbook.scenarios import loading
from offbook_mcp.scenarios.scenario import (
    CheckKind,
    McpScenario,
    ReferenceCall,
    ScenarioSet,
    combination,
    combinations,
    load_scenarios,
    save_scenarios,
    select,
    split_scenarios,
)

DAMAGE = (
    b"\0", b"\xff", b"\xed\xa0\x80", "\u2028".encode(), b"\r", b"\n", b"1e999", b"9" * 5_000, b"[" * 100_000, b"NaN",
    b'{"id": "s1"}\n', b'"id": "s2", ', b"\xef\xbb\xbf",
)  # fmt: skip


def scenario(number: int, *calls: tuple[str, dict[str, object]], **fields: object) -> McpScenario:
    defaults: dict[str, object] = {
        "task": f"task {number}",
        "difficulty": 1,
        "check": CheckKind.CALLS,
        "server": "ab12",
    }
    return McpScenario(
        id=f"s{number}",
        tools=tuple(dict.fromkeys(tool for tool, _ in calls)),
        calls=tuple(ReferenceCall(tool=tool, arguments=arguments) for tool, arguments in calls),
        **defaults | fields,  # type: ignore[arg-type]
    )


def test_a_set_is_saved_and_loaded_the_same_and_its_digest_is_that_of_the_file(tmp_path: Path) -> None:
    rude = "line\n\u2028\x1b[2J\u202e break"
    made = ScenarioSet((scenario(1, ("a", {"x": rude}), task=rude), scenario(2, ("b", {}), split="eval")), "ab12")
    path = tmp_path / "new" / "scenarios.jsonl"
    save_scenarios(made, path)
    assert load_scenarios(path) == made
    text = path.read_bytes()
    assert text.isascii() and b"\x1b" not in text and len(text.splitlines()) == 2
    assert ([each.id for each in made.train], [each.id for each in made.eval]) == (["s1"], ["s2"])
    assert made.digest == load_scenarios(path).digest and len(made.digest) == 64


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scenarios.jsonl"
    save_scenarios(ScenarioSet((scenario(1, ("a", {})),), "ab12"), path)
    before = path.read_text()

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"scenarios.jsonl' cannot be written: disk full"):
        save_scenarios(ScenarioSet((scenario(2, ("b", {})),), "ab12"), path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["scenarios.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "scenarios.jsonl, line 3: Invalid JSON"),
        ("[" * 100_000, "scenarios.jsonl, line 3: Invalid JSON"),
        ('{"id": "b"}', "scenarios.jsonl, line 3, field task: Field required"),
        (
            json.dumps(json.loads(scenario(2, ("a", {})).model_dump_json()) | {"difficulty": 9}),
            "line 3, field difficulty: .*got 9",
        ),
        (
            json.dumps(json.loads(scenario(2).model_dump_json()) | {"calls": [{"name": "a"}]}),
            "line 3, field calls.0.tool",
        ),
        (scenario(1, ("a", {})).model_dump_json(), "2 lines have the id 's1'"),
        (
            scenario(2, ("a", {}), server="cd34").model_dump_json(),
            "field server: lines belong to different servers, ab12 and cd34",
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "scenarios.jsonl"
    path.write_text(scenario(1, ("a", {})).model_dump_json() + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_scenarios(path)


def test_an_empty_or_missing_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no scenario; make some with `offbook mcp scenarios TARGET"):
        load_scenarios(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match=r"there is no file .*; make it with `offbook mcp scenarios TARGET -o "):
        load_scenarios(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenarios(tmp_path)


def test_a_changed_server_is_told() -> None:
    made = ScenarioSet((scenario(1, ("a", {})),), "ab12")
    assert made.server_change("ab12") is None
    assert ScenarioSet((), "").server_change("ab12") is None
    assert "its fingerprint was ab12 and is now cd34" in str(made.server_change("cd34"))


def test_equal_calls_are_one_combination() -> None:
    one = ReferenceCall(tool="a", arguments={"x": "Tea  time", "n": 3.0, "z": {"b": [1], "a": True}})
    assert combination(one) == combination(
        ReferenceCall(tool="a", arguments={"z": {"a": True, "b": [1.0]}, "n": 3, "x": "tea time"})
    )
    assert combination(one) != combination(ReferenceCall(tool="b", arguments=one.arguments))


calls = st.lists(
    st.tuples(st.sampled_from("abcd"), st.dictionaries(st.sampled_from("xy"), st.integers(0, 6), max_size=2)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, max_size=40), st.integers(0, 5), st.sampled_from([0.0, 0.25, 0.5]))
def test_no_combination_of_a_tool_and_its_arguments_is_in_both_splits(
    drawn: list[list[tuple[str, dict[str, object]]]], seed: int, held_out: float
) -> None:
    made = [scenario(number, *each) for number, each in enumerate(drawn)]
    split = split_scenarios(made, held_out=held_out, seed=seed)
    kept = {each.id for each in split}
    assert [each.id for each in split] == [each.id for each in made if each.id in kept] and 2 * len(kept) >= len(made)
    train = set().union(*(combinations(each) for each in split if each.split == "train"))
    evaluation = set().union(*(combinations(each) for each in split if each.split == "eval"))
    assert not train & evaluation
    trained = {tool for each in split if each.split == "train" for tool in each.tools}
    assert trained == {tool for each in made for tool in each.tools}  # nothing is held out that is not trained
    assert split == split_scenarios(made, held_out=held_out, seed=seed)


def test_every_tool_with_enough_scenarios_is_held_out_and_the_share_is_kept() -> None:
    made = [scenario(number, ("ab"[number % 2], {"x": number})) for number in range(40)]
    made += [scenario(50, ("rare", {"x": 1})), scenario(51, ("rare", {"x": 2})), scenario(52, ("bare", {}))]
    split = split_scenarios(made, held_out=0.25)
    held_out = [each for each in split if each.split == "eval"]
    assert {tool for each in held_out for tool in each.tools} == {"a", "b", "rare"}
    assert len(held_out) == 11


def test_what_has_calls_of_both_parts_is_left_out_but_never_a_tools_only_scenario() -> None:
    one: dict[str, object] = {"x": 1}
    made = [scenario(number, ("a", {"x": number})) for number in range(4)]
    made += [scenario(5, ("a", one), ("b", one)), scenario(6, ("b", one)), scenario(7, ("b", {"x": 2}))]
    split = split_scenarios([*made, scenario(8, ("a", one), ("only", one))], held_out=0.5)
    assert "s8" in {each.id for each in split if each.split == "train"}
    assert {tool for each in split if each.split == "eval" for tool in each.tools} == {"a", "b"}


@given(st.integers(0, 1_000))
def test_every_tool_is_selected_before_one_is_selected_twice(seed: int) -> None:
    made = [scenario(number, ("often", {"x": number}), difficulty=1 + number % 3) for number in range(9)]
    made += [scenario(10 + number, (f"rare{number}", {"x": 1}), difficulty=5) for number in range(4)]
    assert len({each.tools for each in select(made, 5, random.Random(seed))}) == 5


def test_two_writers_leave_one_of_their_files_whole(tmp_path: Path) -> None:
    path = tmp_path / "scenarios.jsonl"
    sets = [ScenarioSet(tuple(scenario(number, ("a", {})) for number in range(size)), "ab12") for size in (3, 40)]
    with ThreadPoolExecutor() as writers:
        for written in [writers.submit(save_scenarios, sets[number % 2], path) for number in range(20)]:
            written.result()
    assert load_scenarios(path) in sets and os.listdir(tmp_path) == ["scenarios.jsonl"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 600), st.sampled_from(DAMAGE)), min_size=1, max_size=3), st.integers(0, 900))
def test_a_damaged_file_is_loaded_or_its_fault_is_named(changes: list[tuple[int, bytes]], end: int) -> None:
    """Cut in the middle of a line, foreign bytes, lines twice: for files of tools' scenarios and for any others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenarios.jsonl"
        save_scenarios(ScenarioSet(tuple(scenario(number, ("a", {"x": 1})) for number in range(3)), "ab12"), path)
        content = path.read_bytes()
        for place, found in changes:
            content = content[:place] + found + content[place:]
        path.write_bytes(content[:end])
        for load in (load_scenarios, loading.load_scenarios):
            with contextlib.suppress(ConfigError):
                load(path)
