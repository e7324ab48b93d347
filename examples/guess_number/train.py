"""Train the guesser: `python -m guess_number.train`, in the folder `examples`."""

import argparse
from pathlib import Path

from guess_number.agent import play
from measured_training import rollout_of, train_measured

import offbook

HERE = Path(__file__).parent


def main(options: argparse.Namespace) -> None:
    model = offbook.TrainableModel(
        f"guess-number-{options.seed}",
        project="examples",
        base_model=options.base_model,
        backend=offbook.LocalBackend(options.dir),
    )
    trainer = offbook.Trainer(
        model,
        rollout_of(play),
        [{"match": 1_000 * options.seed + match} for match in range(1_000)],
        scenarios_per_step=8,
        group_size=16,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.05, minibatches=2),
        seed=options.seed,
    )
    held_out = [{"match": 10_000_000 + match} for match in range(150)]
    results = HERE / f"results/seed-{options.seed}.json" if options.write else None
    train_measured(trainer, options.steps, held_out, results, seed=options.seed, base=options.base_model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=25, help="steps in all")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate; for a real model about 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("games"), help="folder for everything it makes")
    parser.add_argument("--write", action="store_true", help="write the figures that the gallery shows")
    main(parser.parse_args())
