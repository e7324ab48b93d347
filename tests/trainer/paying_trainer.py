"""A Trainer as a process of its own, whose judge asks an LLM and then says "paid". With WAITS it stands still there.

python -m tests.trainer.paying_trainer SERVER_URL LLM_URL [WAITS]
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time

from openai.types.chat.chat_completion import Choice

from offbook import RemoteBackend, TrainableModel, Trainer, Trajectory, TrajectoryGroup
from offbook.llms import Llm

NUMBERS = itertools.count()


async def rollout(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    mark = {"offbook": {"call_id": f"call-{next(NUMBERS)}", "index": 0}}
    return Trajectory(messages_and_choices=[Choice.model_validate(choice | mark)])


def main(server: str, endpoint: str, *waits: str) -> None:
    prices = {"prompt": 0, "completion": 200_000}  # an answer of 5 tokens costs 1 USD
    llm = Llm("openai/judge", api_base=endpoint, cache=None, prices=prices)

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        await llm.ask_text([{"role": "user", "content": "question"}])
        print("paid", flush=True)
        while waits:
            time.sleep(1)  # the whole process stands still
        for place, trajectory in enumerate(group):
            trajectory.reward = float(place)
        return group

    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server))
    trainer = Trainer(model, rollout, [{"id": "train"}], judge=judge, group_size=2, scenarios_per_step=1)
    asyncio.run(trainer.atrain(1))


if __name__ == "__main__":
    main(*sys.argv[1:])
