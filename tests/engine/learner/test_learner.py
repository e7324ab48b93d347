"""The learner in this process: a step is applied whole or not at all, and continues bit for bit."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import ConfigError, NotFiniteError, TrainError
from offbook.base.types import RenderedHistory, Sampling, TrainResult
from offbook.engine.learner.failures import Memory, describe_failure
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.targets.render import render_history
from offbook.engine.protocol import JobTrajectory, Progressed, TrainCommand, Warned
from tests.engine.learner.jobs import LORA, command, random_groups, sample

BUSY = TrainConfig(learning_rate=1e-2, loss="dapo", kl_coef=0.05, epochs=2, minibatches=2, warmup_updates=7)


class Lab:
    """A learner on a fresh folder, and everything that it said."""

    def __init__(self, base: Path, root: Path) -> None:
        self.root = root
        self.policy = Policy.load(base, LoraOptions(), threads=1)
        self.events: list[Progressed | Warned] = []
        self.learner = Learner(self.policy, "toy", self.events.append)

    def train(
        self, groups: Sequence[Sequence[JobTrajectory]], step: int, config: TrainConfig = BUSY, **names: str
    ) -> TrainResult:
        return self.learner.train(command(self.root, groups, step, config, **names))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.policy.trainable_parameters().items()}


@pytest.fixture
def lab(toy: Path, tmp_path: Path) -> Lab:
    return Lab(toy, tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    """The bits of a checkpoint: weights, optimizer, generators."""
    names = ("adapter_model.safetensors", "optimizer.safetensors", "optimizer.json", "rng.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def scored(rewards: Sequence[float | None], **changes: Any) -> list[JobTrajectory]:
    """A group with one call per rollout."""
    return [
        JobTrajectory(f"traj-{i}", reward, (sample(f"call-{i}", [5, 6, 7], [10 + i, 11, 12], **changes),))
        for i, reward in enumerate(rewards)
    ]


# ---- a step


def test_a_step_raises_the_probability_of_the_better_answer(lab: Lab) -> None:
    before = answers(lab, scored([1.0, 0.0]))
    result = lab.train([scored([1.0, 0.0])], 0)
    after = answers(lab, scored([1.0, 0.0]))
    assert (result.applied, result.step, result.reason) == (True, 1, "trained")
    assert after[0] > before[0]
    assert after[1] < before[1]


def answers(lab: Lab, group: Sequence[JobTrajectory]) -> list[float]:
    """The log-probability of each rollout's only answer, from the whole model."""
    found: list[float] = []
    for trajectory in group:
        call = trajectory.samples[0]
        ids = torch.tensor([[*call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
        with torch.no_grad():
            logprobs = lab.policy.model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
        found.append(float(logprobs.gather(1, ids[0, len(call.prompt_ids) :, None]).sum()))
    return found


def test_metrics_are_those_computed_by_hand(lab: Lab) -> None:
    [lengths] = [answers(lab, scored([0.0] * 4))]
    group = scored([1.0, 0.0, None, 3.0])
    per_token = -5.0  # recorded for every token; the learner's own are in `lengths`
    group = [
        replace(t, samples=(replace(t.samples[0], logprobs=np.full(3, per_token, np.float32), tool_call=i == 0),))
        for i, t in enumerate(group)
    ]
    group[2] = replace(group[2], failed=True)
    metrics = lab.train([group, scored([1.0, 1.0]), scored([1.0])], 0, TrainConfig()).metrics
    assert metrics["reward/mean"] == pytest.approx((1 + 0 + 3 + 1 + 1 + 1) / 6)
    expected = {
        "groups/total": 3, "groups/trained": 1, "groups/no_spread": 1, "groups/dropped_too_few": 1,
        "groups/no_spread_reward": 1.0,
        "trajectories/total": 7, "trajectories/trained": 3, "trajectories/failed": 1, "trajectories/unscored": 0,
        "calls/total": 7, "calls/trained": 3, "calls/greedy": 0, "tokens/trained": 9, "tokens/plain_rows": 18,
        "loss/updates": 1, "clip_fraction": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["calls/tool_call_rate"] == pytest.approx(1 / 7)
    assert metrics["tokens/computed"] <= 18
    assert metrics["kl/sampler_learner_max_diff"] > 0
    assert math.isfinite(sum(lengths))
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_equal_sampler_and_learner_show_no_kl_and_do_not_warn(lab: Lab) -> None:
    group = scored([1.0, 0.0, 0.5])
    for i, trajectory in enumerate(group):
        call = trajectory.samples[0]
        ids = torch.tensor([[*call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
        with torch.no_grad():
            logprobs = (lab.policy.model(input_ids=ids).logits[0, 2:-1] / 0.7).log_softmax(-1)
        own = logprobs.gather(1, ids[0, 3:, None])[:, 0].numpy()
        group[i] = replace(trajectory, samples=(replace(call, logprobs=own, sampling=Sampling(temperature=0.7)),))
    result = lab.train([group], 0)
    assert result.metrics["kl/sampler_learner_max_diff"] < 1e-4
    assert result.metrics["importance/mean"] == pytest.approx(1, abs=1e-4)
    assert result.warnings == ()


def test_a_sampler_far_from_the_learner_is_warned_about_and_constrained_calls_are_left_out(lab: Lab) -> None:
    far = scored([1.0, 0.0], logprobs=np.full(3, -0.01, np.float32))
    result = lab.train([far], 0)
    assert len(result.warnings) == 1
    assert "kl_warn=0.02" in result.warnings[0]
    constrained = scored([1.0, 0.0], logprobs=np.full(3, -0.01, np.float32), constrained="response_format")
    result = lab.train([constrained], 1, TrainConfig(kl_coef=0.1, epochs=2))
    assert len(result.warnings) == 1
    assert "100% of the trained tokens were sampled under response_format" in result.warnings[0]
    nothing_measured = {"kl/sampler_learner", "kl/sampler_learner_max_diff", "kl/base", "clip_fraction", "entropy"}
    assert not nothing_measured & result.metrics.keys()
    assert (result.metrics["calls/constrained_share"], result.metrics["tokens/unmeasured"]) == (1, 6)
    assert lab.train([constrained], 2).warnings == ()  # said once


def test_a_constrained_call_is_trained_without_ratio_and_kl_and_the_others_means_are_without_it(
    lab: Lab, toy: Path
) -> None:
    config = TrainConfig(kl_coef=0.1, epochs=2, learning_rate=1e-2)
    free = scored([1.0, 0.0])
    alone = lab.train([free], 0, config).metrics
    constrained = [
        replace(t, id=f"{t.id}-json", samples=(replace(t.samples[0], constrained="response_format"),)) for t in free
    ]
    both = Lab(toy, lab.root / "both").train([free, constrained], 0, config).metrics
    assert (both["tokens/trained"], both["tokens/unmeasured"], both["loss/updates"]) == (12, 6, 2)
    assert both["entropy"] == pytest.approx(alone["entropy"])
    assert both["kl/base"] == pytest.approx(alone["kl/base"], rel=0.5)  # of 6 tokens, not of 12


def test_the_reward_of_groups_without_spread_is_of_those_groups_alone(lab: Lab) -> None:
    metrics = lab.train([scored([1.0, 0.0, 0.5]), scored([0.7, 0.7])], 0, TrainConfig(min_group_size=3)).metrics
    assert (metrics["groups/dropped_too_few"], metrics["groups/no_spread"]) == (1, 0)
    assert "groups/no_spread_reward" not in metrics


def test_equal_parts_of_different_rewards_are_named_as_such(lab: Lab) -> None:
    three, one = scored([3.0, 1.0])
    group = [replace(three, call_rewards=(1.0, 1.0, 1.0)), replace(one, call_rewards=(1.0,))]
    result = lab.train([group], 0, TrainConfig(call_rewards=True))
    assert result.why == "all parts of the rewards of each group are equal"
    assert result.metrics["groups/no_spread_reward"] == 2.0


def test_greedy_cancelled_and_unanswered_calls_are_context_only_and_counted(lab: Lab) -> None:
    group = scored([1.0, 0.0])
    greedy = sample("greedy", [5, 6], [9], sampling=Sampling(temperature=0.0))
    group[0] = replace(group[0], samples=(*group[0].samples, greedy), left_out=2)
    metrics = lab.train([group], 0).metrics
    assert [metrics[f"calls/{name}"] for name in ("trained", "greedy", "not_trained")] == [2, 1, 2]
    assert metrics["tokens/trained"] == 6


def test_a_token_outside_the_learners_kept_set_is_no_target_and_counted(lab: Lab) -> None:
    metrics = lab.train([[*scored([1.0, 0.0]), *scored([0.5], sampling=Sampling(top_k=1))]], 0).metrics
    assert metrics["tokens/trained"] + metrics["tokens/outside_kept"] == 9
    assert metrics["tokens/outside_kept"] > 0


def test_warm_up_counts_updates_over_the_models_life(lab: Lab) -> None:
    rates = [lab.train(random_groups(step), step).metrics["loss/learning_rate"] for step in range(2)]
    assert rates == pytest.approx([1e-2 * 4 / 7, 1e-2])  # four updates a step, seven of warm-up


# ---- what is refused


def test_equal_rewards_everywhere_are_no_signal_and_no_checkpoint(lab: Lab) -> None:
    before = lab.policy.adapter_weights()
    result = lab.train([scored([1.0, 1.0]), scored([0.0, 0.0, None])], 0)
    assert (result.applied, result.reason, result.step, result.checkpoint) == (False, "no_signal", 0, None)
    assert result.metrics["groups/no_spread"] == 2
    assert not (lab.root / "agent" / "checkpoints").exists()
    assert lab.policy.adapter_weights().keys() == before.keys()


def test_no_scored_group_is_an_error_that_names_the_causes(lab: Lab) -> None:
    failed = [replace(t, failed=True) for t in scored([1.0, 1.0])]
    with pytest.raises(TrainError, match=r"of 5 rollouts 2 failed and 2 have no reward") as error:
        lab.train([failed, scored([None, None]), scored([1.0])], 0)
    assert error.value.reason == "no_scored_groups"
    assert "group sizes: 1, 2" in str(error.value)


def test_a_group_of_one_alone_is_refused_and_beside_others_dropped(lab: Lab) -> None:
    with pytest.raises(TrainError, match="min_group_size=2"):
        lab.train([scored([1.0])], 0)
    result = lab.train([scored([1.0]), scored([1.0, 0.0])], 0)
    assert result.metrics["groups/dropped_too_few"] == 1
    assert result.warnings[0].startswith("1 of 2 groups have fewer than min_group_size=2 rollouts and train nothing")


def test_trajectories_without_calls_are_an_error_alone_and_a_warning_beside_others(lab: Lab) -> None:
    empty = [JobTrajectory("mute-1", 1.0, ()), JobTrajectory("mute-2", 0.0, ())]
    with pytest.raises(TrainError, match="2 trajectories have an advantage, and none of them a sampled token") as error:
        lab.train([empty], 0)
    assert error.value.reason == "bad_job"
    result = lab.train([[*scored([1.0, 0.0]), empty[0]]], 0)
    assert result.metrics["trajectories/without_targets"] == 1
    assert any("mute-1" in warning for warning in result.warnings)


def test_calls_at_temperature_zero_alone_are_an_error_that_says_so(lab: Lab) -> None:
    with pytest.raises(TrainError, match="2 calls at temperature 0"):
        lab.train([scored([1.0, 0.0], sampling=Sampling(temperature=0.0))], 0)


def test_a_reward_that_is_nan_and_ids_of_another_tokenizer_are_refused(lab: Lab) -> None:
    with pytest.raises(TrainError, match="must be finite"):
        lab.train([scored([1.0, math.nan])], 0)
    with pytest.raises(TrainError, match=r"token id 5000 is outside .* vocabulary of 1536"):
        lab.train([[*scored([1.0]), JobTrajectory("b", 0.0, (sample("c", [5000], [1]),))]], 0)


def test_another_step_than_the_one_on_disk_and_a_missing_job_are_refused(lab: Lab) -> None:
    with pytest.raises(TrainError, match=r"is at step 0 .* expects step 4"):
        lab.train(random_groups(0), 4)
    asked = command(lab.root, random_groups(0), 0)
    with pytest.raises(TrainError, match="cannot be read"):
        lab.learner.train(asked.model_copy(update={"job": lab.root / "nowhere"}))


# ---- once, whole, and the same again


def test_the_same_request_is_applied_once_and_gets_the_stored_result(lab: Lab) -> None:
    first = lab.train(random_groups(0), 0, request_id="same")
    bits = content(Path(first.checkpoint or ""))
    again = lab.train(random_groups(0), 0, request_id="same")
    lab.train(random_groups(1), 1, request_id="other")
    later = lab.train(random_groups(0), 2, request_id="same")
    assert again == later == first
    assert content(Path(first.checkpoint or "")) == bits
    assert sorted(p.name for p in (lab.root / "agent" / "checkpoints").iterdir()) == ["0001", "0002"]


def test_four_steps_equal_two_and_two_in_a_new_learner_bit_for_bit(toy: Path, tmp_path: Path) -> None:
    whole = Lab(toy, tmp_path / "whole")
    for step in range(4):
        whole.train(random_groups(step), step)
    for half in (0, 2):
        fresh = Lab(toy, tmp_path / "halves")
        for step in range(half, half + 2):
            fresh.train(random_groups(step), step)
    for step in range(1, 5):
        name = f"agent/checkpoints/{step:04d}"
        assert content(tmp_path / "whole" / name) == content(tmp_path / "halves" / name)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_two_models_taking_turns_equal_each_alone_bit_for_bit(toy: Path, tmp_path: Path) -> None:
    together = Lab(toy, tmp_path / "together")
    for step in range(2):
        together.train(random_groups(step), step, model="one", request_id=f"one-{step}")
        together.train(random_groups(step + 5), step, model="two", request_id=f"two-{step}")
    for model, first in (("one", 0), ("two", 5)):
        alone = Lab(toy, tmp_path / "alone")
        for step in range(2):
            alone.train(random_groups(step + first), step, model=model, request_id=f"{model}-{step}")
        name = f"{model}/checkpoints/0002"
        assert content(tmp_path / "together" / name) == content(tmp_path / "alone" / name)


def test_a_model_with_another_lora_shape_beside_it_does_not_disturb(toy: Path, tmp_path: Path) -> None:
    lab = Lab(toy, tmp_path)
    lab.train(random_groups(0), 0, model="small")
    wide = command(tmp_path, random_groups(0), 0, BUSY, model="wide", request_id="wide")
    lab.learner.train(wide.model_copy(update={"lora": LoraOptions(r=4)}))
    assert lab.train(random_groups(1), 1, model="small").step == 2
    shapes = {p.shape[0] for p in load_file(tmp_path / "wide/checkpoints/0001/adapter_model.safetensors").values()}
    assert 4 in shapes
    with pytest.raises(ConfigError, match="r is 2"):
        lab.learner.train(
            command(tmp_path, random_groups(2), 2, model="small").model_copy(update={"lora": LoraOptions(r=4)})
        )


def test_a_model_whose_adapter_is_refused_does_not_disturb_the_others(toy: Path, tmp_path: Path) -> None:
    lab = Lab(toy, tmp_path)
    lab.train(random_groups(0), 0, model="good")
    bad = command(tmp_path, random_groups(0), 0, BUSY, model="bad", request_id="bad")
    with pytest.raises(ConfigError, match="target_modules"):
        lab.learner.train(bad.model_copy(update={"lora": LoraOptions(target_modules=("no_such",))}))
    assert lab.train(random_groups(1), 1, model="good").step == 2
    alone = Lab(toy, tmp_path / "alone")
    for step in range(2):
        alone.train(random_groups(step), step, model="good")
    name = "good/checkpoints/0002"
    assert content(tmp_path / name) == content(tmp_path / "alone" / name)


def test_weights_that_an_update_made_nan_are_never_saved(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.train(random_groups(0), 0)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: self.param_groups[0]["params"][0].data.fill_(math.nan))
    with pytest.raises(NotFiniteError, match="sum of the adapter's weights of update 1 is nan"):
        lab.train(random_groups(1), 1)
    monkeypatch.undo()
    assert lab.train(random_groups(1), 1).step == 2


def test_a_minibatch_whose_tokens_are_all_outside_the_kept_set_is_no_update(lab: Lab) -> None:
    outside = replace(scored([0.0], sampling=Sampling(top_k=1))[0], id="traj-1")
    metrics = lab.train([[*scored([1.0]), outside]], 0, TrainConfig(minibatches=2)).metrics
    assert (metrics["tokens/outside_kept"], metrics["loss/updates"]) == (3, 1)


def test_a_checkpoint_of_options_that_this_version_does_not_know_can_be_read(lab: Lab) -> None:
    folder = Path(lab.train(random_groups(0), 0).checkpoint or "")
    note = json.loads((folder / "offbook.json").read_text())
    note["config"]["an_option_of_tomorrow"] = 1
    (folder / "offbook.json").write_text(json.dumps(note))
    assert lab.train(random_groups(1), 1).step == 2


def failing(lab: Lab, stage: str, error: Exception) -> TrainCommand:
    """The next command, with an emit that raises at the first progress of a phase."""
    done = len(list((lab.root / "agent" / "checkpoints").glob("[0-9]*")))

    def emit(event: Progressed | Warned) -> None:
        if isinstance(event, Progressed) and event.phase == stage and event.done == event.total:
            raise error

    lab.learner._emit = emit  # where a failure at an exact stage comes in
    return command(lab.root, random_groups(done), done, BUSY)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("stage", ["plan", "old_logprobs", "update"])
def test_a_failure_before_the_rename_leaves_everything_as_it_was(
    toy: Path, tmp_path: Path, stage: str, first: int
) -> None:
    lab, undisturbed = Lab(toy, tmp_path / "lab"), Lab(toy, tmp_path / "undisturbed")
    for step in range(first):
        lab.train(random_groups(step), step)
        undisturbed.train(random_groups(step), step)
    asked = failing(lab, stage, MemoryError("no more"))
    with pytest.raises(MemoryError):
        lab.learner.train(asked)
    assert len(list(asked.checkpoints.glob("*"))) == first
    lab.learner._emit = lab.events.append  # as it was
    for step in range(first, 2):
        lab.train(random_groups(step), step)
        undisturbed.train(random_groups(step), step)
    name = "agent/checkpoints/0002"
    assert content(lab.root / name) == content(undisturbed.root / name)


def test_a_failure_after_the_rename_is_a_step_applied(lab: Lab) -> None:
    result = lab.learner.train(failing(lab, "save", OSError(errno.EIO, "too late")))
    assert (result.applied, result.step) == (True, 1)
    lab.learner._emit = lab.events.append  # as it was
    assert lab.train(random_groups(1), 1).step == 2


def test_a_gradient_that_is_nan_is_not_applied_and_the_weights_come_back(lab: Lab) -> None:
    lab.train(random_groups(0), 0)
    good = lab.weights()
    base_weight = next(p for p in lab.policy.model.parameters() if not p.requires_grad and p.ndim == 2)
    kept = base_weight.data.clone()
    base_weight.data.fill_(math.nan)
    with pytest.raises(NotFiniteError, match="is nan, so the step was not applied") as error:
        lab.train(random_groups(1), 1)
    assert describe_failure(error.value, lab.root)[0] == "nan_gradient"
    base_weight.data.copy_(kept)
    assert {name: torch.equal(value, good[name]) for name, value in lab.weights().items()} == dict.fromkeys(good, True)
    assert lab.train(random_groups(1), 1).step == 2


def test_a_nan_in_a_later_update_takes_the_first_one_back(lab: Lab) -> None:
    lab.train(random_groups(0), 0)
    good = lab.weights()
    updates = 0

    def poison(event: Progressed | Warned) -> None:
        nonlocal updates
        if isinstance(event, Progressed) and event.phase == "update" and event.done == event.total - 1:
            updates += 1
            next(iter(lab.policy.trainable_parameters().values())).data.fill_(math.nan)

    lab.learner._emit = poison  # where the weights are poisoned between two updates
    with pytest.raises(NotFiniteError):
        lab.train(random_groups(1), 1)
    assert updates == 1
    assert all(torch.equal(value, good[name]) for name, value in lab.weights().items())


# ---- histories without calls


def test_a_history_is_rendered_with_the_template_up_to_the_end_of_the_turn(lab: Lab) -> None:
    def told(answer: str) -> RenderedHistory:
        call = {"type": "function", "function": {"name": "find_order", "arguments": '{"id": 7}'}}
        messages = (
            {"role": "user", "content": "where is it"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "on its way"},
            {"role": "assistant", "content": answer},
        )
        return RenderedHistory(messages=messages, targets=(1, 3))

    group = [JobTrajectory(f"t{i}", float(i), (), (told(answer),)) for i, answer in enumerate(["yes", "on its way"])]
    result = lab.train([group], 0)
    assert result.metrics["calls/trained"] == 4
    assert result.metrics["calls/rendered_share"] == 1
    assert "kl/sampler_learner" not in result.metrics and result.metrics["tokens/unmeasured"] == 0


def test_a_rendered_answer_ends_where_the_sampler_would_stop(lab: Lab) -> None:
    template, tokenizer = lab.policy.chat_template, lab.policy.tokenizer
    history = RenderedHistory(
        messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes and no"}), targets=(1,)
    )
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    [whole] = render_history(template, frozenset({end}), history, "t", 0)
    assert whole.completion_ids[-1] == end
    inside = int(whole.completion_ids[1])
    with pytest.raises(
        ConfigError, match="message 1 cannot be trained: the chat template ends the turn before 'and no'"
    ):
        render_history(template, frozenset({end, inside}), history, "t", 0)


def test_a_history_whose_target_is_no_answer_is_refused(lab: Lab) -> None:
    bad = RenderedHistory(messages=({"role": "user", "content": "hi"},), targets=(0,))
    with pytest.raises(ConfigError, match="target 0 is not an assistant message"):
        lab.train([[JobTrajectory("a", 1.0, (), (bad,)), JobTrajectory("b", 0.0, ())]], 0)


# ---- what a failure is called


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory", "lower row_tokens"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory", "logits_chunk"),
        (OSError(errno.ENOSPC, "No space left on device", "/ckpt/x"), "disk_full", "/ckpt/x"),
        (OSError(errno.EIO, "broken"), "failed", "broken"),
        (ConfigError("lora.r"), "bad_job", "lora.r"),
        (RuntimeError("something else"), "failed", "something else"),
    ],
)
def test_failures_carry_a_reason_and_what_to_do(error: Exception, reason: str, words: str) -> None:
    found, message = describe_failure(error, Path("/place"))
    assert found == reason
    assert words in message


@pytest.mark.parametrize(
    ("memory", "words", "never"),
    [
        (Memory("cpu"), ("row_tokens", "logits_chunk", "split"), ("load_in_4bit", "gpu-memory-utilization")),
        (
            Memory("cuda"),
            ("row_tokens", "logits_chunk", "load_in_4bit", "gpu-memory-utilization"),
            ("while it loaded",),
        ),
        (Memory("cuda:1", four_bit=True), ("row_tokens", "gpu-memory-utilization"), ("load_in_4bit",)),
        (
            Memory("cuda", loading=True),
            ("while it loaded", "load_in_4bit", "gpu-memory"),
            ("row_tokens", "not applied"),
        ),
        (Memory("cpu", loading=True), ("while it loaded", "bfloat16"), ("row_tokens", "load_in_4bit")),
    ],
)
def test_out_of_memory_names_the_settings_that_can_help_here(
    memory: Memory, words: tuple[str, ...], never: tuple[str, ...]
) -> None:
    reason, message = describe_failure(torch.OutOfMemoryError("CUDA out of memory"), Path("/place"), memory)
    assert reason == "out_of_memory"
    assert all(word in message for word in words)
    assert not any(word in message for word in never)


def test_a_lora_with_the_jobs_shape_is_used(lab: Lab) -> None:
    lab.train(random_groups(0), 0)
    assert lab.policy.lora == LORA
