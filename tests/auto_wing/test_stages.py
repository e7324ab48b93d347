"""An AutoTrainer up to its training: what each stage makes, what edits change, and what its LLM may do wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offbook_auto
from offbook.base.errors import ConfigError, LlmError
from offbook.commands.main import run as command_line
from offbook.llms import Llm
from offbook.rewards import json_valid
from offbook.testing import LlmReply, LlmRequest, fails, refuses, says, scripted_llm
from offbook_auto.inputs import LEAKED, NEARLY_EQUAL, brief, jaccard, read_inputs, shingles
from offbook_auto.task import Task, read_task
from tests.fakes.scripted_writer import DESCRIPTION, MANNERS, TOOLS, WORDINGS, writer
from tests.paths import ROOT

PRICES = {"prompt": 1.0, "completion": 1_000.0}
Script = Callable[[LlmRequest], LlmReply]


def trainer(url: str, **options: Any) -> offbook_auto.AutoTrainer:
    chosen: dict[str, Any] = {"tools": TOOLS, "train_inputs": 30, "held_out": 10, "output": Path("out"), **options}
    return offbook_auto.AutoTrainer(DESCRIPTION, llm=Llm("openai/writer", api_base=url, prices=PRICES), **chosen)


def test_a_description_becomes_a_task_inputs_a_prompt_and_a_rubric(folder: Path) -> None:
    with scripted_llm(writer()) as endpoint:
        report = trainer(endpoint.url).run(until="rubric")
        assert report.reached == "rubric" and report.comparison is None
    task = read_task(folder / "out" / "task.yaml")
    assert task.description == DESCRIPTION and set(task.dimensions) == {"asked", "manner"}
    assert (folder / "out" / "prompt.md").read_text() == "Answer with one call.\n"
    assert (folder / "out" / "rubric.md").read_text().startswith("- The call names the tool")
    assert "nothing was measured yet" in (folder / "out" / "report.md").read_text()
    inputs = read_inputs(folder / "out" / "scenarios.jsonl")
    assert [one.split for one in inputs].count("train") == 30 and len(inputs) == 40


def test_inputs_vary_along_the_dimensions_and_the_splits_share_nothing(folder: Path) -> None:
    with scripted_llm(writer()) as endpoint:
        trainer(endpoint.url).run(until="scenarios")
    rows = [json.loads(line) for line in (folder / "out" / "scenarios.jsonl").read_text().splitlines()]
    cells = {
        split: {tuple(r["dimensions"].values()) for r in rows if r["split"] == split} for split in ("train", "held-out")
    }
    assert not cells["train"] & cells["held-out"]
    for split in cells:
        for name, values in {"asked": WORDINGS, "manner": MANNERS}.items():
            counts = [sum(r["dimensions"][name] == value for r in rows if r["split"] == split) for value in values]
            assert min(counts) >= (1 if split == "train" or name == "asked" else 0), (split, name, counts)
    difficulties = [row["difficulty"] for row in rows]
    assert {difficulties.count(level) for level in range(1, 6)} <= {6, 7, 8, 9, 10}
    known = [(row["split"], shingles(row["input"])) for row in rows]
    for number, (split, own) in enumerate(known):
        for other_split, other in known[:number]:
            assert jaccard(own, other) < (NEARLY_EQUAL if split == other_split else LEAKED)


def test_a_second_run_asks_nothing_and_takes_edited_files_as_they_are(folder: Path) -> None:
    with scripted_llm(writer()) as endpoint:
        trainer(endpoint.url).run(until="rubric")
        asked = len(endpoint.requests)
        out = folder / "out"
        (out / "prompt.md").write_text("Be quick.\n")
        (out / "rubric.md").write_text("- Short is good.\n")
        (out / "scenarios.jsonl").write_text('{"input": "mine"}\n{"input": "held", "split": "held-out"}\n')
        (out / "task.yaml").write_text("description: " + DESCRIPTION + "\n")
        report = trainer(endpoint.url).run(until="rubric")
        assert report.texts == {"prompt": "Be quick.", "rubric": "- Short is good."}
        assert [(one.input, one.split) for one in read_inputs(folder / "out" / "scenarios.jsonl")] == [
            ("mine", "train"),
            ("held", "held-out"),
        ]
        assert len(endpoint.requests) == asked
    assert report.spending["generator"].requests + report.spending["rubric"].requests == asked


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("task.yaml", "description: [", "out/task.yaml cannot be read"),
        ("task.yaml", "- a list", "fields such as `description: ...`"),
        ("task.yaml", "description: x\ndimensions: {length: [short]}", "at least two different values"),
        ("task.yaml", "description: x\nanswer_schema: {type: 7}", "no JSON schema"),
        ("task.yaml", "description: x\ntools: [{name: look}]", r"tools\[0\]"),
        ("task.yaml", "description: x", "describes another task"),
        ("scenarios.jsonl", '{"input": "a", "split": "test"}', "train or held-out is needed, got 'test'"),
        ("scenarios.jsonl", '{"input": "a", "split": "held-out"}', "no scenario has .split: train"),
        ("scenarios.jsonl", "{", "scenarios.jsonl:1"),
        ("rubric.md", "", "is empty"),
        ("prompt.md", "caf\xe9", "prompt.md cannot be read"),
        ("rubric.md", "caf\xe9", "rubric.md cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(folder: Path, name: str, content: str, told: str) -> None:
    (folder / "out").mkdir()
    (folder / "out" / name).write_bytes(content.encode("latin-1"))
    with scripted_llm(writer()) as endpoint, pytest.raises(ConfigError, match=told):
        trainer(endpoint.url).run(until="rubric")


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 40))
SCHEMA = "description: x\nanswer_schema: "
HOSTILE = {
    "aliases for 2^40 values": BOMB,
    "such aliases in a field": f"{BOMB}description: x\nexamples: *a39\n",
    "lists in lists": "[" * 20_000,
    "objects in objects": "{a: " * 5_000,
    "an alias in itself": "description: &a [*a]",
    "a schema in itself": f"{SCHEMA}&a {{a: *a}}",
    "many digits": f"description: {'9' * 5_000}",
    "many hexadecimal digits": f"{SCHEMA}{{a: 0x{'f' * 6_000}}}",
    "no date": "description: 2001-13-45",
    "no time": "description: !!timestamp x",
    "no truth value": "description: !!bool x",
    "half a character": 'description: "\\uD800"',
    "an object of Python": "description: !!python/object/apply:os.system [id]",
    "a set": "description: x\ndimensions: !!set {a, b}",
    "names that are no text": "description: x\n1: 2\n? \n: x",
    "no number of JSON": f"{SCHEMA}{{maximum: .nan}}",
    "a schema elsewhere": f"{SCHEMA}{{$ref: 'http://127.0.0.1:9/x'}}",
    "a schema that is a file": f"{SCHEMA}{{properties: {{a: {{$ref: 'file:///etc/passwd'}}}}}}",
    "a definition that is missing": f"{SCHEMA}{{$ref: '#/$defs/a'}}",
    "no pattern": f"{SCHEMA}{{patternProperties: {{'(?<a': {{}}}}}}",
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_task_is_refused(tmp_path: Path, attack: str) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(HOSTILE[attack])
    with pytest.raises(ConfigError, match=r"task\.yaml"):
        read_task(file)


@pytest.mark.parametrize("name", ["task.yaml", "prompt.md", "rubric.md"])
def test_a_pipe_in_place_of_a_file_keeps_nothing_waiting(folder: Path, name: str) -> None:
    (folder / "out").mkdir()
    os.mkfifo(folder / "out" / name)
    with scripted_llm(writer()) as endpoint, pytest.raises(ConfigError, match="no regular file"):
        trainer(endpoint.url).run(until="rubric")


@pytest.mark.parametrize("answer", ["[" * 100_000, "9" * 5_000, '{"a": "\\ud800"}', "1e999", "", "{}"])
def test_no_answer_of_a_model_breaks_the_check_of_its_schema(answer: str) -> None:
    for schema in ({"type": "string"}, {"$ref": "#"}, {"$defs": {"a": {"$ref": "#"}}, "items": {"$ref": "#/$defs/a"}}):
        fault = Task(description="x", answer_schema=schema).faults(answer)
        assert json_valid(answer, schema) == float(not fault)


def nonsense(request: LlmRequest) -> LlmReply:
    return says("I would rather talk about the weather.")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (nonsense, "task.yaml could not be written.*does not fit.*name another LLM; or write task.yaml yourself"),
        (lambda request: refuses("no"), "task.yaml could not be written.*word the description differently"),
        (lambda request: fails(503), "task.yaml could not be written.*check that it can be reached"),
        (lambda request: fails(401), "task.yaml could not be written.*check its key"),
    ],
)
def test_an_llm_that_does_not_write_is_named_with_what_to_do(reply: Script, told: str) -> None:
    with scripted_llm(reply) as endpoint, pytest.raises(LlmError, match=told):
        llm = Llm("openai/writer", api_base=endpoint.url, retries=1)
        offbook_auto.AutoTrainer(DESCRIPTION, llm=llm, output=Path("out")).run(until="rubric")


def test_too_few_inputs_are_said_with_reasons_and_kept(folder: Path) -> None:
    def repeats(request: LlmRequest) -> LlmReply:
        if "one for each line below" not in str(request.messages[-1]["content"]):
            return writer()(request)
        same = [{"number": number, "input": f"where is my order {number % 3}?"} for number in range(1, 20)]
        return says(json.dumps({"inputs": same}))

    with scripted_llm(repeats) as endpoint, pytest.raises(LlmError) as raised:
        trainer(endpoint.url).run(until="rubric")
    told = str(raised.value)
    assert "scenarios.jsonl could not be written: openai/writer gave " in told and "nearly the same as another" in told
    assert "rename it to scenarios.jsonl to continue" in told
    assert not (folder / "out" / "scenarios.jsonl").exists()
    assert (folder / "out" / "scenarios.partial.jsonl").read_text().count("\n") >= 1


def test_a_spent_budget_ends_well_and_more_money_goes_on_without_paying_twice(folder: Path) -> None:
    with scripted_llm(writer()) as endpoint:
        report = trainer(endpoint.url, max_cost=0.012).run(until="rubric")  # 5 tokens of an answer: 0.005 USD
        assert (report.stopped, report.reached) == ("budget", "task")
        asked = len(endpoint.requests)
        with pytest.raises(ConfigError, match="max_cost"):
            trainer(endpoint.url, max_cost=0)
        assert trainer(endpoint.url, max_cost=0.012).run(until="rubric").stopped == "budget"
        assert len(endpoint.requests) == asked  # the folder's budget, not the run's
        done = trainer(endpoint.url, max_cost=1.0).run(until="rubric")
        bodies = [json.dumps(request.body, sort_keys=True) for request in endpoint.requests]
        assert len(set(bodies)) == len(bodies)
        paid = sum(totals.requests for totals in done.spending.values())
        assert (done.stopped, done.reached, paid) == ("", "rubric", len(bodies))


def test_a_dry_run_asks_nothing_and_says_what_it_would_take(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["auto", "sort notes", "--llm", "openai/gpt-4.1", "--max-cost", "0.5", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert (
        "train: 120 questions" in told and "Nothing was asked" in told and "max_cost=0.5 USD will end the run" in told
    )
    assert list(folder.iterdir()) == []
    with scripted_llm(writer()) as endpoint:
        trainer(endpoint.url).run(until="scenarios")
        lines = trainer(endpoint.url).plan()
    left = ["prompt.md: 1 question,", "rubric.md: 1 question,", "train: 120 questions,", "compare: 10 questions,"]
    assert [line.partition(" about")[0] for line in lines] == [*left, "in all"]


def test_the_command_needs_an_llm_and_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["auto", "sort notes"]) == 2
    assert command_line(["auto", "--llm", "openai/gpt-4.1"]) == 2
    assert command_line(["auto", "sort notes", "--llm", "step:0"]) == 2
    told = capsys.readouterr().err
    assert (
        "llm: name the LLM" in told and "description: say what" in told and "'step:0' is not an LLM elsewhere" in told
    )


def test_examples_a_schema_and_tools_are_read_from_files(folder: Path) -> None:
    (folder / "examples.jsonl").write_text('{"input": "a note", "output": {"title": "A"}}\n')
    (folder / "schema.json").write_text('{"type": "object", "required": ["title"]}')
    (folder / "tools.json").write_text(json.dumps(TOOLS))
    with scripted_llm(writer()) as endpoint:
        words = [
            "auto",
            DESCRIPTION,
            "--llm",
            f"openai/writer?api_base={endpoint.url}",
            "--output",
            "out",
            "--until",
            "prompt",
        ]
        words += [
            "--examples",
            "examples.jsonl",
            "--schema",
            "schema.json",
            "--tools",
            "tools.json",
            "--train-inputs",
            "10",
        ]
        assert command_line([*words, "--held-out", "5"]) == 0
        asked = str(endpoint.requests[0].messages[-1]["content"])
    assert "a note" in asked and "order_status" in asked
    task = read_task(folder / "out" / "task.yaml")
    assert task.examples[0].output == '{"title": "A"}' and len(task.tools) == 4
    assert '"required": ["title"]' in (folder / "out" / "prompt.md").read_text()
    assert task.faults("{}") == "$: 'title' is a required property" and not task.faults('{"title": 1}')
    assert task.faults("no").startswith("no JSON")


def test_each_value_is_held_out_about_equally_often() -> None:
    task = Task(description="x", dimensions={"asked": list("abcd"), "manner": list("klmnopqrst")})
    lines = brief(task, {"train": 120, "held-out": 40}, seed=0)
    cells = {split: {tuple(line.values.values()) for line in own} for split, own in lines.items()}
    assert not cells["train"] & cells["held-out"] and len(cells["train"]) == 30
    for place, values in enumerate(task.dimensions.values()):
        counts = [sum(cell[place] == value for cell in cells["held-out"]) for value in values]
        assert max(counts) - min(counts) <= 1, counts


def test_the_writer_writes_all_that_a_training_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from auto_rl.writer import DESCRIPTION, TOOLS, reply

    with scripted_llm(reply) as endpoint:
        llm = Llm("openai/writer", api_base=endpoint.url, api_key="unused", cache=tmp_path / "llms.sqlite")
        trainer = offbook_auto.AutoTrainer(
            DESCRIPTION, llm=llm, tools=TOOLS, train_inputs=60, held_out=24, output=tmp_path / "out"
        )
        trainer.run(until="rubric")
        assert len(read_inputs(tmp_path / "out" / "scenarios.jsonl")) == 84
