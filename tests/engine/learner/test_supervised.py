"""`loss="cross_entropy"`: which tokens are trained, with which weight, and what an evaluation leaves alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import ConfigError, TrainError
from offbook.base.types import RenderedHistory, Sampling
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.targets.advantage import supervised_advantages
from offbook.engine.learner.targets.batch import make_batch
from offbook.engine.protocol import JobTrajectory, Progressed, TrainJob, Warned, read_job, write_job
from offbook.engine.token_file import folder_of, path_of, read
from tests.engine.learner.jobs import command, sample
from tests.engine.learner.test_invariance import distance, gradients

SUPERVISED = TrainConfig(loss="cross_entropy", learning_rate=1e-2)
TALK = (
    {"role": "user", "content": "where is it"},
    {"role": "assistant", "content": "let me look"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "on its way"},
)


class Lab:
    """A learner on a fresh folder."""

    def __init__(self, base: Path, root: Path) -> None:
        self.root = root
        self.policy = Policy.load(base, LoraOptions(), threads=1)
        self.events: list[Progressed | Warned] = []
        self.learner = Learner(self.policy, "toy", self.events.append)

    def train(self, trajectories: Sequence[JobTrajectory], step: int = 0, **options: Any):
        config = SUPERVISED.model_copy(update=options)
        return self.learner.train(command(self.root, [(one,) for one in trajectories], step, config))

    def evaluate(self, trajectories: Sequence[JobTrajectory], step: int):
        asked = command(self.root, [(one,) for one in trajectories], step, SUPERVISED, request_id=f"evaluate-{step}")
        job = read_job(asked.job)
        write_job(asked.job.with_name("evaluated"), replace(job, evaluate=True))
        return self.learner.train(asked.model_copy(update={"job": asked.job.with_name("evaluated")}))

    def logprob(self, call: Any) -> float:
        ids = torch.tensor([[*call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
        with torch.no_grad():
            logits = self.policy.model(input_ids=ids).logits[0].log_softmax(-1)
        places = range(len(call.prompt_ids) - 1, ids.shape[1] - 1)
        return float(sum(logits[place, ids[0, place + 1]] for place in places))


@pytest.fixture
def lab(toy: Path, tmp_path: Path) -> Lab:
    return Lab(toy, tmp_path)


def told(*targets: int, name: str = "t", **fields: Any) -> JobTrajectory:
    return JobTrajectory(name, None, (), (RenderedHistory(messages=TALK, targets=targets, **fields),))


def test_unscored_calls_are_imitated_whatever_their_sampling_was(lab: Lab) -> None:
    """A greedy call, one under a grammar, and one of another step with recorded logprobs: all are trained, in one pass."""
    recorded = [-9.0, -9.0]
    calls = [
        sample("greedy", [5, 6], [10, 11], sampling=Sampling(temperature=0)),
        sample("grammar", [5, 7], [12, 13], constrained="a JSON schema"),
        sample("narrow", [5, 8], [14, 15], recorded, sampling=Sampling(temperature=0.3, top_k=1), step=-3),
    ]
    before = [lab.logprob(call) for call in calls]
    result = lab.train([JobTrajectory(call.call_id, None, (call,)) for call in calls])
    assert result.applied and result.warnings == ()
    assert all(lab.logprob(call) > old for call, old in zip(calls, before, strict=True))
    metrics = result.metrics
    assert metrics["tokens/trained"] == 6 and metrics["tokens/outside_kept"] == metrics["tokens/unmeasured"] == 0
    assert metrics["loss/cross_entropy"] == pytest.approx(-sum(before) / 6, rel=1e-5)
    assert metrics["loss/value"] == pytest.approx(metrics["loss/cross_entropy"])
    assert metrics["loss/perplexity"] == pytest.approx(math.exp(metrics["loss/cross_entropy"]))
    assert "kl/sampler_learner" not in metrics and "seconds/old_logprobs" not in metrics


def test_the_token_file_has_minus_weight_over_the_divisor(lab: Lab) -> None:
    one = JobTrajectory("a", 1.0, (sample("a", [5], [10, 11, 12]), sample("b", [5, 6], [13], weight=0.5)))
    failed = JobTrajectory("failed", 1.0, (sample("c", [9], [20]),), failed=True)
    asked = command(lab.root, [(one, failed)], 0, SUPERVISED).model_copy(update={"keep_tokens": 1})
    result = lab.learner.train(asked)
    tokens = read(path_of(folder_of(asked.checkpoints), 1))
    assert tokens.token_ids.tolist() == [10, 11, 12, 13]
    np.testing.assert_allclose(tokens.coefficients, [-0.25, -0.25, -0.25, -0.125])
    assert result.metrics["trajectories/trained"] == result.metrics["trajectories/failed"] == 1
    assert result.metrics["calls/weighted"] == 1


def test_targets_of_a_history_have_their_weights_and_no_warning(lab: Lab) -> None:
    result = lab.train([told(1, 3, weights=(0.5, 1.0))])
    assert (result.metrics["calls/trained"], result.metrics["calls/weighted"], result.warnings) == (2, 1, ())
    assert result.metrics["calls/rendered_share"] == 1


def test_the_last_turn_alone(lab: Lab) -> None:
    recorded = JobTrajectory("r", None, (sample("one", [5], [10, 11]), sample("two", [5, 10, 11, 6], [12])))
    result = lab.train([told(1, 3), recorded], turns="last", divisor="messages")
    assert result.metrics["calls/trained"] == 2
    both = lab.train([told(1, 3), recorded], 1)
    assert both.metrics["calls/trained"] == 4


def test_more_updates_score_each_token_once_before_its_first(lab: Lab) -> None:
    groups = [told(1, 3, name=f"t{i}") for i in range(3)]
    once = lab.evaluate(groups, 0)
    result = lab.train(groups, epochs=3)
    assert result.metrics["loss/updates"] == 3 and "seconds/old_logprobs" not in result.metrics
    assert result.metrics["loss/cross_entropy"] == pytest.approx(once.metrics["loss/cross_entropy"], rel=1e-5)
    assert result.metrics["loss/value"] < result.metrics["loss/cross_entropy"]


def test_an_evaluation_changes_nothing_and_the_step_after_it_is_the_same(toy: Path, tmp_path: Path) -> None:
    plain, measured = Lab(toy, tmp_path / "plain"), Lab(toy, tmp_path / "measured")
    for lab in (plain, measured):
        lab.train([told(1, 3)])
    found = measured.evaluate([told(1)], 1)
    assert (found.applied, found.reason, found.step, found.checkpoint) == (False, "evaluated", 1, None)
    assert found.metrics["loss/cross_entropy"] > 0 and "loss/value" not in found.metrics
    contents = []
    for lab in (plain, measured):
        lab.train([told(3)], 1)
        folder = lab.root / "agent" / "checkpoints" / "0002"
        contents.append((folder / "adapter_model.safetensors").read_bytes() + (folder / "rng.safetensors").read_bytes())
    assert contents[0] == contents[1]


def test_a_message_that_cannot_be_trained_is_named_by_its_source_or_skipped_and_counted(lab: Lab) -> None:
    long = RenderedHistory(
        messages=({"role": "user", "content": "word " * 600}, {"role": "assistant", "content": "yes"}),
        targets=(1,),
        source="data.jsonl, line 12",
    )
    bad = JobTrajectory("bad", None, (), (long,))
    with pytest.raises(ConfigError, match=r"data.jsonl, line 12: message 1 ends at token \d+ .* context has 512"):
        lab.train([told(1), bad])
    result = lab.train([told(1), bad], skip_bad=True)
    assert result.metrics["calls/skipped"] == result.metrics["calls/trained"] == 1
    [warning, other] = result.warnings
    assert warning.startswith("1 messages were skipped: data.jsonl, line 12: message 1")
    assert other.startswith("1 trajectories have nothing to train (bad)")
    with pytest.raises(
        TrainError, match=r"1 trajectories have been sent, and none of them .*1 messages that were skipped"
    ):
        lab.train([bad], 1, skip_bad=True)


def test_a_job_says_on_the_disk_whether_it_only_evaluates(tmp_path: Path) -> None:
    write_job(tmp_path / "job", TrainJob("r", "agent", ((told(1),),), SUPERVISED, evaluate=True))
    assert read_job(tmp_path / "job").evaluate


def test_loss_and_gradient_equal_trls_sft_trainer_and_prompts_are_computed_once(
    policies: Callable[[str, torch.dtype], Policy],
) -> None:
    """make_trl_sft.py wrote TRL's values: whole conversations in a row, with the assistant's tokens as labels."""
    known = json.loads(Path(__file__).with_name("trl_sft.json").read_text("utf-8"))
    assert known["trl"] == "1.4.0"
    groups = [[JobTrajectory(f"t{i}", None, tuple(turns(f"t{i}", **row)))] for i, row in enumerate(known["rows"])]
    batch = make_batch(groups, supervised_advantages([[False]] * len(groups)), supervised=True)
    assert len(batch) == sum(sum(row["assistant_masks"]) for row in known["rows"])
    expected = {name: torch.tensor(value, dtype=torch.float64) for name, value in known["gradient"].items()}
    for layout in ("call_rows", "leaf_rows", "tree"):
        config = TrainConfig(loss="cross_entropy", max_grad_norm=1e9, layout=layout)
        totals, [found] = gradients(policies("qwen2", torch.float64), batch, config)
        assert totals.losses == pytest.approx([known["loss"]], rel=1e-6)
        assert distance(found, expected) < 1e-6
    whole = sum(len(row["input_ids"]) for row in known["rows"])
    assert whole - len(groups) <= totals.plans[0].tokens <= whole  # of the tree; the last of a row predicts nothing


def turns(name: str, input_ids: list[int], assistant_masks: list[int]) -> list[Any]:
    """A sample for each run of 1 in the mask, with what is before it as its prompt."""
    found, start = [], None
    for place, bit in enumerate([*assistant_masks, 0]):
        if bit and start is None:
            start = place
        elif not bit and start is not None:
            found.append(sample(f"{name}/{start}", input_ids[:start], input_ids[start:place]))
            start = None
    return found


def test_the_cross_entropy_is_that_before_the_first_update_also_where_a_minibatch_has_no_gradient(lab: Lab) -> None:
    lost = JobTrajectory("b", None, (sample("b", [5, 6], [8], weight=1e-60),))
    jobs = [lost, JobTrajectory("a", None, (sample("a", [5, 6], [7]),))]
    before = lab.evaluate(jobs, 0).metrics["loss/cross_entropy"]
    result = lab.train(jobs, 0, epochs=2, minibatches=2, learning_rate=0.1)
    assert result.metrics["loss/updates"] == 2
    assert result.metrics["loss/cross_entropy"] == pytest.approx(before, rel=1e-6)


def test_a_group_that_failed_is_not_trained_and_the_steps_of_other_models_are_no_staleness(lab: Lab) -> None:
    other = JobTrajectory("a", None, (replace(sample("a", [5, 6], [7]), step=12),))
    failed = JobTrajectory("b", None, (sample("b", [5, 6], [8]),), failed=True)
    metrics = lab.train([other, failed]).metrics
    assert metrics["groups/trained"] == 1
    assert not [name for name in metrics if name.startswith("calls/stale")]


# ---- good rollouts


def rewarded(name: str, reward: float | None, token: int, **fields: Any) -> JobTrajectory:
    return JobTrajectory(name, reward, (sample(name, [5, 6], [token, token + 1]),), **fields)


def test_rollouts_below_min_reward_and_solved_groups_are_left_out_and_replayed_ones_are_not(lab: Lab) -> None:
    mixed = (rewarded("good", 1.0, 10), rewarded("bad", 0.9, 12), rewarded("unscored", None, 14))
    solved = (rewarded("easy", 1.0, 16), rewarded("easier", 2.0, 18))
    failed = (rewarded("broken", 1.0, 20, failed=True), rewarded("low", 0.0, 22))
    again = (rewarded("earlier", 1.0, 24, replayed=True),)
    config = SUPERVISED.model_copy(update={"min_reward": 1.0, "keep_tokens": None})
    asked = command(lab.root, [mixed, solved, failed, again], 0, config).model_copy(update={"keep_tokens": 1})
    result = lab.learner.train(asked)
    trained = {call.trajectory for call in read(path_of(folder_of(asked.checkpoints), 1)).head.calls}
    assert trained == {"good", "earlier"}
    wanted = {"trajectories/total": 7, "trajectories/trained": 1, "trajectories/replayed": 1, "groups/total": 3,
              "groups/trained": 1, "groups/all_good": 1, "groups/none_good": 1, "reward/max": 2.0, "calls/total": 7}  # fmt: skip
    assert {name: result.metrics[name] for name in wanted} == wanted


def test_a_long_good_rollout_weighs_as_much_as_a_short_one_unless_tokens_are_asked_for(lab: Lab) -> None:
    long = (JobTrajectory("long", 1.0, (sample("l", [5], [10, 11]), sample("m", [6], [12]))), rewarded("bad", 0.0, 30))
    short = (JobTrajectory("short", 1.0, (sample("s", [5], [13]),)), rewarded("worse", 0.0, 32))
    for step, (divisor, expected) in enumerate({None: [-1 / 6] * 3 + [-1 / 2], "tokens": [-1 / 4] * 4}.items()):
        config = SUPERVISED.model_copy(update={"min_reward": 1.0, "divisor": divisor})
        asked = command(lab.root, [long, short], step, config).model_copy(update={"keep_tokens": 2})
        lab.learner.train(asked)
        tokens = read(path_of(folder_of(asked.checkpoints), step + 1))
        np.testing.assert_allclose(tokens.coefficients, expected)


def test_earlier_rollouts_alone_make_no_step(lab: Lab) -> None:
    uncalled = (JobTrajectory("good", 1.0, ()), rewarded("bad", 0.0, 12))
    again = (rewarded("earlier", 1.0, 24, replayed=True),)
    config = SUPERVISED.model_copy(update={"min_reward": 1.0})
    result = lab.learner.train(command(lab.root, [uncalled, again], 0, config))
    assert (result.applied, result.no_signal) == (False, "no_advantage")
    assert result.why == "none of the 1 rollouts with an advantage called this model"


@pytest.mark.parametrize(
    ("rewards", "kind", "why"),
    [
        ((0.5, None), "none_good", "no rollout has a reward of at least 1, so there is none to imitate"),
        ((1.0, 1.5), "all_or_none_good", "in each group all rollouts have a reward of at least 1, or none has"),
    ],
)
def test_a_job_with_nothing_to_imitate_says_why(
    lab: Lab, rewards: tuple[float | None, ...], kind: str, why: str
) -> None:
    group = [rewarded(f"t-{number}", reward, 10) for number, reward in enumerate(rewards)]
    result = lab.learner.train(command(lab.root, [group], 0, SUPERVISED.model_copy(update={"min_reward": 1.0})))
    assert (result.applied, result.no_signal, result.why) == (False, kind, why)
