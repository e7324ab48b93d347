"""What the examples share: a rollout of an agent that knows nothing of Offbook, and a training that is measured."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import offbook
from offbook.trainer.evaluate import Evaluation, paired_difference
from offbook.trainer.report import TrainReport

Play = Callable[[AsyncOpenAI, str, Any], Awaitable[float]]
"""(client, model's name, scenario) -> reward."""


def rollout_of(play: Play) -> Callable[[offbook.TrainableModel, Any], Awaitable[offbook.Trajectory]]:
    """`play` as a rollout: its calls go to the model that is trained, and are recorded."""

    async def rollout(model: offbook.TrainableModel, scenario: Any) -> offbook.Trajectory:
        async def scored() -> None:
            offbook.auto_trajectory(required=True).reward = await play(model.openai_client(), model.name, scenario)

        return await offbook.capture_auto_trajectory(scored())

    return rollout


def parser(description: str | None, steps: int, rate: float = 3e-3, *, local: bool = True) -> argparse.ArgumentParser:
    """The options that all of them have; `steps` and `rate` are the defaults of `--steps` and `--rate`. `local`: whether
    the model's server is one of this machine, which has options too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-model", default="tiny", help="the model that is trained")
    parser.add_argument("--steps", type=int, default=steps, help="steps in all")
    parser.add_argument("--rate", type=float, default=rate, help="learning rate; for a real model about 1e-5")
    parser.add_argument("--seed", type=int, default=0, help="draws and orders the scenarios, and names the model")
    parser.add_argument("--held-out", type=int, help="measure on only so many held-out scenarios")
    parser.add_argument("--write", action="store_true", help="write the figures that the gallery shows")
    if local:
        parser.add_argument("--dir", type=Path, default=Path("games"), help="folder for everything it makes")
        parser.add_argument("--load-in-4bit", action="store_true", help="for a real model on a small GPU")
    return parser


def model_of(name: str, options: argparse.Namespace) -> offbook.TrainableModel:
    """The model `name` of the seed, on the server of `--dir`."""
    backend = offbook.LocalBackend(options.dir, load_in_4bit=options.load_in_4bit)
    return offbook.TrainableModel(f"{name}-{options.seed}", "examples", options.base_model, backend=backend)


def falling(
    options: argparse.Namespace, falling_kl: float = 0.0, **others: Any
) -> Callable[[int], offbook.TrainConfig]:
    """The options of each step: the learning rate and the weight of the KL term fall to zero over the run."""

    def config(step: int) -> offbook.TrainConfig:
        left = 1 - (step - 1) / options.steps
        return offbook.TrainConfig(**{"learning_rate": options.rate * left, "kl_coef": falling_kl * left} | others)

    return config


def train_measured(
    trainer: offbook.Trainer, options: argparse.Namespace, held_out: Sequence[Any], results: Path, **about: Any
) -> None:
    """Sample the held-out scenarios, train, sample them again, and say what changed. `results`: the file in which
    `--write` keeps the figures, with `about`, for the gallery."""
    chosen = trainer.options
    about["rollouts_per_step"] = chosen.group_size * chosen.scenarios_per_step
    measured = held_out[: options.held_out]
    measure(lambda: trainer.evaluate(measured, temperature=1.0, rollouts=2), trainer.train, options, results, **about)


def measure(
    evaluate: Callable[[], Evaluation],
    train: Callable[[int], TrainReport],
    options: argparse.Namespace,
    results: Path,
    rollouts_per_step: int,
    **about: Any,
) -> None:
    """`train_measured` of anything that can be evaluated and trained."""
    before = evaluate()
    print(f"before: {before}")
    started = time.monotonic()
    report = train(options.steps)
    minutes = (time.monotonic() - started) / 60
    after = evaluate()
    gain = paired_difference(after.rewards(), before.rewards())
    print(f"after: {after}\ngain: {gain.text()} in {minutes:.1f} minutes; LoRA: {report.checkpoint}")
    if not options.write:
        return
    if before.step != 0 or report.stopped == "nothing_left":
        raise SystemExit(f"{results} is not written: the model had been trained before this run; take another --dir")
    figures = {
        "seed": options.seed,
        "base": options.base_model,
        **about,
        "before": before.reward,
        "after": after.reward,
        "gain": asdict(gain),
        "steps": report.step,
        "minutes": round(minutes, 1),
        "rewards": [each.reward for each in report.iterations],
        "rollouts": len(report.iterations) * rollouts_per_step,
    }
    write_figures(figures, results)


def write_figures(figures: dict[str, Any], results: Path) -> None:
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(figures, indent=1) + "\n")
