"""One answer of the model to one input, and the judge of answers that must fit a schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbook.base.choices import as_message
from offbook.base.types import Message, Trajectory, TrajectoryGroup
from offbook.client.model import Model
from offbook.contracts import Judge
from offbook.rewards.ruler_judge import tie

from .inputs import Split, TaskInput
from .task import Task

FITS = "fits_schema"
"""Metric of a rollout: 1 if its answer fits the task's schema, else 0."""


def as_scenarios(inputs: Sequence[TaskInput], split: Split, prompt: str) -> list[dict[str, Any]]:
    """The scenarios of a split. They hold the prompt too, so that another prompt makes other scenarios."""
    return [{"id": one.id, "input": one.input, "system": prompt} for one in inputs if one.split == split]


@dataclass(frozen=True)
class AnswerOnce:
    """The rollout function: the system prompt, the input, and the model's answer; calls of tools are not run."""

    task: Task

    async def __call__(self, model: Model[Any], scenario: dict[str, Any]) -> Trajectory:
        """Ask the model once."""
        messages: list[Message] = [{"role": "user", "content": scenario["input"]}]
        if scenario["system"]:
            messages.insert(0, {"role": "system", "content": scenario["system"]})
        trajectory = Trajectory(messages_and_choices=list(messages), tools=self.task.tools or None)
        offered: dict[str, Any] = {"tools": self.task.tools} if self.task.tools else {}
        create: Any = model.openai_client().chat.completions.create
        answer = await create(model=model.inference_name(), messages=messages, **offered)
        trajectory.messages_and_choices.append(answer.choices[0])
        return trajectory


@dataclass(frozen=True)
class FittingJudge:
    """A judge whose score counts only for answers that fit the task's schema; the others score 0."""

    judge: Judge
    task: Task

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        """The judged group. Raises as the judge."""
        scored = await self.judge(group)
        if scored is None or self.task.answer_schema is None:
            return scored
        fitted = [self._fitted(item) for item in scored]
        return scored.model_copy(update={"trajectories": fitted, "metrics": {**scored.metrics, **tie(fitted)}})

    def _fitted(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.exception is not None or trajectory.reward is None:
            return trajectory
        fault = self.task.faults(str(as_message(trajectory.entries()[-1]).get("content") or ""))
        metrics = {**trajectory.metrics, FITS: float(not fault)}
        if not fault:
            return trajectory.model_copy(update={"metrics": metrics})
        logs = [*trajectory.logs, f"scores 0, its answer does not fit the schema: {fault:.300}"]
        return trajectory.model_copy(update={"reward": 0.0, "metrics": metrics, "logs": logs})
