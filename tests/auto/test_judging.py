"""An answer that does not fit the task's schema scores 0, whatever the judge says."""

from __future__ import annotations

import offbook
from offbook.auto.rollout import FITS, FittingJudge
from offbook.auto.task import Task


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
