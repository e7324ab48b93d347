"""Shows a judge the rollouts of all candidates of a scenario as one group, without names and in random order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from offbook.base.choices import as_message
from offbook.base.types import (
    History,
    Message,
    RolloutPlace,
    Trajectory,
    TrajectoryGroup,
    new_id,
)
from offbook.contracts import Judge
from offbook.trainer.judging import DROPPED, judged, nothing_scored

from .results import Scored
from .winrates import JudgedGroup, JudgedRollout


async def judge_side_by_side(
    scored: Sequence[Scored], judge: Judge, seed: int
) -> tuple[list[tuple[str, JudgedGroup]], int]:
    """Judge one group per scenario and rollout index. Failed rollouts are left out.

    Returns the judged groups with their scenarios, and the number of groups that the judge dropped. Raises the errors of
    `judged`, and RolloutError if no group was scored.
    """
    generator = random.Random(seed)
    keys = dict.fromkeys((row.scenario, row.index) for item in scored for row in item.rows)
    shown_groups: list[tuple[str, dict[str, str], TrajectoryGroup]] = []
    for scenario, index in keys:
        shown: list[tuple[str, Trajectory]] = []
        for item in scored:
            row = next((row for row in item.rows if (row.scenario, row.index) == (scenario, index)), None)
            if row is not None and not row.failed:
                shown.append((item.candidate.name, blind(row.trajectory)))
        if len(shown) < 2:
            continue
        generator.shuffle(shown)
        place = RolloutPlace(scenario=scenario, group=new_id("group"))
        owners = {trajectory.id: name for name, trajectory in shown}
        shown_groups.append((scenario, owners, TrajectoryGroup([item for _, item in shown], place=place)))
    answers = await judged([group for _, _, group in shown_groups], judge)
    judged_groups: list[tuple[str, JudgedGroup]] = []
    for (scenario, owners, _), answer in zip(shown_groups, answers, strict=True):
        if answer.metrics.get(DROPPED):
            continue
        scores = {
            owners[item.id]: JudgedRollout(float(item.reward), written(item))
            for item in answer
            if item.reward is not None and item.id in owners
        }
        judged_groups.append((scenario, scores))
    if shown_groups and not judged_groups:
        raise nothing_scored(answers)
    return judged_groups, len(shown_groups) - len(judged_groups)


def blind(trajectory: Trajectory) -> Trajectory:
    """A copy of the trajectory for the judge: the conversations, without anything that identifies the candidate."""
    histories = [_blind(history) for history in (trajectory, *trajectory.additional_histories)]
    first = histories[0]
    return Trajectory(
        messages_and_choices=first.messages_and_choices, tools=first.tools, additional_histories=histories[1:]
    )


def _blind(history: History) -> History:
    """The history as plain messages: choices of the trained model carry a mark that those of other LLMs lack."""
    plain: list[Message] = [dict(as_message(item)) for item in history.entries()]
    for message in plain:
        message.pop("name", None)
    return History(messages_and_choices=list(plain), tools=history.tools)


def written(trajectory: Trajectory) -> int:
    """Number of characters in all assistant messages."""
    messages = [as_message(item) for item in trajectory.entries()]
    texts = [message.get("content") for message in messages if message["role"] == "assistant"]
    return sum(len(text) for text in texts if isinstance(text, str))
