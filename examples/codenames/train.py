"""Train the pair, one LoRA each: `python -m codenames.train`, in the folder `examples`."""

import argparse
from pathlib import Path
from typing import Any

from codenames.agent import Player, board, code
from measured_training import train_measured

import offbook

HERE = Path(__file__).parent
FORMS = {"code": code, "board": board}


async def rollout(models: tuple[offbook.TrainableModel, ...], scenario: dict[str, Any]) -> offbook.Trajectory:
    async def scored() -> None:
        spymaster, operative = (Player(model.openai_client(), model.name) for model in models)
        play = FORMS[scenario["form"]]
        offbook.auto_trajectory(required=True).reward = await play(spymaster, operative, scenario["match"])

    return await offbook.capture_auto_trajectory(scored())


def pair(seed: int, options: argparse.Namespace) -> list[offbook.TrainableModel]:
    """The spymaster and the operative of a seed, on one server."""
    backend = offbook.LocalBackend(options.dir)
    names = (f"spymaster-{options.form}-{seed}", f"operative-{options.form}-{seed}")
    return [offbook.TrainableModel(name, "examples", options.base_model, backend=backend) for name in names]


def matches(first: int, count: int, form: str) -> list[dict[str, Any]]:
    return [{"match": first + match, "form": form} for match in range(count)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS, default="code", help="board: real words, for a real model")
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=30, help="steps in all")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate; for a real model about 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("games"), help="folder for everything it makes")
    parser.add_argument("--write", action="store_true", help="write the figures that the gallery shows")
    return parser


if __name__ == "__main__":
    options = parser().parse_args()
    trainer = offbook.Trainer(
        pair(options.seed, options),
        rollout,
        matches(1_000 * options.seed, 1_000, options.form),
        scenarios_per_step=4,
        group_size=24,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.05),
        seed=options.seed,
    )
    results = HERE / f"results/{options.form}-seed-{options.seed}.json" if options.write else None
    about = {"seed": options.seed, "base": options.base_model, "form": options.form}
    train_measured(trainer, options.steps, matches(10_000_000, 100, options.form), results, **about)
