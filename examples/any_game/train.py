"""Train a model on any game of TextArena, in words, against its untrained self: `python -m any_game.train --game Nim-v0`, in
the folder `examples`."""

import argparse
from pathlib import Path
from typing import Any

from measured_training import model_of, parser, train_measured
from textarena_env import Match

import offbook

HERE = Path(__file__).parent


def main(options: argparse.Namespace) -> None:
    Match(options.game, 0, options.players)  # a wrong name or number of players fails before anything starts

    async def rollout(model: offbook.TrainableModel, scenario: dict[str, int]) -> offbook.Trajectory:
        """A match. The first seat is the newest step's, the others are the base's; only the first is trained: it has a move
        in every match, also where the base loses by an illegal one."""
        client, match = model.openai_client(), Match(options.game, scenario["match"], options.players)
        sides = [offbook.Trajectory() for _ in range(options.players)]
        while not match.over:
            side = sides[match.player]
            side.messages_and_choices.append({"role": "user", "content": "\n\n".join(match.messages())})
            answer = await client.chat.completions.create(
                model=model.name if match.player == 0 else model.inference_name(step=0),
                messages=side.messages(),
                max_completion_tokens=options.tokens,
            )
            side.messages_and_choices.append(answer.choices[0])
            match.play(answer.choices[0].message.content or "")
        sides[0].reward = match.rewards[0]
        return sides[0]

    def matches(first: int, count: int) -> list[dict[str, Any]]:
        return [{"match": first + match} for match in range(count)]

    config = offbook.TrainConfig(learning_rate=options.rate, minibatches=2)
    model, train = model_of(options.game.lower(), options), matches(1_000 * options.seed, 1_000)
    trainer = offbook.Trainer(
        model, rollout, train, scenarios_per_step=8, group_size=16, config=config, seed=options.seed
    )
    results = HERE / f"results/{options.game}-seed-{options.seed}.json"
    train_measured(trainer, options, matches(10_000_000, 200), results, game=options.game)


if __name__ == "__main__":
    arguments = parser(__doc__, steps=100, rate=1e-5)
    arguments.add_argument("--game", default="Nim-v0", help="its name in TextArena")
    arguments.add_argument("--players", type=int, default=2, help="how many the game has; 1: alone")
    arguments.add_argument("--tokens", type=int, default=256, help="most tokens of a move")
    main(arguments.parse_args())
