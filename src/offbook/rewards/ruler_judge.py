"""RULER: a language model compares the trajectories of a group; its scores become their rewards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from offbook.base.console import Terminal
from offbook.base.errors import ConfigError, LlmError, RolloutError
from offbook.base.numbers import distinct
from offbook.base.types import (
    History,
    Metric,
    Tool,
    Trajectory,
    TrajectoryGroup,
)
from offbook.llms import Llm
from offbook.llms.options import LlmOptions, check_parameters

from .judge_prompt import DEFAULT_RUBRIC, judge_prompt
from .transcripts import Transcript

logger = logging.getLogger("offbook")

TIE = "judge/tie"
"""Of a group: 1 if all rewards are equal up to rounding, so that it trains nothing, else 0."""
CUT = "judge/cut"
"""Of a group: 1 if texts were shortened to fit `max_prompt_tokens`, else 0."""


class Score(BaseModel):
    """The score of one attempt."""

    id: str = Field(description="the attempt's id, exactly as written")
    explanation: str = Field(description="why, in one or two sentences")
    score: float = Field(description="from 0 (worst) to 1 (best)")


class Verdict(BaseModel):
    """One entry for each attempt."""

    scores: list[Score]


class ReasonedVerdict(BaseModel):
    """A comparison of the attempts, then one entry for each."""

    reasoning: str = Field(description="the comparison, step by step")
    scores: list[Score]


def complete(ids: Sequence[str]) -> Callable[[Verdict | ReasonedVerdict], None]:
    """A validator of answers: every id of `ids` exactly once, no other id, every score from 0 to 1. The validator
    raises ValueError with all faults, in words for the judge."""

    def check(verdict: Verdict | ReasonedVerdict) -> None:
        counts = Counter(score.id for score in verdict.scores)
        faults = [f"no entry for {name!r}" for name in ids if name not in counts]
        faults += [f"{counts[name]} entries for {name!r}" for name in ids if counts[name] > 1]
        faults += [f"there is no attempt {name!r:.60}" for name in counts if name not in ids]
        faults += [
            f"the score of {score.id!r:.60} is {score.score}" for score in verdict.scores if not 0 <= score.score <= 1
        ]
        if faults:
            raise ValueError(
                f"{'; '.join(faults)}. Needed is one entry for each of {', '.join(ids)}, each with a score from 0 to 1"
            )

    return check


@dataclass(frozen=True)
class TrajectoryScore:
    """The judge's score of one trajectory, from 0 to 1. `trajectory_id`: its number in the list, from "1"."""

    trajectory_id: str
    explanation: str
    score: float


