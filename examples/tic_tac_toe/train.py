"""Train the player: `python -m tic_tac_toe.train`, in the folder `examples`."""

import argparse
import random
from pathlib import Path
from typing import Any

from measured_training import model_of, parser, rollout_of, train_measured
from openai import AsyncOpenAI
from textarena_env import Match
from tic_tac_toe.agent import at_random, board_of, choose, mark_of, perfect, place

import offbook

HERE = Path(__file__).parent
OPPONENTS = {"random": at_random, "perfect": perfect}


async def play(client: AsyncOpenAI, model: str, scenario: dict[str, Any]) -> float:
    """One match: 1 for a win, 0.5 for a draw, 0 for a loss. The model begins every other match."""
    numbers, opponent = random.Random(scenario["match"]), OPPONENTS[scenario["opponent"]]
    match, seat = Match("TicTacToe-v0", scenario["match"], players=2), scenario["match"] % 2
    while not match.over:
        if match.player == seat:
            place(match, (await choose(client, model, match))[1])
        else:
            match.play(f"[{opponent(board_of(match), mark_of(match.player), numbers)}]")
    return (match.rewards[seat] + 1) / 2


def main(options: argparse.Namespace) -> None:
    def matches(first: int, count: int) -> list[dict[str, Any]]:
        return [{"match": first + match, "opponent": options.opponent} for match in range(count)]

    model = model_of(f"tic-tac-toe-{options.opponent}", options)
    config = offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.02, minibatches=2)
    train = matches(1_000 * options.seed, 1_000)
    trainer = offbook.Trainer(
        model, rollout_of(play), train, scenarios_per_step=8, group_size=16, config=config, seed=options.seed
    )
    train_measured(
        trainer,
        options,
        matches(10_000_000, 300),
        HERE / f"results/{options.opponent}-seed-{options.seed}.json",
        opponent=options.opponent,
    )


if __name__ == "__main__":
    arguments = parser(__doc__, steps=25)
    arguments.add_argument("--opponent", choices=OPPONENTS, default="random", help="whom it plays")
    main(arguments.parse_args())
