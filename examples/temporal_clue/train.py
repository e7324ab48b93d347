"""Train the detective: `python -m temporal_clue.train`, in the folder `examples`."""

import argparse
from pathlib import Path
from typing import Any

from measured_training import model_of, parser, rollout_of, train_measured
from temporal_clue.agent import look_up, solve

import offbook

HERE = Path(__file__).parent
FORMS = {"look-up": look_up, "clues": solve}


def puzzles(first: int, count: int) -> list[dict[str, Any]]:
    return [{"puzzle": first + number} for number in range(count)]


def main(options: argparse.Namespace) -> None:
    model = model_of(f"temporal-clue-{options.form}", options)
    trainer = offbook.Trainer(
        model,
        rollout_of(FORMS[options.form]),
        puzzles(1_000 * options.seed, 1_000),
        scenarios_per_step=8,
        group_size=12,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.02, minibatches=2),
        seed=options.seed,
    )
    train_measured(
        trainer,
        options,
        puzzles(10_000_000, 80),
        HERE / f"results/{options.form}-seed-{options.seed}.json",
        form=options.form,
    )


if __name__ == "__main__":
    arguments = parser(__doc__, steps=8)
    arguments.add_argument(
        "--form", choices=FORMS, default="look-up", help="clues: one answer from the text, for a real model"
    )
    main(arguments.parse_args())
