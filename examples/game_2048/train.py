"""Train the player: `python -m game_2048.train`, in the folder `examples`."""

import argparse
from pathlib import Path

from game_2048.agent import play
from measured_training import falling, model_of, parser, rollout_of, train_measured

import offbook

HERE = Path(__file__).parent


def main(options: argparse.Namespace) -> None:
    def games(first: int, count: int) -> list[dict[str, int]]:
        return [{"match": first + match, "size": options.size} for match in range(count)]

    model = model_of(f"game-2048-{options.size}", options)
    trainer = offbook.Trainer(
        model,
        rollout_of(play),
        games(1_000 * options.seed, 1_000),
        scenarios_per_step=8,
        group_size=16,
        config=falling(options, 0.1),
        seed=options.seed,
    )
    train_measured(
        trainer, options, games(10_000_000, 200), HERE / f"results/seed-{options.seed}.json", size=options.size
    )


if __name__ == "__main__":
    arguments = parser(__doc__, steps=24)
    arguments.add_argument("--size", type=int, default=2, help="of the board; 4 is the usual game, for a GPU")
    main(arguments.parse_args())
