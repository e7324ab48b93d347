"""Train the detective: `python -m temporal_clue.train`, in the folder `examples`."""

import argparse
from pathlib import Path
from typing import Any

from measured_training import rollout_of, train_measured
from temporal_clue.agent import look_up, solve

import offbook

HERE = Path(__file__).parent
FORMS = {"look-up": look_up, "clues": solve}


def puzzles(first: int, count: int) -> list[dict[str, Any]]:
    return [{"puzzle": first + number} for number in range(count)]


def main(options: argparse.Namespace) -> None:
    model = offbook.TrainableModel(
        f"temporal-clue-{options.form}-{options.seed}",
        project="examples",
        base_model=options.base_model,
        backend=offbook.LocalBackend(options.dir),
    )
    trainer = offbook.Trainer(
        model,
        rollout_of(FORMS[options.form]),
        puzzles(1_000 * options.seed, 1_000),
        scenarios_per_step=8,
        group_size=12,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.02, minibatches=2),
        seed=options.seed,
    )
    results = HERE / f"results/{options.form}-seed-{options.seed}.json" if options.write else None
    about = {"seed": options.seed, "base": options.base_model, "form": options.form}
    train_measured(trainer, options.steps, puzzles(10_000_000, 80), results, **about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--form", choices=FORMS, default="look-up", help="clues: one answer from the text, for a real model"
    )
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=20, help="steps in all")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate; for a real model about 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("games"), help="folder for everything it makes")
    parser.add_argument("--write", action="store_true", help="write the figures that the gallery shows")
    main(parser.parse_args())
