"""Patterns of strangers that `re` would search for ages: each way into jsonschema ends in time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError

from offbook.base.errors import ConfigError
from offbook.base.schema_patterns import SlowPatternError, with_timed_patterns
from offbook.base.types import Json
from offbook.rewards import json_valid
from offbook.rewards.reward_parts import answer_fault, schema_validator
from offbook.server.models.registration import check_target_modules

SLOW = "^(a|aa)+$"
TEXT = "a" * 60 + "!"
"""2 to the power of 40 ways to fail."""
KEYWORDS: list[tuple[Json, Json]] = [
    ({"pattern": SLOW}, TEXT),
    ({"patternProperties": {SLOW: False}}, {TEXT: 1}),
    ({"propertyNames": {"pattern": SLOW}}, {TEXT: 1}),
    ({"patternProperties": {SLOW: True}, "additionalProperties": False}, {TEXT: 1}),
    ({"allOf": [{"patternProperties": {SLOW: True}}], "unevaluatedProperties": False}, {TEXT: 1}),
    ({"items": {"anyOf": [{"not": {"pattern": SLOW}}]}}, [TEXT]),
    ({"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": SLOW}}}, {"a": TEXT}),
]


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize(("schema", "value"), KEYWORDS)
@pytest.mark.parametrize("kind", [Draft7Validator, Draft201909Validator, Draft202012Validator])
def test_a_slow_pattern_ends_in_time_wherever_it_stands(kind: Any, schema: Json, value: Json) -> None:
    if "unevaluatedProperties" in schema and kind is Draft7Validator:
        schema = schema["allOf"][0]  # the draft does not have the keyword
    began = time.process_time()
    with pytest.raises(SlowPatternError, match="takes longer than 1 s"):
        list(with_timed_patterns(kind)(schema).iter_errors(value))
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^a+$"}, "aa", "ab"),
        ({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": False}, {"ab": "x"}, {"b": "x"}),
        ({"patternProperties": {"^a": True}, "unevaluatedProperties": False}, {"ab": "x"}, {"b": "x"}),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"pattern": "^[0-9]{2}$"}}}, "12", "123"),
    ],
)
def test_other_patterns_are_checked_as_jsonschema_does(schema: Json, good: Json, bad: Json) -> None:
    timed, plain = with_timed_patterns(Draft202012Validator)(schema), Draft202012Validator(schema)
    assert timed.is_valid(good)
    with pytest.raises(ValidationError):
        timed.validate(bad)
    assert [error.message for error in timed.iter_errors(bad)] == [error.message for error in plain.iter_errors(bad)]


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_an_answers_check_ends_in_time_however_many_patterns_are_slow() -> None:
    schema = {"items": {"allOf": [{"pattern": f"^(a|aa){{{number},}}$"} for number in range(1, 50)]}}
    began = time.process_time()
    fault = answer_fault(f'["{TEXT}"]', schema_validator(schema, "schema"))
    assert fault.startswith("not checked to the end: the pattern '^(a|aa){1,}$' takes longer than 1 s")
    assert json_valid(f'["{TEXT}"]', schema) == 0.0
    assert time.process_time() - began < 10
    with pytest.raises(ConfigError, match=r"schema: '.' is not a 'regex'"):
        schema_validator({"pattern": "("}, "schema")


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_slow_expression_of_target_modules_is_refused_in_time() -> None:
    with pytest.raises(Exception, match="takes longer than 1 s"):
        check_target_modules(SLOW, [TEXT, "q_proj"])
