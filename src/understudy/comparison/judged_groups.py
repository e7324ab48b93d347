"""A judge over all candidates: their rollouts of a scenario in one group, without names, in random order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from understudy.choices import as_message
from understudy.contracts import Judge
from understudy.errors import RolloutError
from understudy.trainer.judging import DROPPED, judged
from understudy.types import History, Message, RolloutPlace, Trajectory, TrajectoryGroup, new_id

from .results import Scored
from .winrates import JudgedGroup, JudgedRollout


async def judge_side_by_side(
    scored: Sequence[Scored], judge: Judge, seed: int
) -> tuple[list[tuple[str, JudgedGroup]], int]:
    """The judged groups with their scenarios, one for each number of rollout, and how many groups the judge dropped. Rollouts
    that failed are not shown. Raises what `judged` raises, and RolloutError where it scored no group at all."""
    generator = random.Random(seed)
    keys = dict.fromkeys((row.scenario, row.index) for each in scored for row in each.rows)
    asked: list[tuple[str, dict[str, str], TrajectoryGroup]] = []
    for scenario, index in keys:
        shown: list[tuple[str, Trajectory]] = []
        for each in scored:
            row = next((row for row in each.rows if (row.scenario, row.index) == (scenario, index)), None)
            if row is not None and not row.failed:
                shown.append((each.candidate.name, blind(row.trajectory)))
        if len(shown) < 2:
            continue
        generator.shuffle(shown)
        place = RolloutPlace(scenario=scenario, group=new_id("group"))
        owners = {trajectory.id: name for name, trajectory in shown}
        asked.append((scenario, owners, TrajectoryGroup([each for _, each in shown], place=place)))
    answers = await judged([group for _, _, group in asked], judge)
    found: list[tuple[str, JudgedGroup]] = []
    for (scenario, owners, _), answer in zip(asked, answers, strict=True):
        if answer.metrics.get(DROPPED):
            continue
        scores = {
            owners[each.id]: JudgedRollout(float(each.reward), written(each))
            for each in answer
            if each.reward is not None and each.id in owners
        }
        found.append((scenario, scores))
    if asked and not found:
        why = next((line for answer in answers for line in answer.logs), "the judge gave no scores")
        raise RolloutError(
            f"judge: none of {len(asked)} groups was scored, the first because {why}. The rollouts are kept: run it again with "
            "another judge"
        )
    return found, len(asked) - len(found)


def blind(trajectory: Trajectory) -> Trajectory:
    """What the judge is shown: the conversations, and nothing that tells whose they are."""
    histories = [_blind(each) for each in (trajectory, *trajectory.additional_histories)]
    first = histories[0]
    return Trajectory(
        messages_and_choices=first.messages_and_choices, tools=first.tools, additional_histories=histories[1:]
    )


def _blind(history: History) -> History:
    """Plain messages: a choice of the trained model would be marked, one of another LLM not."""
    plain: list[Message] = [dict(as_message(item)) for item in history.entries()]
    for message in plain:
        message.pop("name", None)
    return History(messages_and_choices=list(plain), tools=history.tools)


def written(trajectory: Trajectory) -> int:
    """Characters of what the model itself said, in all turns."""
    messages = [as_message(item) for item in trajectory.entries()]
    texts = [message.get("content") for message in messages if message["role"] == "assistant"]
    return sum(len(text) for text in texts if isinstance(text, str))
