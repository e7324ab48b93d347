"""What players without a model score in the games, on the held-out matches: `python baselines.py`, in `examples`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from codenames.agent import Player, code
from game_2048.agent import play as play_2048
from guess_number.agent import play as play_number
from tic_tac_toe.agent import SQUARES, perfect
from tic_tac_toe.train import play as play_squares

Pick = Callable[[str, Sequence[str]], str]
"""(prompt, choices) -> one of them."""
FIRST = 10_000_000
NUMBERS = random.Random(0)


def client_of(pick: Pick) -> Any:
    """A player that is asked as a model is."""

    async def create(*, messages: Any, extra_body: Any, **_: Any) -> Any:
        said = pick(messages[0]["content"], extra_body["structured_outputs"]["choice"])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=said))])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


def at_random(prompt: str, choices: Sequence[str]) -> str:
    return NUMBERS.choice(choices)


def first(prompt: str, choices: Sequence[str]) -> str:
    return choices[0]


def middle(prompt: str, choices: Sequence[str]) -> str:
    return choices[(len(choices) - 1) // 2]


def in_order(*order: str) -> Pick:
    """Always the first of these that is offered."""
    return lambda prompt, choices: min(choices, key=order.index)


ORDERS = (("up", "down", "left", "right"), ("up", "left", "down", "right"), ("up", "left", "right", "down"))
"""The three kinds of fixed order of four directions: all others are turned or mirrored ones."""


def centre_and_corners(prompt: str, choices: Sequence[str]) -> str:
    return min(choices, key=("b2", "a1", "c3", "c1", "a3", "b1", "a2", "c2", "b3").index)


def minimax(prompt: str, choices: Sequence[str]) -> str:
    mine, theirs = prompt.removeprefix("mine ").split(". ")[0].split(", theirs ")
    board = tuple("X" if square in mine else "O" if square in theirs else "" for square in SQUARES)
    return SQUARES[perfect(board, "X", NUMBERS)]


async def mean(play: Any, scenarios: Sequence[Any], pick: Pick) -> float:
    return fmean([await play(client_of(pick), "", scenario) for scenario in scenarios])


async def main() -> None:
    matches = range(FIRST, FIRST + 300)
    numbers = [{"match": match} for match in matches]
    boards = [{"match": match, "size": 2} for match in matches]
    for name, pick in (("random", at_random), ("the lowest", first), ("the middle", middle)):
        print(f"guess_number, {name}: {await mean(play_number, numbers, pick):.3f}")
    for opponent in ("random", "perfect"):
        squares = [{"match": match, "opponent": opponent} for match in matches]
        for name, pick in (("random", at_random), ("a fixed order", centre_and_corners), ("perfect", minimax)):
            print(f"tic_tac_toe against {opponent}, {name}: {await mean(play_squares, squares, pick):.3f}")
    for name, pick in (("random legal moves", at_random), *((" ".join(order), in_order(*order)) for order in ORDERS)):
        print(f"game_2048, {name}: {await mean(play_2048, boards, pick):.3f}")
    both = Player(client_of(at_random), "")
    print(f"codenames, code, random: {fmean([await code(both, both, match) for match in matches]):.3f}")


if __name__ == "__main__":
    asyncio.run(main())
