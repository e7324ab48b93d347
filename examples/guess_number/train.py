"""Train the guesser: `python -m guess_number.train`, in the folder `examples`."""

import argparse
from pathlib import Path

from guess_number.agent import play
from measured_training import model_of, parser, rollout_of, train_measured

import offbook

HERE = Path(__file__).parent


def main(options: argparse.Namespace) -> None:
    model = model_of("guess-number", options)
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
    train_measured(trainer, options, held_out, HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    main(parser(__doc__, steps=25).parse_args())
