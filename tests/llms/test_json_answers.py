"""What is read out of a text, and what is rather asked for again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from offbook.llms.json_answers import read

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Holder(BaseModel):
    held: object


class Scores(BaseModel):
    scores: dict[str, float]


@given(values)
def test_valid_json_is_read_as_it_is_also_in_a_fence_and_in_prose(value: object) -> None:
    text = json.dumps({"held": value})
    assert read(text, Holder) == (Holder(held=value), 0)
    assert read(f"```json\n{text}\n```", Holder) == (Holder(held=value), 1)
    assert read(f"My answer is {text}. That is all.", Holder) == (Holder(held=value), 1)


@given(values, st.integers(min_value=1))
def test_an_answer_that_was_cut_is_never_completed(value: object, missing: int) -> None:
    text = json.dumps({"held": [value, {"the": "end"}]})
    cut = text[: max(0, len(text) - 1 - missing % (len(text) - 1))]
    with pytest.raises(ValueError):
        read(cut, Holder)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no JSON object"),
        ("[2] > [1] > [3]", "no JSON object"),
        ('{"scores": {"a": 1, "b": 2}', "no valid JSON"),
        ('{"scores": {"a": Infinity}}', "not finite"),
        ('{"scores": {"a": 1e999}}', "not finite"),
        ('{"scores": {"a": 1}} {"scores": {"a": 0}}', "not one object"),
        ('{"scores": {"a": 1}} and {broken}', "not one object"),
        ('{"scores": {"a": "high"}}', r"answer\.scores\.a: .*got 'high'"),
        ('Well: {"points": 1}', "answer.scores: Field required"),
    ],
)
def test_what_is_ambiguous_or_does_not_fit_is_refused_with_the_reason(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read(text, Scores)
