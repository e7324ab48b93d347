"""Scenario files of text: what loads, and how each fault is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook.scenarios.loading import load_scenarios


def faults(file: Path | str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_scenarios(file)
    return [line.removeprefix(f"{file}:") for line in str(caught.value).splitlines()]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_scenarios_load_from_jsonl_and_csv(tmp_path: Path) -> None:
    first, second = load_scenarios(
        written(tmp_path, "a.jsonl", '{"prompt": "a", "answer": 1}\n{"id": "x", "prompt": "b"}\n')
    )
    assert (first.prompt, first.model_extra, second.id) == ("a", {"answer": 1}, "x")
    assert (first["prompt"], first["answer"]) == ("a", 1)  # as a function written for dicts reads it
    with pytest.raises(KeyError, match="the scenario has id, prompt, answer"):
        first["question"]
    rows = load_scenarios(written(tmp_path, "a.csv", "id, prompt,answer\n1,a,yes\n,b,no\n"))
    assert [(row.prompt, row.model_extra) for row in rows] == [("a", {"answer": "yes"}), ("b", {"answer": "no"})]
    assert rows[0].id == "1"


def test_scenarios_load_from_a_json_array(tmp_path: Path) -> None:
    rows = load_scenarios(written(tmp_path, "a.json", '[\n {"prompt": "a", "answer": 1},\n {"id": "x"}\n]'))
    assert (rows[0].prompt, rows[1].id) == ("a", "x")
    assert faults(written(tmp_path, "b.json", '[{"id": "x"}, 3, {"id": "x"}]')) == [
        " row 1: an object is needed, got int",
        " row 2: the same scenario (id 'x') as in row 0",
    ]
    assert faults(written(tmp_path, "c.jsonl", '[{"id": "x"}]'))[0].endswith("one array goes into a file named .json")


def test_a_jsonl_file_with_faults_names_each_with_its_line(tmp_path: Path) -> None:
    lines = [
        '{"id": "a"}',
        "",
        '{"prompt": ',
        "[1]",
        '{"id": "a", "prompt": "other"}',
        '{"prompt": 3}',
        '{"prompt": "b", "n": {"x": 1, "x": 2}}',
        '{"prompt": "b", "score": NaN}',
        '{"prompt": "b", "score": 1e999}',
        '{"id": [1]}',
        '{"prompt": "half \\ud83d"}',
        "[" * 100_000,
    ]
    assert faults(written(tmp_path, "data.jsonl", "\n".join(lines))) == [
        "3: not JSON: Expecting value: line 1 column 12 (char 11)",
        "4: an object is needed, got list",
        "5: the same scenario (id 'a') as in line 1",
        "6: `prompt` must be text, got 3",
        "7: the key 'x' appears twice in an object",
        "8: JSON has no NaN; use null, or leave it out",
        "9: the number 1e999 is too large for a float",
        "10: `id` must be text or a number, got [1]",
        "11: key 'prompt': half a character (a lone surrogate, '\\ud83d')",
        "12: nested too deeply",
    ]


def test_a_line_ends_with_a_newline_and_nothing_else(tmp_path: Path) -> None:
    text = "a\u2028b\x0bc\x85d"  # where str.splitlines would cut
    content = json.dumps({"prompt": text}, ensure_ascii=False) + '\r\n\r\n{"prompt": "b"}'
    assert [scenario.prompt for scenario in load_scenarios(written(tmp_path, "a.jsonl", content))] == [text, "b"]


def test_a_byte_order_mark_is_skipped_and_another_encoding_is_named(tmp_path: Path) -> None:
    line = '{"prompt": "é"}\n'
    [found] = load_scenarios(written(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + line.encode()))
    assert found.prompt == "é"
    assert faults(written(tmp_path, "b.jsonl", b'{"prompt": "a"}\n' + line.encode("latin-1"))) == [
        "2: not UTF-8: byte 0xe9 at 12"
    ]
    assert "is UTF-16; save it as UTF-8" in faults(written(tmp_path, "c.jsonl", line.encode("utf-16")))[0]
    assert faults(written(tmp_path, "d.csv", "prompt\na\né\n".encode("latin-1"))) == ["3: not UTF-8: byte 0xe9"]


def test_a_csv_row_is_named_by_the_line_where_it_begins(tmp_path: Path) -> None:
    content = 'id,prompt\r\nx,"two\nlines"\r\n\r\ny,"three\n\nlines"\nalone\nz,"a\nb",more\nx,"two\nlines"\n'
    assert faults(written(tmp_path, "data.csv", content)) == [
        "8: 1 values, but the header has 2 columns",
        "9: 3 values, but the header has 2 columns",
        "11: the same scenario (id 'x') as in line 2",
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("prompt,answer,prompt\na,b,c\n", "1: the column 'prompt' appears twice"),
        ("\n,prompt\n0,a\n", "2: column 1 has no name"),
        ("prompt;answer\na;b\n", "1: one column, 'prompt;answer': separate columns by commas, not by ';'"),
        ('prompt\na\n"open\nb\nc\n', "3: not CSV: unexpected end of data (a quote that is not closed?)"),
        (
            "prompt\n" + "a" * 200_000,
            "2: not CSV: field larger than field limit (131072): put such long values into JSONL",
        ),
    ],
)
def test_a_csv_file_that_does_not_hold_together_is_refused(tmp_path: Path, content: str, fault: str) -> None:
    assert faults(written(tmp_path, "data.csv", content)) == [fault]


def test_of_many_faults_the_first_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    found = faults(written(tmp_path, "data.jsonl", "3\n" * 50))
    assert (found[19], found[20:]) == ("20: an object is needed, got int", ["and 30 more"])


def test_what_is_no_scenario_file_is_named(tmp_path: Path) -> None:
    for name, message in [
        ("a.txt", r"\.jsonl, \.json, \.csv"),
        ("none.csv", "cannot be read: No such file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_scenarios(tmp_path / name)
    with pytest.raises(ConfigError, match="holds no scenario"):
        load_scenarios(written(tmp_path, "empty.jsonl", "\n"))
