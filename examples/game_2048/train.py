"""Train the player: `python -m game_2048.train`, in the folder `examples`."""

import argparse
from pathlib import Path

from game_2048.agent import play
from measured_training import rollout_of, train_measured

import offbook

HERE = Path(__file__).parent


def main(options: argparse.Namespace) -> None:
    def games(first: int, count: int) -> list[dict[str, int]]:
        return [{"match": first + match, "size": options.size} for match in range(count)]

    model = offbook.TrainableModel(
        f"game-2048-{options.size}-{options.seed}",
        project="examples",
        base_model=options.base_model,
        backend=offbook.LocalBackend(options.dir),
    )
    trainer = offbook.Trainer(
        model,
        rollout_of(play),
        games(1_000 * options.seed, 1_000),
        scenarios_per_step=4,
        group_size=24,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.02),
        seed=options.seed,
    )
    results = HERE / f"results/seed-{options.seed}.json" if options.write else None
    about = {"seed": options.seed, "base": options.base_model, "size": options.size}
    train_measured(trainer, options.steps, games(10_000_000, 200), results, **about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2, help="of the board; 4 is the usual game, for a GPU")
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=30, help="steps in all")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate; for a real model about 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("games"), help="folder for everything it makes")
    parser.add_argument("--write", action="store_true", help="write the figures that the gallery shows")
    main(parser.parse_args())
