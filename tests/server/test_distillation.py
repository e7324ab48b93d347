"""Distillation on policy through a server: a teacher is a model's name, as in a call."""

from __future__ import annotations

import pytest
from openai.types.chat import ChatCompletionUserMessageParam

import offbook
from offbook.base.errors import TrainError
from offbook.base.types import new_id

ASKED: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}


async def rollouts(model: offbook.TrainableModel, rewards: list[float | None]) -> offbook.TrajectoryGroup:
    client = model.openai_client()

    async def rollout(seed: int, reward: float | None) -> offbook.Trajectory:
        completion = await client.chat.completions.create(
            model=model.inference_name(), messages=[ASKED], max_tokens=8, temperature=2.0, seed=seed
        )
        return offbook.Trajectory(messages_and_choices=[ASKED, completion.choices[0]], reward=reward)

    return offbook.TrajectoryGroup([await rollout(seed, reward) for seed, reward in enumerate(rewards)])


async def test_a_step_of_another_model_teaches_without_rewards(local_backend: offbook.LocalBackend) -> None:
    expert, student = (
        offbook.TrainableModel(new_id(name), base_model="tiny", backend=local_backend) for name in ("expert", "student")
    )
    trained = await expert.train([await rollouts(expert, [1.0, 0.0, 0.5])], learning_rate=1e-2, pbar_desc=None)
    assert trained.step == 1
    alone = offbook.TeacherKL(teacher=f"{expert.name}@1", alone=True)
    result = await student.train([await rollouts(student, [None])], distill=alone, pbar_desc=None)
    assert (result.applied, result.step) == (True, 1)
    assert result.metrics["kl/teacher"] != 0
    with pytest.raises(TrainError, match=f"Model '{expert.name}' has no step 7; it has 0, 1"):
        await student.train([await rollouts(student, [None])], distill=f"{expert.name}@7", pbar_desc=None)
    with pytest.raises(TrainError, match="There is no model 'nobody' here"):
        await student.train([await rollouts(student, [None])], distill="nobody@1", pbar_desc=None)
