"""Train the pair, one LoRA each: `python -m codenames.train`, in the folder `examples`."""

import argparse
from pathlib import Path
from typing import Any

from codenames.agent import Player, board, code
from measured_training import model_of, parser, train_measured

import offbook

HERE = Path(__file__).parent
FORMS = {"code": code, "board": board}


async def rollout(models: tuple[offbook.TrainableModel, ...], scenario: dict[str, Any]) -> offbook.Trajectory:
    async def scored() -> None:
        spymaster, operative = (Player(model.openai_client(), model.name) for model in models)
        play = FORMS[scenario["form"]]
        offbook.auto_trajectory(required=True).reward = await play(spymaster, operative, scenario["match"])

    return await offbook.capture_auto_trajectory(scored())


def pair(options: argparse.Namespace) -> list[offbook.TrainableModel]:
    """The spymaster and the operative of the seed, on one server."""
    return [model_of(f"{role}-{options.form}", options) for role in ("spymaster", "operative")]


def matches(first: int, count: int, form: str) -> list[dict[str, Any]]:
    return [{"match": first + match, "form": form} for match in range(count)]


def arguments() -> argparse.ArgumentParser:
    arguments = parser(__doc__, steps=30)
    arguments.add_argument("--form", choices=FORMS, default="code", help="board: real words, for a real model")
    return arguments


if __name__ == "__main__":
    options = arguments().parse_args()
    trainer = offbook.Trainer(
        pair(options),
        rollout,
        matches(1_000 * options.seed, 1_000, options.form),
        scenarios_per_step=4,
        group_size=24,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.2),
        seed=options.seed,
    )
    held_out = matches(10_000_000, 100, options.form)
    train_measured(
        trainer, options, held_out, HERE / f"results/{options.form}-seed-{options.seed}.json", form=options.form
    )
