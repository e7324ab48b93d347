"""The parts of a comparison by themselves: candidates, rows, costs, contamination, report."""

from __future__ import annotations

from pathlib import Path

import pytest

import offbook
from offbook.base.errors import ConfigError
from offbook.base.types import Trajectory
from offbook.llms import Llm
from offbook_compare.candidates import as_candidate, as_candidates
from offbook_compare.contamination import contamination_warnings, overlaps
from offbook_compare.journal import ComparedRollout, Journal, MeasuredCall
from offbook_compare.options import CompareOptions
from offbook_compare.results import busy_seconds, percentiles


def test_steps_models_and_texts_are_candidates() -> None:
    texts = ["step:0", "step:newest", "openai/gpt-4.1", "openai/x?name=mine&api_base=http://127.0.0.1:1/v1"]
    found = as_candidates(texts)
    assert [(each.name, each.step, each.trained) for each in found] == [
        ("step:0", 0, True),
        ("step:newest", None, True),
        ("openai/gpt-4.1", None, False),
        ("mine", None, False),
    ]
    assert found[2].record_name == "openai-gpt-4.1"
    assert found[3].llm is not None and found[3].llm.options.api_base == "http://127.0.0.1:1/v1"


def test_prices_parameters_and_keys_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-mine-0123456789")
    text = "openai/x?prompt_price=2&completion_price=8&api_key_variable=MY_KEY&reasoning_effort=low&concurrency=3"
    found = as_candidate(text)
    assert found.llm is not None
    options = found.llm.options
    assert options.prices is not None and (options.prices.prompt, options.prices.completion) == (2, 8)
    assert options.api_key is not None and options.api_key.get_secret_value() == "sk-mine-0123456789"
    assert (options.litellm_parameters, options.concurrency) == ({"reasoning_effort": "low"}, 3)
    assert "sk-mine" not in str(found.settings)
    assert found.fingerprint == as_candidate(text.replace("&concurrency=3", "")).fingerprint
    assert found.fingerprint != as_candidate(text.replace("low", "high")).fingerprint


def test_a_model_is_a_candidate_at_its_endpoint() -> None:
    found = as_candidate(
        offbook.Model("mine", inference_base_url="http://127.0.0.1:1/v1", inference_model_name="served")
    )
    assert found.name == "mine" and found.llm is not None
    assert (found.llm.options.model, found.llm.options.api_base) == ("openai/served", "http://127.0.0.1:1/v1")
    plain = as_candidate(offbook.Model("anthropic/claude-sonnet-4-5"))
    assert plain.llm is not None and plain.llm.options.model == "anthropic/claude-sonnet-4-5"
    assert as_candidate(Llm("openai/o3")).name == "openai/o3"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "at least one"),
        ("openai/x", "a list"),
        (["step:last"], "step:newest"),
        (["openai/x", "openai/x"], "appears twice"),
        (["a/b", "a-b"], "appears twice"),
        (["openai/x?api_key=sk"], "api_key_variable="),
        (["openai/x?api_key_variable=NO_SUCH_VARIABLE_HERE"], "is not set"),
        (["openai/x?prompt_price=1"], "together"),
        (["openai/x?"], "MODEL[?]option=value"),
        (["openai/x?timeout=1&timeout=2"], "each option once"),
        ([7], "got int 7"),
        ([offbook.TrainableModel("own", base_model="tiny")], "step:newest"),
    ],
)
def test_what_is_no_candidate_is_said(given: list[object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        as_candidates(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollouts": 0}, "rollouts"),
        ({"temperature": -1}, "temperature"),
        ({"gpu_price": -1.0}, "gpu_price"),
        ({"success_at": float("nan")}, "success_at"),
        ({"max_cost": 0}, "max_cost"),
        ({"output": Path(__file__)}, "is a file"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CompareOptions(**options)  # type: ignore[arg-type]


def call(start: float, seconds: float) -> MeasuredCall:
    return MeasuredCall(seconds=seconds, started_at=start)


def test_a_machine_is_busy_while_any_call_runs() -> None:
    assert busy_seconds([call(0, 2), call(1, 3), call(10, 1), call(10.5, 0.25)]) == 5.0
    assert busy_seconds([]) == 0.0
    assert percentiles([1.0, 2.0, 3.0]) == (2.0, pytest.approx(2.9))
    assert percentiles([]) is None


def row(key: str, error: str | None = None, task: str = "é") -> ComparedRollout:
    trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": task}], reward=0.5)
    return ComparedRollout(
        key=key,
        candidate="x",
        scenario="a",
        index=0,
        reward=0.5,
        metrics={"success": 1.0},
        error=error,
        calls=(call(0, 1),),
        seconds=1.0,
        trajectory=trajectory,
    )


def test_rows_are_read_again_but_for_failed_ones_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    journal = Journal(file)
    journal.add(row("one"))
    journal.add(row("two", error="ValueError: no"))
    with file.open("a") as lines:
        lines.write('{"key": "thr')
    again = Journal(file)
    assert again.rows["one"] == row("one").model_copy(update={"trajectory": again.rows["one"].trajectory})
    assert "two" not in again.rows
    again.add(row("three"))
    assert "three" in Journal(file).rows


def test_texts_with_unicodes_line_separators_are_read_again_and_lose_no_row(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    journal = Journal(file)
    journal.add(row("one", task="a\u2028b\u2029c\x85d"))
    journal.add(row("two", task="e\u2028f"))
    again = Journal(file)
    assert list(again.rows) == ["one", "two"]


def test_another_file_is_no_journal(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"id": 1}\n{"id": 2}\n')
    with pytest.raises(ConfigError, match="delete the file"):
        Journal(file)


TRAINED = [
    {"id": "t1", "question": "How much does the boiler at Heron cost me this year?"},
    {"id": "t2", "question": "When does the plumber come to Gannet for the kitchen sink?"},
]


def test_scenarios_that_were_trained_on_are_found_by_content_and_words() -> None:
    compared = [
        {"id": "a", "question": "how much does the boiler at Heron cost me this year"},
        {"id": "c", "question": "Who painted the fence of Curlew?"},
        {"id": "d", "question": "When does the plumber come to Gannet for the kitchen sink?"},
    ]
    assert overlaps(compared, TRAINED) == {"a": "t1", "d": "t2"}
    [said] = contamination_warnings(compared, TRAINED, set())
    assert said.startswith("2 of 3 scenarios are training scenarios")


def test_ids_that_the_records_know_are_told() -> None:
    [said] = contamination_warnings([{"id": "a", "question": "x"}], None, {"a", "z"})
    assert "1 of 1 scenarios have ids that the model was trained on" in said
    assert contamination_warnings([{"id": "b", "question": "x"}], None, {"a"}) == []
