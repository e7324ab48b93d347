"""Writes `files/`: python write.py FOLDER.

Two models, two steps of one of them; rollouts that failed, are unscored, or called both; a log, a state, an unclaimed call.
"""

from __future__ import annotations

import asyncio
import random
import sys

import offbook

LORA = offbook.LoraOptions(r=1, alpha=2, target_modules=("q_proj",))


async def main(folder):
    backend = offbook.LocalBackend(folder, threads=1)
    model = offbook.TrainableModel("agent", project="desk", base_model="tiny", backend=backend, lora=LORA)
    other = offbook.TrainableModel("planner", project="desk", base_model="tiny", backend=backend, lora=LORA)
    await other.register()
    rng = random.Random(0)

    async def rollout(scenario, reward, both=False, fail=False):
        client = model.openai_client()
        traj = offbook.Trajectory(
            messages_and_choices=[{"role": "user", "content": scenario}], metadata={"scenario": scenario}
        )
        answer = await client.chat.completions.create(model=model.name, messages=traj.messages(), max_tokens=8)
        traj.messages_and_choices.append(answer.choices[0])
        if both:
            second = await other.openai_client().chat.completions.create(
                model=other.name, messages=traj.messages(), max_tokens=4
            )
            traj.messages_and_choices.append(second.choices[0])
        if fail:
            raise RuntimeError("the tool broke")
        traj.reward = reward
        return traj

    for _ in range(2):
        groups = await offbook.gather_trajectory_groups(
            [
                offbook.TrajectoryGroup(
                    [
                        rollout(f"where is order {n}?", rng.random(), both=n == 1, fail=(n, i) == (0, 2))
                        for i in range(3)
                    ]
                )
                for n in range(2)
            ],
            max_exceptions=3,
        )
        result = await model.train(groups, learning_rate=1e-3)
        print(result.step, result.applied)
    unscored = await rollout("nobody scored this", None)
    await model.log([unscored, await rollout("evaluation", 0.5)], split="val")
    await model.merge_state({"mine": 1})
    # a call that no trajectory claimed yet
    await model.openai_client().chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "unclaimed"}], max_tokens=4
    )
    backend.close()


asyncio.run(main(sys.argv[1]))
