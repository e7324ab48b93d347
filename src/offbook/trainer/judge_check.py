"""`offbook judge-check`: how well a judge agrees with a person's ranking of rollouts, and what it costs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from pydantic import ValidationError

from offbook.base.errors import ConfigError, LlmError, RolloutError
from offbook.base.text import counted
from offbook.base.types import History
from offbook.llms import budget
from offbook.rewards.judge_prompt import DEFAULT_RUBRIC
from offbook.rewards.ruler_judge import Ruler
from offbook.scenarios.file_rows import jsonl_rows

from .statistics import kendall_tau_b, pairs_in_order

SHOWN_FAULTS = 20


@dataclass(frozen=True)
class RankedRollout:
    """A rollout's own conversation, those of its sub-agents, and the person's score (higher is better)."""

    histories: tuple[History, ...]
    score: float


@dataclass(frozen=True)
class GroupAgreement:
    """Agreement in one group. `truth`: the person's scores; `scores`: the judge's. `tau`: Kendall's tau-b, None if all
    scores of one of them are equal. `pairs`: pairs that the person orders; `pairs_right`: of these, in the judge's
    order."""

    group: str
    truth: tuple[float, ...]
    scores: tuple[float, ...]
    tau: float | None
    pairs_right: float
    pairs: int


@dataclass(frozen=True)
class JudgeCheck:
    """Agreement over all groups. `unscored`: by group name, why the judge returned no scores. `spent`: lines about
    tokens and costs."""

    groups: tuple[GroupAgreement, ...]
    unscored: dict[str, str]
    spent: tuple[str, ...]
    cost: float | None  # USD; None: some price is unknown

    @property
    def tau(self) -> float | None:
        """The mean of Kendall's tau-b over the groups that have one, -1 to 1; None if none has."""
        values = [group.tau for group in self.groups if group.tau is not None]
        return fmean(values) if values else None

    @property
    def accuracy(self) -> float | None:
        """The share of the person's ordered pairs that the judge orders in the same way; a tie of the judge counts as
        half a pair. None if there are no ordered pairs."""
        pairs = sum(group.pairs for group in self.groups)
        return sum(group.pairs_right for group in self.groups) / pairs if pairs else None

    def lines(self) -> list[str]:
        """The result as lines to print."""
        rollouts = sum(len(group.truth) for group in self.groups)
        lines = [f"{counted(len(self.groups), 'group')} scored, {counted(rollouts, 'rollout')}"]
        lines += [f"group {name} was not scored: {why}" for name, why in self.unscored.items()]
        if self.tau is not None and self.accuracy is not None:
            lines.append(f"Kendall's tau-b {self.tau:.2f} (1: the same order, 0: no relation, -1: reversed)")
            pairs = sum(group.pairs for group in self.groups)
            lines.append(f"pairs in the right order {self.accuracy:.0%} of {pairs} (a tie of the judge's counts half)")
            worst = min((group for group in self.groups if group.tau is not None), key=lambda group: group.tau or 0.0)
            lines.append(f"least alike: group {worst.group}, tau-b {worst.tau or 0.0:.2f}")
        else:
            lines.append("no group in which both order anything: rank rollouts of different quality")
        return lines + list(self.spent)


def read_ranked(file: Path) -> dict[str, list[RankedRollout]]:
    """Read ranked rollouts from JSONL, by group name. Raises ConfigError with all faults and their lines.

    A line has `group`, `messages`, `score` (higher is better) or `rank` (1 is best), and optionally `tools` and
    `additional_histories`. A line of the JSONL sink becomes one by adding `score` or `rank`; lines with neither are
    skipped."""
    faults: list[str] = []
    groups: dict[str, list[RankedRollout]] = {}
    try:
        rows = list(jsonl_rows(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    for row in rows:
        try:
            if row.values is None:
                raise ConfigError(row.fault)
            if (score := _score(row.values)) is not None:
                groups.setdefault(_group(row.values), []).append(RankedRollout(_histories(row.values), score))
        except ConfigError as error:
            faults.append(f"{file}:{row.place}: {error}")
    faults += [
        f"{file}: group {name} has one ranked rollout; two are needed"
        for name, rollouts in groups.items()
        if len(rollouts) < 2
    ]
    if faults:
        raise ConfigError("\n".join(faults[:SHOWN_FAULTS]))
    if not groups:
        raise ConfigError(f"{file}: no line has a `score` or a `rank`")
    return groups


async def check_judge_on(groups: Mapping[str, Sequence[RankedRollout]], judge: Ruler) -> JudgeCheck:
    """Let the judge score every group. Groups that it cannot score go to `unscored`. Raises errors that every group
    would have, such as missing credentials."""
    with budget() as spending:
        answers = await asyncio.gather(*(_scores(rollouts, judge) for rollouts in groups.values()))
    agreements: list[GroupAgreement] = []
    unscored: dict[str, str] = {}
    for (name, rollouts), scores in zip(groups.items(), answers, strict=True):
        if isinstance(scores, str):
            unscored[name] = scores
            continue
        truth = tuple(rollout.score for rollout in rollouts)
        right, pairs = pairs_in_order(truth, scores)
        agreements.append(GroupAgreement(name, truth, scores, kendall_tau_b(truth, scores), right, pairs))
    cost = None if spending.total.unpriced else spending.total.cost
    return JudgeCheck(tuple(agreements), unscored, tuple(spending.lines()), cost)


async def _scores(rollouts: Sequence[RankedRollout], judge: Ruler) -> tuple[float, ...] | str:
    """The judge's scores, or the reason why there are none."""
    try:
        judgement = await judge.judge([rollout.histories for rollout in rollouts])
    except LlmError as error:
        if error.lasting:
            raise
        return str(error)
    except RolloutError as error:
        return str(error)
    return tuple(score.score for score in judgement.scores)


def _score(values: Mapping[str, Any]) -> float | None:
    named = {name: values[name] for name in ("score", "rank") if values.get(name) is not None}
    if len(named) > 1:
        raise ConfigError("`score` and `rank`: one of the two is needed, got both")
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"`{name}` must be a number, got {value!r:.80}")
        return -float(value) if name == "rank" else float(value)
    return None


def _group(values: Mapping[str, Any]) -> str:
    """The group's name; in lines of the JSONL sink its id, which is unique over runs."""
    place = values.get("place")
    name = (cast(Mapping[str, Any], place).get("group") if isinstance(place, dict) else None) or values.get("group")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ConfigError(f"`group` must be a name or a number, the same for rollouts of one task; got {name!r:.80}")
    return str(name)


def _histories(values: Mapping[str, Any]) -> tuple[History, ...]:
    others = cast(list[object], values.get("additional_histories") or [])
    try:
        own = History(messages_and_choices=values["messages"], tools=values.get("tools"))
        return (own, *(History.model_validate(other) for other in others))
    except KeyError as error:
        raise ConfigError("`messages` is missing: the conversation as a list") from error
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"`messages`, `tools` or `additional_histories` cannot be read: {error}") from error


def ruler_at(model: str, api_base: str | None, rubric: Path | None, *, reasoning: bool = False) -> Ruler:
    """Build the judge from the command's options. `rubric`: a text file. Raises ConfigError."""
    try:
        text = DEFAULT_RUBRIC if rubric is None else rubric.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rubric: {rubric} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"--rubric: {rubric} is empty")
    return Ruler(model, rubric=text, reasoning=reasoning, api_base=api_base)
