"""Plays 2048: a call for each move, with the board as text and the moves that change it to choose from."""

from __future__ import annotations

import copy
import math
from typing import Any

from openai import AsyncOpenAI
from textarena_env import Match

MOVES = ("up", "down", "left", "right")


def moves_of(match: Match) -> list[str]:
    """The moves that change the board. The game takes any other as a mistake."""
    return [move for move in MOVES if _changes(match, move)]


def _changes(match: Match, move: str) -> bool:
    trial = copy.deepcopy(match)
    trial.play(f"[{move}]")
    return trial.state["board"] != match.state["board"]


async def play(client: AsyncOpenAI, model: str, scenario: dict[str, Any]) -> float:
    """A whole game; log2 of its score, so that reaching the next tile counts the same early and late."""
    match = Match("2048-v0", scenario["match"], board_size=scenario["size"])
    while not match.over:
        rows = "\n".join(" ".join(str(tile or ".") for tile in row) for row in match.state["board"])
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"{rows}\nWhere do we push the tiles?"}],
            extra_body={"structured_outputs": {"choice": moves_of(match)}},
        )
        match.play(f"[{answer.choices[0].message.content}]")
    return math.log2(max(match.state["score"], 1))