class Ruler:
    """A judge for a Trainer's option `judge`: `Ruler("openai/o3", rubric="...")`. Raises ConfigError.

    model: litellm's name of the model, or an `Llm`. Other options are those of `Llm` (api_base, temperature, cache,
    ...). rubric: the criteria. The default covers reaching the goal, directness, partial credit and honesty. tools:
    tools to show for trajectories that have none. reasoning: the judge writes a comparison before the scores.
    max_prompt_tokens: limit of the estimated prompt. Above it, long texts are shortened, tool results first. seed:
    random seed for the ids and their order. debug: print every judgement to stderr."""

    def __init__(
        self,
        model: str | Llm = "openai/o3",
        *,
        rubric: str = DEFAULT_RUBRIC,
        tools: Sequence[Tool] | None = None,
        reasoning: bool = False,
        max_prompt_tokens: int = 100_000,
        seed: int = 0,
        debug: bool = False,
        **llm_options: Any,
    ) -> None:
        if isinstance(model, Llm) and llm_options:
            raise ConfigError(f"Ruler: {', '.join(llm_options)} belong to the Llm that was passed: Llm(model, ...)")
        own = ["model", "rubric", "tools", "reasoning", "max_prompt_tokens", "seed", "debug"]
        check_parameters("Ruler", llm_options, [*own, *LlmOptions.model_fields])
        if not isinstance(rubric, str) or not rubric.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"Ruler: rubric: a text is needed, got {rubric!r:.200}")
        if not isinstance(max_prompt_tokens, int) or max_prompt_tokens < 1000:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"Ruler: max_prompt_tokens: a whole number from 1000 on is needed, got {max_prompt_tokens!r}"
            )
        self.llm = model if isinstance(model, Llm) else Llm(model, **llm_options)
        self.rubric = rubric
        self._tools = tools
        self._reasoning = reasoning
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._debug = debug

    def __repr__(self) -> str:
        return f"Ruler({self.llm.options.model!r})"

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """A copy of the group with the judge's scores, 0 to 1, as rewards. Failed rollouts are not judged and stay
        unscored. A previous reward is moved to `metrics["independent_reward"]`.

        Raises LlmError if the judge does not return a valid score for every trajectory, RolloutError if no trajectory
        has a message, BudgetExceeded, ConfigError, MissingExtraError."""
        if group.pending:
            raise ConfigError("the group has rollouts that have not run: pass it to gather_trajectory_groups first")
        shown = [trajectory for trajectory in group if trajectory.exception is None]
        if not shown:
            return group
        judgement = await self.judge([(trajectory, *trajectory.additional_histories) for trajectory in shown])
        scores = iter(judgement.scores)
        logs = [*group.logs, f"RULER reasoning: {judgement.reasoning}"] if judgement.reasoning else [*group.logs]
        scored = [
            _scored(item, next(scores)) if item.exception is None else item.model_copy(update={"reward": None})
            for item in group
        ]
        update: dict[str, object] = {
            "trajectories": scored,
            "metrics": {**group.metrics, CUT: float(judgement.cut), **tie(scored)},
            "logs": logs,
        }
        return group.model_copy(update=update)

    async def judge(self, trajectories: Sequence[Sequence[History]]) -> Judgement:
        """Score trajectories, in order. Each trajectory is a list: its own conversation, then those of its sub-agents.
        Equal trajectories are judged once and get the same score. Raises the errors of `__call__`."""
        transcripts = [
            Transcript.of(histories, str(number), self._tools) for number, histories in enumerate(trajectories, 1)
        ]
        if all(transcript.empty for transcript in transcripts):
            raise RolloutError(
                "the judge has nothing to read: no trajectory shows a message. Append messages and choices to "
                "messages_and_choices, or make the calls inside a capture"
            )
        distinct: dict[str, Transcript] = {}
        for transcript in transcripts:
            known = distinct.setdefault(transcript.identity, transcript)
            distinct[transcript.identity] = min(known, transcript, key=lambda one: one.conversations)
        prompt = judge_prompt(
            list(distinct.values()),
            self.rubric,
            max_tokens=self._max_prompt_tokens,
            seed=self._seed,
            reasoning=self._reasoning,
        )
        schema = ReasonedVerdict if self._reasoning else Verdict
        answer = await self.llm.ask(prompt.messages, schema, purpose="judge", check=complete(prompt.ids))
        if self._debug:
            Terminal(stderr=True).print_json(data=answer.value.model_dump(), ensure_ascii=True)
        by_id = {score.id: score for score in answer.value.scores}
        by_identity = {name: by_id[own] for name, own in zip(distinct, prompt.ids, strict=True)}
        scores = [by_identity[transcript.identity] for transcript in transcripts]
        reasoning = answer.value.reasoning if isinstance(answer.value, ReasonedVerdict) else ""
        return Judgement(scores, reasoning, prompt.cut)


@dataclass(frozen=True)
class Judgement:
    """A judge's scores in the order of the trajectories, its reasoning ("" if not requested), and whether texts were
    shortened."""

    scores: Sequence[Score]
    reasoning: str
    cut: bool


async def ruler(
    message_lists: Sequence[Sequence[Any]],
    judge_model: str | Llm = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    tools: Sequence[Tool] | None = None,
    *,
    debug: bool = False,
    **options: Any,
) -> list[TrajectoryScore]:
    """Score lists of messages, in order. `tools`: the tools of all agents. `options`: those of `Ruler`. Raises as
    `Ruler`."""
    if not message_lists:
        return []
    judge = Ruler(judge_model, rubric=rubric, tools=tools, debug=debug, **{**(extra_litellm_params or {}), **options})
    judgement = await judge.judge([[History(messages_and_choices=list(messages))] for messages in message_lists])
    return [TrajectoryScore(str(i), score.explanation, score.score) for i, score in enumerate(judgement.scores, 1)]


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: str | Llm = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    **options: Any,
) -> TrajectoryGroup | None:
    """A copy of the group, scored by `Ruler`.

    `swallow_exceptions`: log a warning and return None if the judge cannot score this group. Errors that would affect
    every further group (no key, no litellm, budget spent) are always raised."""
    judge = Ruler(judge_model, rubric=rubric, debug=debug, **{**(extra_litellm_params or {}), **options})
    try:
        return await judge(group)
    except (LlmError, RolloutError) as error:
        if not swallow_exceptions or (isinstance(error, LlmError) and error.lasting):
            raise
        logger.warning("RULER scored no trajectory of a group of %d: %s", len(group), error)
        return None


def _scored(trajectory: Trajectory, score: Score) -> Trajectory:
    before = {} if trajectory.reward is None else {"independent_reward": trajectory.reward}
    update: dict[str, object] = {
        "reward": score.score,
        "metrics": {**trajectory.metrics, **before, "ruler_score": score.score},
        "logs": [*trajectory.logs, f"RULER explanation: {score.explanation}"],
    }
    return trajectory.model_copy(update=update)


def tie(trajectories: Iterable[Trajectory]) -> dict[str, Metric]:
    """The metric `judge/tie`: 1 if at least two trajectories are scored and all rewards are equal."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    return {TIE: float(len(rewards) > 1 and len(distinct(rewards)) == 1)}
