"""Chooses the runs that are worth imitating, and writes them as conversations that `train_sft` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.choices import as_message, is_choice
from offbook.base.errors import ConfigError
from offbook.base.types import History, Json, RolloutPlace, Trajectory, TrajectoryGroup
from offbook.contracts import Judge
from offbook.trainer.judging import DROPPED, judged, nothing_scored
from offbook_compare.journal import ComparedRollout
from offbook_compare.judging import blind

from .task import write_whole


@dataclass(frozen=True)
class GoodRuns:
    """The chosen runs of those that were scored, and by what: `rule` reads like "success is 1"."""

    rows: tuple[ComparedRollout, ...]
    scored: int
    rule: str


async def with_rewards(rows: Sequence[ComparedRollout], judge: Judge | None) -> list[ComparedRollout]:
    """The runs that did not fail; a judge scores those of each scenario together, and those it gives no score are left out.

    Raises the judge's errors, and RolloutError if it scores no group of runs that have no reward."""
    whole = [row for row in rows if not row.failed]
    if judge is None:
        return [row for row in whole if row.reward is not None]
    by_scenario: dict[str, list[tuple[ComparedRollout, Trajectory]]] = {}
    for row in whole:
        by_scenario.setdefault(row.scenario, []).append((row, _for_judge(row)))
    groups = [
        TrajectoryGroup([shown for _, shown in own], metadata={"scenario_id": name}, place=RolloutPlace(scenario=name))
        for name, own in by_scenario.items()
    ]
    answers = await judged(groups, judge)
    pairs = zip(by_scenario.values(), answers, strict=True)
    needed = [answer for own, answer in pairs if any(row.reward is None for row, _ in own)] or answers
    if needed and all(answer.metrics.get(DROPPED) for answer in needed):
        raise nothing_scored(needed)
    scores = {item.id: item.reward for answer in answers for item in answer if item.reward is not None}
    return [
        row.model_copy(update={"reward": scores[shown.id]})
        for own in by_scenario.values()
        for row, shown in own
        if shown.id in scores
    ]


def _for_judge(row: ComparedRollout) -> Trajectory:
    """What a judge gets to see in training: the conversation, and the reward that the run has already."""
    shown = blind(row.trajectory)
    shown.reward = row.reward
    return shown


def good_runs(rows: Sequence[ComparedRollout], success_at: float | None) -> GoodRuns:
    """The runs with a reward of at least `success_at`; without it those with success, and of runs that do not report success those
    with at least their mean reward.

    Raises ConfigError if none is good."""
    scored = [row for row in rows if row.reward is not None]
    plain = [float(row.reward or 0.0) for row in scored if "success" not in row.metrics]
    if success_at is not None:
        rule, least = f"a reward of at least {success_at:g}", success_at
    elif plain or not scored:
        least = sum(plain) / max(len(plain), 1)
        rule = f"a reward of at least the mean, {least:.3f}"
        rule = rule if len(plain) == len(scored) else f"success, or where it is not reported {rule}"
    else:
        rule, least = "success", 1.0

    def good(row: ComparedRollout) -> bool:
        if success_at is None and "success" in row.metrics:
            return float(row.metrics["success"]) >= 1
        return float(row.reward or 0.0) >= least

    chosen = tuple(row for row in scored if good(row))
    if not chosen:
        raise ConfigError(
            f"the teacher has no good run: none of its {len(scored)} scored runs has {rule}. Choose another teacher, "
            "or lower "
            "success_at (--success-at)"
        )
    return GoodRuns(chosen, len(scored), rule)


def write_conversations(rows: Sequence[ComparedRollout], file: Path) -> int:
    """Write each conversation of the runs as a line, as OpenAI's fine-tuning takes it. Returns their number."""
    lines = [
        json.dumps(row_of(history), ensure_ascii=False)
        for row in rows
        for history in (row.trajectory, *row.trajectory.additional_histories)
        if any(as_message(item).get("role") == "assistant" for item in history.entries())
    ]
    unique = list(dict.fromkeys(lines))
    write_whole(file, "".join(f"{line}\n" for line in unique))
    return len(unique)


def row_of(history: History) -> dict[str, Json]:
    """A conversation as `messages` and `tools`. Where the model's answers are marked as choices, other messages of the
    assistant are context: they get the weight 0."""
    entries = history.entries()
    chosen = any(is_choice(item) for item in entries)
    messages: list[dict[str, Json]] = []
    for item in entries:
        message: dict[str, Json] = {name: value for name, value in as_message(item).items()}  # a TypedDict
        if chosen and message["role"] == "assistant" and not is_choice(item):
            message["weight"] = 0
        messages.append(message)
    return {"messages": messages} | ({"tools": list(history.tools)} if history.tools else {})
