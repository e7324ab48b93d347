"""A fresh policy learns the order desk from the quickstart's trained policy, beside GRPO: success against rollouts.

    python benchmarks/distillation.py --seeds 3

GRPO trains a teacher per seed, as the quickstart does; the first seed's teacher scores the students of all seeds, which see no
reward. Both curves are the success of the rollouts that a step trained on, at temperature 1; the held-out rate is greedy.
"""

import argparse
import asyncio
import json
from functools import partial
from pathlib import Path

from offbook import LocalBackend, TeacherKL, TrainableModel, TrainConfig
from offbook.quickstart.desk import Desk
from offbook.quickstart.run import (
    GROUP_SIZE,
    SCENARIOS_PER_STEP,
    TEST_REQUESTS,
    TRAIN_REQUESTS,
    schedule,
    trainable_agent,
)


def distilled(step: int, steps: int, teacher: str) -> TrainConfig:
    """The quickstart's options of a step with a teacher in place of rewards and of the KL to the base."""
    own = schedule(step, steps)
    return own.model_copy(update={"kl_coef": 0.0, "distill": TeacherKL(teacher=teacher, alone=True)})


async def trained(
    desk: Desk, backend: LocalBackend, name: str, seed: int, steps: int, group_size: int, teacher: str | None
) -> dict[str, object]:
    """One model trained from its first step, with a row per step: rollouts so far, their success, and the KL to the teacher."""
    model = TrainableModel(name=name, project="distillation", base_model="tiny", backend=backend)
    agent = trainable_agent(desk, model)
    config = partial(schedule, steps=steps) if teacher is None else partial(distilled, steps=steps, teacher=teacher)
    report = await agent.atrain(
        desk.requests("train", TRAIN_REQUESTS, seed),
        steps=steps,
        group_size=group_size,
        scenarios_per_step=SCENARIOS_PER_STEP,
        concurrency=group_size * SCENARIOS_PER_STEP,
        config=config,
        seed=seed,
    )
    test = await agent.aevaluate(desk.requests("test", TEST_REQUESTS), temperature=0.0, concurrency=64, timeout=600)
    rows = [
        {
            "rollouts": (index + 1) * group_size * SCENARIOS_PER_STEP,
            "success": iteration.success,
            "kl": iteration.metrics.get("kl/teacher"),
            "seconds": iteration.rollout_seconds + iteration.train_seconds,
        }
        for index, iteration in enumerate(report.iterations)
    ]
    kind = "grpo" if teacher is None else "distillation"
    return {"kind": kind, "seed": seed, "held_out": test.success, "steps": rows}


async def measure(folder: Path, seeds: int, steps: int, taught: int, group_size: int, file: Path) -> None:
    """Train the first teacher, the students, then GRPO with the other seeds; keep each as it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    desk, backend = Desk(folder / "desk.db"), LocalBackend(dir=folder / "server", engine="embedded")
    runs: list[dict[str, object]] = []

    async def run(name: str, seed: int, steps: int, size: int, teacher: str | None) -> None:
        runs.append(await trained(desk, backend, name, seed, steps, size, teacher))
        file.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")

    await run("grpo-0", 0, steps, GROUP_SIZE, None)
    for seed in range(seeds):
        await run(f"student-{seed}", seed, taught, group_size, f"grpo-0@{steps}")
    for seed in range(1, seeds):
        await run(f"grpo-{seed}", seed, steps, GROUP_SIZE, None)


def main() -> None:
    """Run the comparison, and write its rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=36, help="steps of GRPO")
    parser.add_argument("--taught", type=int, default=12, help="steps of distillation")
    parser.add_argument("--group-size", type=int, default=4, help="rollouts of a request in distillation")
    parser.add_argument("--folder", type=Path, default=Path("distillation-run"))
    parser.add_argument("--json", type=Path, default=Path("distillation.json"), help="where the rows are written")
    known = parser.parse_args()
    asyncio.run(measure(known.folder, known.seeds, known.steps, known.taught, known.group_size, known.json))


if __name__ == "__main__":
    main()
