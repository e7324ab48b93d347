"""The games of examples/: a match is the seed's own, puzzles have one solution. In the slow tier a step is
trained of each that has no notebook, on the tests' own server."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import offbook
from tests.examples.trainings import EXAMPLES, MEASURED, train_a_step


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textarena")
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_matches_that_run_at_once_do_not_change_each_other() -> None:
    from textarena_env import Match

    def boards(*seeds: int) -> list[list[object]]:
        matches = [Match("2048-v0", seed, board_size=3) for seed in seeds]
        shown: list[list[object]] = [[] for _ in seeds]
        for move in ("up", "left", "down", "right", "up", "left"):
            for match, boards_of_match in zip(matches, shown, strict=True):
                if not match.over:
                    match.play(f"[{move}]")
                boards_of_match.append([list(row) for row in match.state["board"]])
        return shown

    random.seed(7)
    untouched = random.Random(7).random()
    together = boards(1, 2)
    assert [boards(1)[0], boards(2)[0]] == together
    assert together[0] != together[1]
    assert random.random() == untouched


def test_a_puzzle_has_one_solution_and_no_clue_too_many() -> None:
    from temporal_clue.puzzles import make_puzzle, solutions

    for seed in range(12):  # in a quarter of them, clues that leave one guest and hour would leave two rooms
        puzzle = make_puzzle(seed)
        assert solutions(puzzle.clues) == {(puzzle.guest, puzzle.room, puzzle.hour)}
        assert puzzle.companions(puzzle.room, puzzle.hour) == [puzzle.guest]
        for clue in puzzle.clues:
            assert len(solutions(tuple(each for each in puzzle.clues if each != clue))) > 1


async def test_players_without_a_model_score_as_the_games_allow() -> None:
    from baselines import at_random, client_of, middle, minimax
    from guess_number.agent import play as guess
    from tic_tac_toe.train import play as squares

    assert [await guess(client_of(middle), "", {"match": match}) for match in range(20)] == [1.0] * 20
    against = [{"match": match, "opponent": "perfect"} for match in range(6)]
    assert [await squares(client_of(minimax), "", match) for match in against] == [0.5] * 6
    assert sum([await squares(client_of(at_random), "", match) for match in against]) < 3


@pytest.mark.slow("whole trainings")
def test_a_step_of_each_without_a_notebook_is_trained(tmp_path: Path, local_backend: offbook.LocalBackend) -> None:
    modules = (
        "supervisor_agent.train",
        "customer_service.train",
        "observe_and_improve.train",
        "tic_tac_toe.self_play",
        "any_game.train",
    )
    trained = train_a_step(modules, tmp_path, *MEASURED, backend=local_backend)
    models = ("self-play", "planner", "warehouse", "office", "customer-service", "guide")
    assert trained == {f"{model}-0" for model in models}
