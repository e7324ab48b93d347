"""Train the service: `python -m customer_service.train`, in the folder `examples`."""

import argparse
from pathlib import Path

from customer_service.agent import serve
from measured_training import model_of, parser, rollout_of, train_measured

import offbook

HERE = Path(__file__).parent


def shops(first: int, count: int) -> list[dict[str, int]]:
    return [{"shop": first + number} for number in range(count)]


def main(options: argparse.Namespace) -> None:
    trainer = offbook.Trainer(
        model_of("customer-service", options),
        rollout_of(serve),
        shops(1_000 * options.seed, 1_000),
        scenarios_per_step=8,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.05, minibatches=2),
        seed=options.seed,
    )
    train_measured(trainer, options, shops(10_000_000, 60), HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    main(parser(__doc__, steps=8).parse_args())
