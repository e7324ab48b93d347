"""Every loss counts each group of a request in one class, leaves truncated rollouts out where it should, and is watched for
answers that are all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbook.base.config import LoraOptions, RewardLossName, TeacherKL, TrainConfig
from offbook.base.errors import TrainError
from offbook.base.types import Sampling
from offbook.engine import token_file
from offbook.engine.learner.metrics import selection_metrics
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.selection import Selector
from offbook.engine.learner.targets.advantage import GroupClass
from offbook.engine.protocol import JobTrajectory, TrainJob
from tests.engine.learner.jobs import command, sample
from tests.engine.learner.test_learner import Lab, scored


@pytest.fixture
def lab(toy: Path, tmp_path: Path) -> Lab:
    return Lab(toy, tmp_path)


@pytest.fixture(scope="module")
def shared(toy: Path) -> Policy:
    return Policy.load(toy, LoraOptions(), threads=1)


LOSSES: dict[str, dict[str, Any]] = {
    **{loss: {"loss": loss} for loss in get_args(RewardLossName)},
    "call_rewards": {"call_rewards": True},
    "imitation": {"loss": "cross_entropy", "min_reward": 1.0},
    "supervised": {"loss": "cross_entropy"},
    "teacher alone": {"distill": TeacherKL(teacher="base", alone=True)},
    "teacher beside": {"distill": TeacherKL(teacher="base")},
}
ROLLOUTS = st.builds(
    JobTrajectory,
    id=st.uuids().map(str),
    reward=st.sampled_from([None, 0.0, 0.5, 1.0]),
    samples=st.sampled_from(
        [
            (),
            (sample("call", [5], [10]),),
            (sample("cut", [5], [10], cut_off=True),),
            (sample("greedy", [5], [10], sampling=Sampling(temperature=0.0)),),
            (sample("excluded", [5], [10], weight=0.0),),
        ]
    ),
    failed=st.booleans(),
)


@pytest.mark.parametrize("loss", LOSSES)
@given(
    groups=st.lists(st.lists(ROLLOUTS, min_size=1, max_size=3), min_size=1, max_size=4),
    replayed=st.lists(ROLLOUTS, max_size=2),
    masked=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_group_is_in_exactly_one_class_for_every_loss(
    shared: Policy, loss: str, groups: list[list[JobTrajectory]], replayed: list[JobTrajectory], masked: bool
) -> None:
    config = TrainConfig(**LOSSES[loss], mask_truncated_completions=masked)
    again = [(replace(one, reward=1.0, failed=False, replayed=True),) for one in replayed if config.imitates_the_good]
    job = TrainJob("r", "m", (*map(tuple, groups), *again), config)
    try:
        selection = Selector(shared).select(job, 0, lambda _: None)
    except TrainError:
        return  # it has no metrics
    metrics = selection_metrics(selection, 0, shared)
    counted = [metrics[f"groups/{group_class}"] for group_class in GroupClass]
    assert sum(counted) == metrics["groups/total"] == len(groups)
    trained = selection.batch.trajectories if selection.batch is not None else ()
    assert metrics["groups/trained"] == sum(any(one.id in trained for one in group) for group in groups)
    if masked:
        assert not any(sample.cut_off for sample in (selection.batch.samples if selection.batch is not None else ()))
        assert metrics["trajectories/truncated"] == sum(
            bool(t.samples and t.samples[0].cut_off) for g in groups for t in g
        )


def test_truncated_rollouts_are_left_out_and_their_rewards_stay_in_the_mean(lab: Lab) -> None:
    group = scored([1.0, 0.0, 0.5])
    group[1] = replace(group[1], samples=(replace(group[1].samples[0], cut_off=True),))
    asked = command(lab.root, [group], 0, TrainConfig(mask_truncated_completions=True, scale_rewards=False))
    result = lab.learner.train(asked.model_copy(update={"keep_tokens": 1}))
    tokens = token_file.read(token_file.path_of(token_file.folder_of(asked.checkpoints), 1))
    assert tokens.coefficients.tolist() == pytest.approx([-0.5 / 6] * 3 + [0.0] * 3)  # divisors count what is trained
    metrics = result.metrics
    assert (metrics["trajectories/truncated"], metrics["trajectories/trained"], metrics["groups/trained"]) == (1, 2, 1)
    cut = [replace(one, samples=(replace(one.samples[0], cut_off=True),)) for one in group]
    result = lab.train([cut, scored([1.0, 1.0])], 1, TrainConfig(mask_truncated_completions=True))
    assert (result.applied, result.no_signal) == (False, "truncated")
    assert (result.metrics["groups/truncated"], result.metrics["groups/no_spread"]) == (1, 1)
    assert "in 1 of 2 groups ended at a limit of tokens, and mask_truncated_completions leaves them out" in result.why


def test_the_share_of_the_commonest_answer_is_of_texts_without_thoughts_and_blanks(lab: Lab) -> None:
    def saying(name: str, reward: float, *texts: str) -> JobTrajectory:
        calls = [sample(name, [5], lab.policy.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return JobTrajectory(name, reward, tuple(calls))

    one = [saying("a", 1.0, '{"label": "x"}'), saying("b", 0.0, '{ "label":\n"x"}')]
    other = [saying("c", 0.5, '<think>hm</think>\n{"label":"x"}'), saying("d", 0.0, '{"label": "y"}'), saying("e", 1.0)]
    metrics = lab.train([one, other], 0).metrics
    assert (metrics["answers/commonest"], metrics["answers/commonest_reward"]) == (0.75, 0.5)
    assert "answers/commonest" not in lab.train([one], 1).metrics  # of one prompt


def test_tool_calls_without_tags_are_counted(lab: Lab) -> None:
    def calling(name: str, reward: float, text: str) -> JobTrajectory:
        ids = lab.policy.tokenizer.encode(text, add_special_tokens=False)
        return JobTrajectory(name, reward, (replace(sample(name, [5], ids), tool_call=True),))

    call = '{"name": "find", "arguments": {}}'
    group = [calling("a", 1.0, call), calling("b", 0.0, f"<tool_call>{call}</tool_call>"), *scored([0.5, 0.0])]
    assert lab.train([group], 0).metrics["calls/untagged"] == 0.5
    assert "calls/untagged" not in lab.train([scored([1.0, 0.0])], 1).metrics
