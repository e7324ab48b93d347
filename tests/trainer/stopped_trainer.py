"""A Trainer as a process of its own, which stands still at a phase of its second step until it is killed or may go on.

    python -m tests.trainer.stopped_trainer URL MODEL RUN PHASE MARK

It writes MARK when it stands still, and goes on when MARK is removed. PHASE: one of PHASES, or "none".
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from offbook import RemoteBackend, TrainableModel, TrainConfig, Trainer, Trajectory, TrajectoryGroup
from offbook.trainer import trainer as module

PHASES = ("sampling", "judging", "training", "trained", "evaluating", "logging", "logged")
STEPS = 3
SCENARIOS = [{"id": word, "prompt": f"say the word {word}"} for word in ("blue", "teal", "pink")]
HELD_OUT = [{"id": f"held out {word}", "prompt": f"say the word {word}"} for word in ("red", "grey")]


class Stops:
    """Stands still once, where the phase is reached with the model at step 1 or above."""

    def __init__(self, model: TrainableModel, phase: str, mark: Path) -> None:
        self._model, self._phase, self._mark = model, phase, mark

    async def at(self, phase: str) -> None:
        if phase != self._phase or self._mark.exists() or await self._model.get_step() < 1:
            return
        if phase != self._phase:  # another group stood still while this one asked for the step
            return
        self._phase = "none"
        self._mark.touch()
        while self._mark.exists():
            time.sleep(0.05)  # the whole process stands still


async def train(url: str, name: str, run: str, phase: str, mark: Path) -> None:
    model = TrainableModel(name, base_model="tiny", backend=RemoteBackend(url))
    stops, numbers = Stops(model, phase, mark), itertools.count()

    async def rollout(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": scenario["prompt"]}])
        answer = await model.openai_client().chat.completions.create(
            model=model.name, messages=trajectory.messages(), max_tokens=8, temperature=1.5
        )
        trajectory.messages_and_choices.append(answer.choices[0])
        await stops.at("evaluating" if scenario in HELD_OUT else "sampling")
        return trajectory

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        await stops.at("judging")
        for trajectory in group:
            trajectory.reward = float(next(numbers))
        return group

    original: Any = module.train_each
    log: Any = module.log_to_each

    async def train_each(*arguments: Any) -> Any:
        task = asyncio.create_task(original(*arguments))
        if phase == "training" and await model.get_step():
            step = await model.get_step()
            while not (await (await model.api()).model(name)).training and await model.get_step() == step:
                await asyncio.sleep(0)
            await stops.at("training")
        result = await task
        await stops.at("trained")
        return result

    async def log_to_each(*arguments: Any) -> None:
        await stops.at("logging")
        await log(*arguments)
        await stops.at("logged")

    patched: dict[str, Callable[..., Awaitable[Any]]] = {"train_each": train_each, "log_to_each": log_to_each}
    for word, function in patched.items():
        setattr(module, word, function)
    options: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 2, "eval": HELD_OUT, "eval_every": 1, "run": run}
    trainer = Trainer(model, rollout, SCENARIOS, judge=judge, config=TrainConfig(learning_rate=1e-3), **options)
    report = await trainer.atrain(STEPS)
    print("ended at step", report.step)


if __name__ == "__main__":
    _, url, name, run, phase, mark = sys.argv
    asyncio.run(train(url, name, run, phase, Path(mark)))
