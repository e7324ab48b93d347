"""Which difficulties are open after what was achieved; the means were computed by hand."""

from __future__ import annotations

import pytest

from offbook_mcp.training.scenario_trainer import LONGEST, Curriculum, CurriculumState
from tests.mcp_training.conftest import told

SCENARIOS = [told("a", ("t", {}), difficulty=each) for each in (1, 1, 2, 2, 4)]


def test_the_easiest_difficulties_that_fill_an_iteration_are_open_first() -> None:
    assert Curriculum.start(SCENARIOS, 2).state.level == 1
    assert Curriculum.start(SCENARIOS, 3).state.level == 2
    assert Curriculum.start(SCENARIOS, 9).state.level == 4
    assert [each.difficulty for each in Curriculum.start(SCENARIOS, 2).open(SCENARIOS)] == [1, 1]


def test_a_harder_difficulty_opens_when_success_has_risen() -> None:
    curriculum = Curriculum.start(SCENARIOS, 2).after({1: [0.0, 1.0]}, 0)
    assert (curriculum.state.level, curriculum.state.success) == (1, {1: 0.5})
    curriculum = curriculum.after({1: [1.0, 1.0]}, 1)  # 0.5 * 0.5 + 0.5 * 1
    assert curriculum.state == CurriculumState(level=2, opened_at=2, success={1: 0.75})
    curriculum = curriculum.after({1: [1.0], 2: [0.5]}, 2)
    assert (curriculum.state.level, curriculum.state.success) == (2, {1: 0.875, 2: 0.5})
    curriculum = curriculum.after({2: [1.0]}, 3)
    assert (curriculum.state.level, curriculum.state.opened_at) == (4, 4)
    assert len(curriculum.open(SCENARIOS)) == 5
    assert curriculum.after({4: [1.0]}, 4).state.level == 4


def test_success_at_easier_difficulties_alone_opens_none() -> None:
    state = CurriculumState(level=2, opened_at=3)
    curriculum = Curriculum.start(SCENARIOS, 2, state).after({1: [1.0]}, 3)
    assert curriculum.state.level == 2


def test_a_difficulty_that_does_not_improve_is_left_after_a_while() -> None:
    curriculum = Curriculum.start(SCENARIOS, 2)
    for number in range(LONGEST):
        assert curriculum.state.level == 1
        curriculum = curriculum.after({1: [0.0]}, number)
    assert curriculum.state == CurriculumState(level=2, opened_at=LONGEST, success={1: 0.0})


@pytest.mark.parametrize("level", [0, 1, 3, 9])
def test_a_kept_level_is_taken_up_whatever_scenarios_there_are_now(level: int) -> None:
    curriculum = Curriculum.start(SCENARIOS, 2, CurriculumState(level=level))
    opened = curriculum.open(SCENARIOS)
    assert opened and all(each.difficulty <= level for each in opened) is (level > 0)
