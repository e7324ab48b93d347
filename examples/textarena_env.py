"""A game of TextArena (https://github.com/LeonGuertler/TextArena) as what an agent needs: whose turn it is, what the
game shows, and how it ended.

    match = Match("TicTacToe-v0", seed=3, players=2)
    while not match.over:
        match.play("[4]" if match.player == 0 else opponent(match.state))
    match.rewards[0]
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import textarena


class Match:
    """One match. `options` are those of the game's environment, such as `board_size=2`.

    TextArena draws from the process's own random numbers. Each match has numbers of its own instead, so that
    matches that run at once do not change each other and a seed is the same match again."""

    def __init__(self, game: str, seed: int, players: int = 1, **options: Any) -> None:
        self._random = random.Random(seed).getstate()
        self.over = False
        with self._own_numbers():
            self._env = textarena.make(f"{game}-raw", **options)  # -raw: no wrapper that repeats the whole history
            self._env.reset(num_players=players, seed=seed)

    @property
    def player(self) -> int:
        """Whose turn it is, from 0."""
        return self._env.state.current_player_id

    @property
    def state(self) -> dict[str, Any]:
        """The board, the guesses and the like; see the game's environment."""
        return self._env.state.game_state

    @property
    def rewards(self) -> dict[int, float]:
        """By player, once it is over."""
        return self._env.state.rewards

    def messages(self) -> list[str]:
        """What the game and the others have said to `player` since its last turn, the rules first."""
        return [text for _, text, _ in self._env.get_observation()[1]]

    def play(self, action: str) -> None:
        """The move of `player`. An invalid one is the game's to judge: most allow one more try."""
        with self._own_numbers():
            self.over, _ = self._env.step(action)

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(others)
