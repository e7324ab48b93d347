"""One answer is a rollout; one that does not fit the task's schema scores 0, whatever the judge says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import offbook
from offbook.testing import says, scripted_llm
from offbook_auto.described import FITS, AnswerOnce, FittingJudge
from offbook_auto.task import Task


async def generous(group: offbook.TrajectoryGroup) -> offbook.TrajectoryGroup:
    for trajectory in group:
        trajectory.reward = 0.8
    return group


async def test_only_answers_that_fit_the_schema_keep_their_score() -> None:
    task = Task(description="a ticket", answer_schema={"type": "object", "required": ["title"]})
    answers = ['{"title": "A"}', "A", "{}"]
    group = offbook.TrajectoryGroup(
        offbook.Trajectory(
            messages_and_choices=[{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
        )
        for text in answers
    )
    scored = await FittingJudge(generous, task)(group)
    assert scored is not None
    assert [(one.reward, one.metrics[FITS]) for one in scored] == [(0.8, 1.0), (0.0, 0.0), (0.0, 0.0)]
    assert "title" in scored.trajectories[2].logs[-1] and scored.metrics["judge/tie"] == 0.0


async def test_a_rollout_lasts_as_long_as_its_answer() -> None:
    with scripted_llm([replace(says("fine"), seconds=0.2)]) as endpoint:
        model: offbook.Model[Any] = offbook.Model("m", inference_base_url=endpoint.url, inference_api_key="k")
        trajectory = (
            await AnswerOnce(Task(description="x"))(model, {"input": "hello", "system": "Be brief."})
        ).finish()
    assert [message["role"] for message in trajectory.messages()] == ["system", "user", "assistant"]
    assert trajectory.ended_at is not None and trajectory.ended_at - trajectory.started_at >= 0.2
