"""Plays tic-tac-toe: a call for each move, with the free squares to choose from. Two opponents to play against."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

from openai import AsyncOpenAI
from openai.types.chat.chat_completion import Choice
from textarena_env import Match

SQUARES = ("a1", "b1", "c1", "a2", "b2", "c2", "a3", "b3", "c3")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))

Board = tuple[str, ...]
"""Nine squares, row by row: "X", "O" or ""."""
Opponent = Callable[[Board, str, random.Random], int]
"""(board, its mark, random numbers) -> the square it takes."""


def board_of(match: Match) -> Board:
    return tuple(mark for row in match.state["board"] for mark in row)


def mark_of(player: int) -> str:
    """TextArena's player 0, who begins, has O."""
    return "OX"[player]


def free(board: Board) -> list[int]:
    return [square for square, mark in enumerate(board) if not mark]


async def choose(client: AsyncOpenAI, model: str, match: Match) -> tuple[str, Choice]:
    """The prompt and the model's answer: a free square."""
    board, mine = board_of(match), mark_of(match.player)
    taken = {"mine": [], "theirs": []}
    for square, mark in enumerate(board):
        if mark:
            taken["mine" if mark == mine else "theirs"].append(SQUARES[square])
    prompt = f"mine {' '.join(taken['mine']) or '-'}, theirs {' '.join(taken['theirs']) or '-'}. Which square?"
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        extra_body={"structured_outputs": {"choice": [SQUARES[square] for square in free(board)]}},
    )
    return prompt, answer.choices[0]


def place(match: Match, choice: Choice) -> None:
    match.play(f"[{SQUARES.index(choice.message.content or '')}]")


def at_random(board: Board, mark: str, numbers: random.Random) -> int:
    return numbers.choice(free(board))


def perfect(board: Board, mark: str, numbers: random.Random) -> int:
    """Never loses; among equally good squares, any."""
    values = {square: -_value(_with(board, square, mark), _other(mark)) for square in free(board)}
    best = max(values.values())
    return numbers.choice([square for square, value in values.items() if value == best])


@cache
def _value(board: Board, mark: str) -> int:
    """What `mark`, whose turn it is, can be sure of: 1 a win, 0 a draw, -1 a loss."""
    if any(board[a] and board[a] == board[b] == board[c] for a, b, c in LINES):
        return -1
    if not free(board):
        return 0
    return max(-_value(_with(board, square, mark), _other(mark)) for square in free(board))


def _with(board: Board, square: int, mark: str) -> Board:
    return (*board[:square], mark, *board[square + 1 :])


def _other(mark: str) -> str:
    return "X" if mark == "O" else "O"
