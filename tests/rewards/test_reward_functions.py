"""Functions to build a reward from, and how their parts are logged."""

from __future__ import annotations

import pytest

import offbook
from offbook.base.errors import ConfigError, RolloutError
from offbook.rewards import (
    exact_match,
    gated,
    json_valid,
    numeric_match,
    weighted,
)


@pytest.mark.parametrize(
    ("answer", "expected", "match"),
    [("Paris", "paris", 1), (" Paris \n", "Paris", 1), ("New  York", "new york", 1), ("Paris.", "Paris", 0),
     ("Stra\u00dfe", "STRASSE", 1), ("caf\u00e9", "cafe\u0301", 1), ("", "", 1)],
)  # fmt: skip
def test_exact_matches(answer: str, expected: str, match: float) -> None:
    assert exact_match(answer, expected) == match


def test_case_can_count() -> None:
    assert exact_match("Paris", "paris", ignore_case=False) == 0 == 1 - exact_match("Paris", "Paris", ignore_case=False)


@pytest.mark.parametrize(
    ("answer", "expected", "match"),
    [("It is 12.", 12, 1), ("first 3, then 1,250.50", 1250.5, 1), ("-3e2", -300, 1), (".5", 0.5, 1), (7, 7, 1),
     ("none", 0, 0), ("1000001", 1000000, 1), ("1000002", 1000000, 0), ("0.0000001", 0, 1), ("", 1, 0)],
)  # fmt: skip
def test_numeric_matches_take_the_last_number(answer: str | float, expected: float, match: float) -> None:
    assert numeric_match(answer, expected) == match


def test_numeric_matches_within_a_tolerance() -> None:
    assert numeric_match("about 98", 100, tolerance=0.05) == 1 and numeric_match("about 90", 100, tolerance=0.05) == 0
    with pytest.raises(ConfigError, match="expected=nan"):
        numeric_match("1", float("nan"))


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(("answer", "valid"), [('{"n": 1}', 1), ('{"n": "1"}', 0), ("{}", 0), ("n: 1", 0), ("", 0)])
def test_validity_by_a_schema(answer: str, valid: float) -> None:
    assert json_valid(answer, SCHEMA) == valid


def test_validity_without_a_schema_and_with_one_that_is_none() -> None:
    assert json_valid("[1]") == 1 and json_valid("[1") == 0
    with pytest.raises(ConfigError, match="json_valid: schema: 'whole' is not valid"):
        json_valid("1", {"type": "whole"})


def test_weighted_parts_are_logged_by_their_names() -> None:
    result = weighted({"right": True, "close": 0.5, "brief": -0.25}, {"close": 0.5, "brief": 2})
    assert result == offbook.RewardResult(0.75, {"part/right": 1.0, "part/close": 0.5, "part/brief": -0.25})
    with pytest.raises(ConfigError, match=r"there is no part 'brevity'; the parts are right"):
        weighted({"right": 1}, {"brevity": 1})
    with pytest.raises(RolloutError, match="weighted: right gave nan"):
        weighted({"right": float("nan")})


def test_gates_let_a_reward_pass_or_close_it() -> None:
    inside = weighted({"right": 1.0})
    assert gated({"valid": True, "safe": 0.5}, inside) == offbook.RewardResult(
        1.0, {"part/right": 1, "part/valid": 1, "part/safe": 0.5}
    )
    assert gated({"valid": True, "safe": 0}, inside, closed=-1).reward == -1


async def test_a_trainer_logs_the_parts_of_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(scenario: object, trajectory: offbook.Trajectory) -> offbook.RewardResult:
        return gated({"valid": True}, weighted({"right": 1.0, "short": -0.5}))

    async def rollout(model: offbook.TrainableModel, scenario: object) -> offbook.Trajectory:
        return offbook.Trajectory()

    trainer = offbook.Trainer(offbook.TrainableModel("agent", base_model="tiny"), rollout, ["one"], reward=reward)
    scored = await trainer._scored(rollout, "one")
    assert scored.reward == 0.5 and scored.metrics == {"part/valid": 1, "part/right": 1, "part/short": -0.5}
