"""A judge over HTTP that follows a script: it reads the prompt as a model would, and scores what it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from offbook import Ruler, Trajectory, TrajectoryGroup
from offbook.base.types import RolloutException
from offbook.testing import LlmReply, LlmRequest, ScriptedLlm, ShownConversation, attempts_shown, says

ScoreOf = Callable[[list[ShownConversation]], float]
FAILED = RolloutException(type="ValueError", message="away", traceback="")


def entries(request: LlmRequest, score: ScoreOf) -> list[dict[str, Any]]:
    """One entry for each attempt of a prompt, in the order shown."""
    shown = attempts_shown(request.messages)
    return [{"id": name, "explanation": f"for {name}", "score": score(each)} for name, each in shown.items()]


def verdict(scores: list[dict[str, Any]], **fields: Any) -> LlmReply:
    return says(json.dumps({**fields, "scores": scores}))


def by_last_number(conversations: list[ShownConversation]) -> float:
    """The number that the attempt's last message ends with, as hundredths."""
    return float(str(conversations[0].messages[-1]["content"]).split()[-1]) / 100


def honest(request: LlmRequest) -> LlmReply:
    """Scores everything by its last number."""
    return verdict(entries(request, by_last_number))


def judge_at(endpoint: ScriptedLlm, **options: Any) -> Ruler:
    """A Ruler that asks the endpoint, without a cache and with few retries."""
    options = {"cache": None, "api_key": "k", "timeout": 20.0, "retries": 2, **options}
    return Ruler("openai/judge", api_base=endpoint.url, **options)


def said(text: str, **fields: Any) -> Trajectory:
    """A trajectory that ends with this text."""
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "how many?"}]
    return Trajectory(messages_and_choices=[*messages, {"role": "assistant", "content": text}], **fields)


def group_of(*numbers: int, **fields: Any) -> TrajectoryGroup:
    """A group whose trajectories end with these numbers."""
    return TrajectoryGroup([said(f"I count {number}") for number in numbers], **fields)


def rewards(group: TrajectoryGroup | None) -> list[float | None]:
    assert group is not None
    return [trajectory.reward for trajectory in group]
