"""RULER against a scripted judge over HTTP, through litellm: what becomes of each answer."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.base.errors import (
    BudgetExceeded,
    ConfigError,
    LlmError,
    RolloutError,
)
from offbook.base.types import RolloutPlace
from offbook.testing import (
    LlmReply,
    LlmRequest,
    attempts_shown,
    cuts,
    fails,
    filters,
    hangs,
    refuses,
    says,
    scripted_llm,
)
from offbook.trainer.judging import judged
from tests.rewards.scripted_judge import (
    FAILED,
    by_last_number,
    entries,
    group_of,
    honest,
    judge_at,
    rewards,
    said,
    verdict,
)

Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


# ---- the group that comes back


async def test_scores_go_to_their_trajectories_however_judge_and_prompt_order_them() -> None:
    def shuffled(request: LlmRequest) -> LlmReply:
        scores = entries(request, by_last_number)
        random.Random(len(request.messages[1]["content"])).shuffle(scores)
        return verdict(scores)

    numbers = [70, 10, 95, 40, 0, 100]
    with scripted_llm(shuffled) as endpoint:
        for seed in range(4):
            assert rewards(await judge_at(endpoint, seed=seed)(group_of(*numbers))) == [n / 100 for n in numbers]
    orders = [
        [by_last_number(each) for each in attempts_shown(request.messages).values()] for request in endpoint.requests
    ]
    assert len({tuple(order) for order in orders}) == 4


async def test_the_group_is_a_copy_that_keeps_everything_and_the_old_reward_and_the_explanation() -> None:
    group = offbook.TrajectoryGroup(
        [said("I count 20", reward=3.0, metrics={"turns": 2}, metadata={"a": [1]}, logs=["begun"]), said("I count 80")],
        metadata={"scenario_id": "s"}, metrics={"own": 1}, logs=["gathered"], exceptions=[ValueError("away")],
        place=RolloutPlace(group="g"),
    )  # fmt: skip
    before = copy.deepcopy(group)
    with scripted_llm(honest) as endpoint:
        scored = await offbook.ruler_score_group(
            group, "openai/judge", {"api_base": endpoint.url, "api_key": "k", "cache": None}
        )
    assert scored is not None and group == before
    first, second = scored
    assert (first.reward, first.metrics) == (0.2, {"turns": 2, "independent_reward": 3.0, "ruler_score": 0.2})
    assert first.logs[0] == "begun" and first.logs[1].startswith("RULER explanation: for ")
    assert (first.metadata, first.id) == ({"a": [1]}, group.trajectories[0].id)
    assert second.metrics == {"ruler_score": 0.8}
    assert (scored.metadata, scored.place, scored.exceptions) == (group.metadata, group.place, group.exceptions)
    assert scored.metrics == {"own": 1, "judge/cut": 0.0, "judge/tie": 0.0} and scored.logs == ["gathered"]


async def test_a_failed_rollout_is_not_shown_and_stays_unscored() -> None:
    group = group_of(10, 90)
    group.trajectories.insert(1, said("I count 50", exception=FAILED, reward=0.3))
    with scripted_llm(honest) as endpoint:
        assert rewards(await judge_at(endpoint)(group)) == [0.1, None, 0.9]
        only_failed = offbook.TrajectoryGroup([said("I count 50", exception=FAILED)])
        assert rewards(await judge_at(endpoint)(only_failed)) == [None]
    assert len(endpoint.requests) == 1 and "I count 50" not in endpoint.requests[0].messages[1]["content"]


async def test_identical_trajectories_are_shown_once_and_score_alike() -> None:
    with scripted_llm(honest) as endpoint:
        scored = await judge_at(endpoint)(group_of(30, 70, 30, 30))
    assert rewards(scored) == [0.3, 0.7, 0.3, 0.3]
    [request] = endpoint.requests
    assert len(attempts_shown(request.messages)) == 2
    explanations = [trajectory.logs[-1] for trajectory in scored]
    assert explanations[0] == explanations[2] == explanations[3] != explanations[1]


async def test_a_tie_of_all_is_counted_as_no_signal() -> None:
    with scripted_llm(lambda request: verdict(entries(request, lambda each: 0.5))) as endpoint:
        scored = await judge_at(endpoint)(group_of(10, 20, 30))
        assert (await judge_at(endpoint)(group_of(10))).metrics["judge/tie"] == 0
    assert rewards(scored) == [0.5] * 3 and scored.metrics["judge/tie"] == 1


async def test_tools_and_sub_agents_are_shown() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    helper = offbook.History(messages_and_choices=[{"role": "user", "content": "a question for the helper"}])
    group = offbook.TrajectoryGroup(
        [said("I count 10", tools=tools, additional_histories=[helper]), said("I count 20", tools=tools)]
    )
    with scripted_llm(honest) as endpoint:
        assert rewards(await judge_at(endpoint)(group)) == [0.1, 0.2]
        await offbook.ruler(
            [group.trajectories[0].messages()], "openai/judge", {"api_base": endpoint.url, "api_key": "k", "cache": None}, tools=tools
        )  # fmt: skip
    first, second = (str(request.messages[1]["content"]) for request in endpoint.requests)
    assert first.count('"name": "look"') == second.count('"name": "look"') == 1
    assert "sub-agent 1 of attempt" in first and "a question for the helper" in first


async def test_reasoning_comes_before_the_scores_and_is_kept_with_the_group() -> None:
    def reasoned(request: LlmRequest) -> LlmReply:
        return verdict(entries(request, by_last_number), reasoning="the second counts better")

    with scripted_llm(reasoned) as endpoint:
        scored = await judge_at(endpoint, reasoning=True)(group_of(10, 20))
    assert scored.logs == ["RULER reasoning: the second counts better"]
    schema = endpoint.requests[0].body["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["reasoning", "scores"]


async def test_lists_of_messages_are_scored_in_their_order() -> None:
    lists = [trajectory.messages() for trajectory in group_of(60, 20, 60)]
    with scripted_llm(honest) as endpoint:
        options = {"api_base": endpoint.url, "api_key": "k", "cache": None}
        scores = await offbook.ruler(lists, "openai/judge", options, rubric="Large is good.")
    assert [(each.trajectory_id, each.score) for each in scores] == [("1", 0.6), ("2", 0.2), ("3", 0.6)]
    assert "Large is good." in endpoint.requests[0].messages[0]["content"]
    assert await offbook.ruler([]) == []


async def test_debug_prints_the_judgement(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_llm(honest) as endpoint:
        await judge_at(endpoint, debug=True)(group_of(10, 20))
    printed = json.loads(capsys.readouterr().err)
    assert sorted(each["score"] for each in printed["scores"]) == [0.1, 0.2]


# ---- answers that are not usable


def dropped_last(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return scores[:-1]


def with_another(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*scores, {"id": "zzzz", "explanation": "", "score": 0.5}]


def with_one_twice(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*scores, scores[0]]


def by_position(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**score, "id": str(number)} for number, score in enumerate(scores, 1)]


def scored_as(value: object) -> Change:
    return lambda scores: [{**scores[0], "score": value}, *scores[1:]]


FAULTS: list[tuple[Change, str]] = [
    (dropped_last, "no entry for"),
    (with_another, "there is no attempt 'zzzz'"),
    (with_one_twice, "2 entries for"),
    (by_position, "no entry for"),
    (scored_as(1.2), "is 1.2"),
    (scored_as(-0.1), "is -0.1"),
    (scored_as(float("nan")), ""),
    (scored_as(float("inf")), ""),
    (scored_as(None), ""),
    (lambda scores: [], "no entry for"),
]


@pytest.mark.parametrize(("change", "told"), FAULTS)
async def test_scores_that_do_not_fit_are_asked_for_again_with_the_reason(change: Change, told: str) -> None:
    def script(request: LlmRequest) -> LlmReply:
        scores = entries(request, by_last_number)
        return verdict(scores if len(request.messages) > 2 else change(scores))

    with scripted_llm(script) as endpoint:
        assert rewards(await judge_at(endpoint)(group_of(10, 90, 50))) == [0.1, 0.9, 0.5]
    assert len(endpoint.requests) == 2 and told in endpoint.requests[1].messages[-1]["content"]


@pytest.mark.parametrize(("change", "told"), FAULTS)
async def test_scores_that_never_fit_drop_the_whole_group(change: Change, told: str) -> None:
    with scripted_llm(lambda request: verdict(change(entries(request, by_last_number)))) as endpoint:
        [kept] = await judged([group_of(10, 90, 50)], judge_at(endpoint))
    assert len(endpoint.requests) == 2
    assert rewards(kept) == [None] * 3 and kept.metrics == {"judge/dropped": 1.0}
    assert kept.logs[0].startswith("the judge failed: LlmError: ") and told in kept.logs[0]


@pytest.mark.parametrize(
    ("reply", "requests", "kind"),
    [
        (says("I would rather rank them: the second, then the first."), 2, "invalid"),
        (says(""), None, "empty"),
        (refuses("I cannot judge this"), None, "refused"),
        (filters(), None, "filtered"),
        (cuts('{"scores": [{"id": "'), None, "cut"),
        (fails(400, "no such thing"), 1, "failed"),
        (fails(500), 3, "failed"),
    ],
)
async def test_no_answer_drops_the_whole_group_and_says_what_kind(
    reply: LlmReply, requests: int | None, kind: str
) -> None:
    with scripted_llm([reply]) as endpoint:
        with pytest.raises(LlmError) as raised:
            await judge_at(endpoint)(group_of(10, 90))
        asked = len(endpoint.requests)
        [kept] = await judged([group_of(10, 90)], judge_at(endpoint))
    assert raised.value.kind == kind and asked == (requests or asked)
    assert len(endpoint.requests) == 2 * asked, "what an Llm has repeated by itself is not asked again"
    assert rewards(kept) == [None, None] and kept.metrics["judge/dropped"] == 1


async def test_a_judge_that_hangs_is_given_up_and_one_that_is_busy_is_asked_later() -> None:
    with scripted_llm([hangs()]) as endpoint:
        with pytest.raises(LlmError) as raised:
            await judge_at(endpoint, timeout=0.3, retries=0)(group_of(10, 90))
        assert raised.value.kind == "timeout"
    replies = [fails(429, headers={"retry-after": "1"}), fails(503)]
    with scripted_llm(lambda request: replies.pop(0) if replies else honest(request)) as endpoint:
        assert rewards(await judge_at(endpoint)(group_of(10, 90))) == [0.1, 0.9]
    assert len(endpoint.requests) == 3


async def test_prose_around_the_answer_is_no_fault() -> None:
    def wordy(request: LlmRequest) -> LlmReply:
        scores = json.dumps({"scores": entries(request, by_last_number)})
        return says(f"Here is what I think:\n```json\n{scores}\n```\nThe first was poor.")

    with scripted_llm(wordy) as endpoint:
        assert rewards(await judge_at(endpoint)(group_of(10, 90))) == [0.1, 0.9]


async def test_a_key_that_is_refused_ends_the_run() -> None:
    with scripted_llm([fails(401, "wrong key")]) as endpoint, pytest.raises(LlmError) as raised:
        await judged([group_of(10, 90)], judge_at(endpoint))
    assert raised.value.lasting


async def test_an_exhausted_budget_ends_the_run() -> None:
    async def broke(group: offbook.TrajectoryGroup) -> offbook.TrajectoryGroup:
        raise BudgetExceeded("1 USD is spent", max_cost=1.0, spent=1.0)

    with pytest.raises(BudgetExceeded):
        await judged([group_of(10, 90)], broke)


async def test_swallowed_exceptions_leave_a_warning_but_not_those_that_every_group_would_meet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scripted_llm([fails(400, "no")]) as endpoint:
        options = {"api_base": endpoint.url, "api_key": "k", "cache": None}
        assert await offbook.ruler_score_group(group_of(1, 2), "openai/judge", options, swallow_exceptions=True) is None
        assert "RULER scored no trajectory of a group of 2" in caplog.text
        with pytest.raises(LlmError):
            await offbook.ruler_score_group(group_of(1, 2), "openai/judge", options)
    with scripted_llm([fails(401, "wrong key")]) as endpoint, pytest.raises(LlmError):
        options["api_base"] = endpoint.url
        await offbook.ruler_score_group(group_of(1, 2), "openai/judge", options, swallow_exceptions=True)


# ---- nothing is asked twice, and nothing is asked in vain


async def test_the_same_group_is_answered_from_the_cache_in_whatever_order_its_rollouts_ended(tmp_path: Path) -> None:
    with scripted_llm(honest) as endpoint:
        for numbers in ([10, 90, 50], [50, 10, 90], [90, 50, 10, 10]):
            scored = await judge_at(endpoint, cache=tmp_path / "answers.sqlite")(group_of(*numbers))
            assert rewards(scored) == [number / 100 for number in numbers]
    assert len(endpoint.requests) == 1


async def test_trajectories_without_a_message_are_an_error() -> None:
    with scripted_llm(honest) as endpoint, pytest.raises(RolloutError, match="no trajectory shows a message"):
        await judge_at(endpoint)(offbook.TrajectoryGroup([offbook.Trajectory(), offbook.Trajectory()]))
    assert endpoint.requests == []


async def test_rollouts_that_have_not_run_are_an_error() -> None:
    with pytest.raises(ConfigError, match="gather_trajectory_groups first"):
        await offbook.Ruler("openai/o3")(offbook.TrajectoryGroup([lambda: None]))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rubric": " "}, "rubric: a text"),
        ({"max_prompt_tokens": 10}, "from 1000 on"),
        ({"num_retries": 3}, "retries="),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        offbook.Ruler("openai/o3", **options)
