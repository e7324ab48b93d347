"""What the examples share: a rollout of an agent that knows nothing of Offbook, and a training that is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import offbook
from offbook.trainer.statistics import paired_difference

Play = Callable[[AsyncOpenAI, str, Any], Awaitable[float]]
"""(client, model's name, scenario) -> reward."""


def rollout_of(play: Play) -> Callable[[offbook.TrainableModel, Any], Awaitable[offbook.Trajectory]]:
    """`play` as a rollout: its calls go to the model that is trained, and are recorded."""

    async def rollout(model: offbook.TrainableModel, scenario: Any) -> offbook.Trajectory:
        async def scored() -> None:
            offbook.auto_trajectory(required=True).reward = await play(model.openai_client(), model.name, scenario)

        return await offbook.capture_auto_trajectory(scored())

    return rollout


def train_measured(
    trainer: offbook.Trainer, steps: int, held_out: Sequence[Any], results: Path | None, **about: Any
) -> None:
    """Sample the held-out scenarios, train, sample them again, and say what changed. `results`: a file for the figures,
    with `about`, which the gallery reads."""
    before = trainer.evaluate(held_out, temperature=1.0, rollouts=2)
    print(f"before: {before}")
    started = time.monotonic()
    report = trainer.train(steps)
    minutes = (time.monotonic() - started) / 60
    after = trainer.evaluate(held_out, temperature=1.0, rollouts=2)
    gain = paired_difference(after.rewards(), before.rewards())
    print(f"after: {after}\ngain: {gain.text()} in {minutes:.1f} minutes; LoRA: {report.checkpoint}")
    if results is None:
        return
    if before.step != 0 or report.stopped == "nothing_left":
        raise SystemExit(f"{results} is not written: the model had been trained before this run; take another --dir")
    figures = {
        **about,
        "before": before.reward,
        "after": after.reward,
        "gain": asdict(gain),
        "steps": report.step,
        "minutes": round(minutes, 1),
        "rewards": [each.reward for each in report.iterations],
        "rollouts": len(report.iterations) * trainer.options.group_size * trainer.options.scenarios_per_step,
    }
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(figures, indent=1) + "\n")
