"""Jobs without a gradient: no update, no checkpoint, and the kind is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offbook.base.config import TrainConfig
from offbook.base.types import Sampling
from offbook.engine.protocol import JobTrajectory
from tests.engine.learner.jobs import random_groups, sample
from tests.engine.learner.test_learner import BUSY, Lab, content

PROMPT = (5, 6, 7)


@pytest.fixture
def lab(toy: Path, tmp_path: Path) -> Lab:
    return Lab(toy, tmp_path)


def likeliest(lab: Lab, count: int) -> list[int]:
    """What a greedy sampler would say."""
    ids = [*PROMPT]
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(lab.policy.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def group(rewards: Sequence[float], *completions: Sequence[int], **changes: Any) -> list[JobTrajectory]:
    """One call for each reward, or as many as there are completions."""
    calls = [(sample(f"call-{i}", PROMPT, ids, **changes),) for i, ids in enumerate(completions)]
    return [JobTrajectory(f"traj-{i}", reward, calls[i] if i < len(calls) else ()) for i, reward in enumerate(rewards)]


def test_tokens_that_the_sampling_settings_leave_no_choice_of_are_no_signal(lab: Lab) -> None:
    only = likeliest(lab, 3)
    result = lab.train([group([1.0, 0.0], only, only[:2], sampling=Sampling(top_k=1))], 0)
    assert (result.applied, result.reason, result.step, result.checkpoint) == (False, "no_signal", 0, None)
    assert result.no_signal == "zero_gradient"
    assert "each of the 5 sampled tokens was the only one that the call's top-k" in result.why
    assert (result.metrics["loss/updates"], result.metrics["grad_norm"], result.metrics["tokens/trained"]) == (0, 0, 5)
    assert not (lab.root / "agent" / "checkpoints").exists()


def test_rollouts_that_sampled_the_same_and_earned_other_rewards_cancel_out(lab: Lab) -> None:
    result = lab.train([group([1.0, 0.0], [10, 11, 12], [10, 11, 12])], 0, TrainConfig())
    assert (result.applied, result.no_signal) == (False, "zero_gradient")
    assert "rollouts with different rewards sampled the same" in result.why


def test_where_only_the_mean_rollout_can_be_trained_the_advantage_is_zero(lab: Lab) -> None:
    middle = [
        replace(each, reward=reward) for each, reward in zip(group([0.5, 0, 1], [10, 11]), (0.5, 0, 1), strict=True)
    ]
    result = lab.train([middle], 0, TrainConfig())
    assert (result.applied, result.no_signal) == (False, "no_advantage")
    assert result.why == (
        "the advantage is 0 for all 2 tokens that could be trained; 2 rollouts with another reward have none"
    )
    assert any("traj-1" in warning for warning in result.warnings)


def test_equal_rewards_are_another_kind_and_count_the_groups_that_were_too_small(lab: Lab) -> None:
    result = lab.train([group([1.0, 1.0], [10], [11]), group([1.0], [12])], 0)
    assert (result.no_signal, result.why) == (
        "equal_rewards",
        "all rewards of each group are equal, and 1 more have too few scored rollouts",
    )


def test_of_two_updates_the_one_without_a_gradient_is_left_out(lab: Lab) -> None:
    alike = replace(group([0.0], likeliest(lab, 3), sampling=Sampling(top_k=1))[0], id="alike")
    result = lab.train([[*group([1.0], [10, 11, 12]), alike]], 0, TrainConfig(minibatches=2))
    assert (result.applied, result.step, result.metrics["loss/updates"]) == (True, 1, 1)
    assert result.no_signal is None and result.why == ""


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_job_without_a_gradient_leaves_no_trace_in_the_steps_after_it(
    toy: Path, tmp_path: Path, steps_before: int
) -> None:
    """Weights, momentum, generators and warm-up are those of a learner that never saw it; sent again, it is the same."""
    folders: list[Path] = []
    for name, silent in (("with", True), ("without", False)):
        own = Lab(toy, tmp_path / name)
        for step in range(steps_before):
            own.train(random_groups(step), step)
        if silent:
            nothing = [group([1.0, 0.0], [10, 11, 12], [10, 11, 12])]
            first, again = (own.train(nothing, steps_before, TrainConfig(), request_id="silent") for _ in range(2))
            assert (first.applied, first.no_signal, first.why) == (again.applied, again.no_signal, again.why)
            assert first.no_signal == "zero_gradient"
        folders.append(Path(own.train(random_groups(7), steps_before, BUSY, request_id="last").checkpoint or ""))
    assert content(folders[0]) == content(folders[1])


def test_a_model_that_only_rollouts_without_an_advantage_called_has_no_signal(lab: Lab) -> None:
    """Several models answer an agent: of the groups with other rewards, none called this one."""
    result = lab.train([group([1.0, 0.0]), group([1.0, 1.0], [10, 11], [12])], 0, TrainConfig())
    assert (result.applied, result.no_signal) == (False, "no_advantage")
    assert result.why == "none of the 2 rollouts with an advantage called this model"
