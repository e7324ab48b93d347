"""Weights of calls: a weight scales the policy gradient of its call and of no other; 0 takes the call out of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbook.base.config import LoraOptions, LossName, TrainConfig
from offbook.base.errors import NotFiniteError, TrainError
from offbook.base.types import Sampling, TrainResult
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.targets.batch import TrainBatch
from offbook.engine.learner.update.loss import LOSSES as FUNCTIONS
from offbook.engine.learner.update.loss import Clip, Targets
from offbook.engine.protocol import JobTrajectory, read_job
from tests.engine.learner.jobs import command, random_groups, sample
from tests.engine.learner.test_invariance import CLIPPING as LOSSES
from tests.engine.learner.test_invariance import VOCABULARY, batch_of, distance, gradients

Policies = Callable[[str, torch.dtype], Policy]
Groups = Sequence[Sequence[JobTrajectory]]


def pair(**weights: float) -> Groups:
    """Rewards 1 and 0, so advantages of 1 and -1 (but for a millionth); the first has calls a, b and c of 1, 2 and 3
    tokens, the second d of 2."""
    calls = {"a": [10], "b": [11, 12], "c": [13, 14, 15], "d": [16, 17]}
    made = {name: sample(name, [5, 6], ids, weight=weights.get(name, 1.0)) for name, ids in calls.items()}
    return [
        [
            JobTrajectory("first", 1.0, (made["a"], made["b"], made["c"])),
            JobTrajectory("second", 0.0, (made["d"],)),
        ]
    ]


def weighted(groups: Groups, weight: Callable[[int], float]) -> Groups:
    """The n-th call of the step, over all groups, with the weight `weight(n)`."""
    numbers = iter(range(10_000))
    return [
        [replace(t, samples=tuple(replace(s, weight=weight(next(numbers))) for s in t.samples)) for t in group]
        for group in groups
    ]


def without_excluded(groups: Groups) -> Groups:
    """The same groups as if the calls of weight 0 had never been made."""
    return [[replace(t, samples=tuple(s for s in t.samples if s.weight)) for t in group] for group in groups]


# ---- the batch


def test_the_advantage_of_a_call_is_the_trajectorys_times_its_weight() -> None:
    batch = batch_of(pair(a=0.0, b=0.5, c=2.0))
    unit = 1 / (1 + 2e-6)  # deviation 0.5 from the mean, over a standard deviation of 0.5 + 1e-6
    expected = [0.5] * 2 + [2.0] * 3 + [-1.0] * 2
    assert batch.advantages.tolist() == pytest.approx([value * unit for value in expected], rel=1e-12)
    assert [call.call_id for call in batch.samples] == ["b", "c", "d"]
    assert batch.trajectory.tolist() == [0] * 5 + [1] * 2


def test_a_call_of_weight_zero_is_counted_apart_whatever_its_temperature() -> None:
    groups = pair(a=0.0, d=0.0)
    greedy = sample("greedy", [5], [9], sampling=Sampling(temperature=0.0))
    first = replace(groups[0][0], samples=(*groups[0][0].samples, greedy, replace(greedy, weight=0.0)), left_out=2)
    batch = batch_of([[first, groups[0][1]]])
    assert batch.left_out == {"excluded": 3, "greedy": 1, "not_trained": 2}
    assert (batch.trajectories, batch.without_targets) == (("first",), ("second",))


# ---- gradients


def gradient(policy: Policy, groups: Groups, config: TrainConfig) -> dict[str, Tensor]:
    [found] = gradients(policy, batch_of(groups), config)[1]
    return found


def by_autograd(policy: Policy, batch: TrainBatch, weights: Sequence[float], divisors: Tensor) -> dict[str, Tensor]:
    """-sum of weight x advantage x logprob / divisor: the gradient of every loss at a ratio of 1, one plain forward pass
    per call. `batch` has no weights; `weights` has one for each of its calls."""
    total = torch.zeros((), dtype=torch.float64)
    for row, weight in zip(batch.samples, weights, strict=True):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        logits = policy.model(input_ids=ids[None]).logits[0, len(row.prompt_ids) - 1 : -1] / row.sampling.temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[len(row.prompt_ids) :, None])[:, 0]
        here = slice(row.offset, row.offset + len(row.completion_ids))
        total = total - (weight * torch.from_numpy(batch.advantages)[here] * logprobs / divisors[here]).sum()
    parameters = policy.trainable_parameters()
    return dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))


def divisors_of(loss: LossName, trajectory: Tensor) -> Tensor:
    lengths = torch.bincount(trajectory)
    return {
        "dapo": torch.full_like(trajectory, len(trajectory)),
        "cispo": torch.full_like(trajectory, len(trajectory)),
        "dr_grpo": torch.full_like(trajectory, 2048 * len(lengths)),
    }.get(loss, lengths[trajectory] * len(lengths))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_scales_the_gradient_of_its_own_call_and_no_other(policies: Policies, loss: LossName) -> None:
    policy = policies("qwen2", torch.float64)
    groups = random_groups(5, turns=3, vocabulary=VOCABULARY)
    plain = batch_of(groups)
    weights = [(0.5, 2.0, 1.0, 0.25)[n % 4] for n in range(len(plain.samples))]
    assert len({int(plain.trajectory[row.offset]) for row in plain.samples}) < len(
        plain.samples
    )  # calls share trajectories
    config = TrainConfig(loss=loss, max_grad_norm=1e9, importance_cap=None)
    found = gradient(policy, weighted(groups, weights.__getitem__), config)
    divisors = divisors_of(loss, torch.from_numpy(plain.trajectory))
    assert distance(found, by_autograd(policy, plain, weights, divisors)) < 1e-9
    assert distance(found, gradient(policy, groups, config)) > 0.01  # the weights do something


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_with_an_excluded_call_is_the_step_without_it(policies: Policies, loss: LossName) -> None:
    policy = policies("qwen2", torch.float64)
    groups = weighted(random_groups(7, turns=3, vocabulary=VOCABULARY), lambda n: float(n % 3 > 0))
    config = TrainConfig(loss=loss, max_grad_norm=1e9, kl_coef=0.1, epochs=2)
    first, found = gradients(policy, batch_of(groups), config, 0.02)
    second, expected = gradients(policy, batch_of(without_excluded(groups)), config, 0.02)
    assert first.losses == second.losses
    assert [distance(a, b) for a, b in zip(found, expected, strict=True)] == [0.0, 0.0]
    assert len(first.old.kept) < sum(len(s.completion_ids) for group in groups for t in group for s in t.samples)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_kl_term_has_no_weight(policies: Policies, loss: LossName) -> None:
    """What kl_coef adds to the gradient is the same with weights and without."""
    policy = policies("qwen2", torch.float64)
    groups = random_groups(5, turns=3, vocabulary=VOCABULARY)
    added: list[dict[str, Tensor]] = []
    for given in (groups, weighted(groups, lambda n: 0.5 + n % 3)):
        with_kl, bare = (
            gradient(policy, given, TrainConfig(loss=loss, max_grad_norm=1e9, kl_coef=kl)) for kl in (0.5, 0.0)
        )
        added.append({name: with_kl[name] - bare[name] for name in bare})
    assert distance(added[1], added[0]) < 1e-9


@pytest.mark.parametrize("current", [0.002, 0.3])
def test_gspo_with_weighted_calls_is_gspo_token(current: float) -> None:
    """2507.18071, section GSPO-token: the sequence's ratio, detached, times pi / sg(pi), with an advantage for each token.
    Calls of 2 and 3 tokens, weights 0.5 and 2; inside the clip range, then beyond it."""
    sequence = torch.tensor([0] * 5 + [1] * 3)
    advantages = torch.tensor([0.5 * 1.5] * 2 + [2 * 1.5] * 3 + [-1.0] * 3, dtype=torch.float64)
    divisors = torch.tensor([5.0] * 5 + [3.0] * 3, dtype=torch.float64) * 2
    old = torch.linspace(-3, -1, 8, dtype=torch.float64)
    now = (old + current * torch.linspace(2, -1, 8, dtype=torch.float64)).requires_grad_()
    means = [(now - old)[sequence == s].mean() for s in (0, 1)]
    ratio = torch.stack(means).exp().detach()[sequence] * (now - now.detach()).exp()
    clip = Clip(0.01, 0.02)
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    loss = -(surrogate / divisors).sum()
    loss.backward()
    ones = torch.ones_like(old)
    found = FUNCTIONS["gspo"](now.detach(), Targets(old, advantages, 1 / divisors, ones, sequence), clip)
    torch.testing.assert_close(found.value, loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.coefficients, now.grad, rtol=1e-12, atol=1e-15)
    assert bool(found.clipped.any()) == (current > 0.1)


# ---- the job and the step


class Lab:
    """A learner on a fresh folder."""

    def __init__(self, base: Path, root: Path) -> None:
        self.root = root
        self.learner = Learner(Policy.load(base, LoraOptions(), threads=1), "toy", lambda event: None)

    def train(self, groups: Groups, config: TrainConfig | None = None) -> TrainResult:
        return self.learner.train(command(self.root, groups, 0, config))


@pytest.fixture
def lab(toy: Path, tmp_path: Path) -> Lab:
    return Lab(toy, tmp_path)


def test_weights_and_marks_travel_in_the_job(tmp_path: Path) -> None:
    groups = pair(a=0.0, b=0.3)
    first = groups[0][0]
    marked = replace(first, samples=(first.samples[0], replace(first.samples[1], unused=True), first.samples[2]))
    job = read_job(command(tmp_path, [[marked, groups[0][1]]], 0).job)
    assert [(s.call_id, s.weight, s.unused) for t in job.groups[0] for s in t.samples] == [
        ("a", 0.0, False), ("b", 0.3, True), ("c", 1.0, False), ("d", 1.0, False),
    ]  # fmt: skip


def test_excluded_weighted_and_unused_calls_are_metrics(lab: Lab) -> None:
    [[first, second]] = pair(a=0.0, b=0.5, d=3.0)
    first = replace(first, samples=tuple(replace(s, unused=s.call_id in ("a", "c")) for s in first.samples))
    even = [replace(t, id=f"{t.id}-even", reward=1.0) for t in (first, second)]  # no spread: its calls do not count
    metrics = lab.train([[first, second], even]).metrics
    names = ("total", "trained", "excluded", "weighted", "unused", "greedy", "not_trained")
    assert [metrics[f"calls/{name}"] for name in names] == [8, 3, 1, 2, 2, 0, 0]
    assert metrics["tokens/trained"] == 7


def test_the_checkpoint_of_a_job_with_an_excluded_call_is_that_of_the_job_without_it(toy: Path, tmp_path: Path) -> None:
    groups = pair(b=0.0)
    saved = [
        Path(Lab(toy, tmp_path / name).train(given).checkpoint or "") / "adapter_model.safetensors"
        for name, given in (("excluded", groups), ("bare", without_excluded(groups)), ("whole", pair()))
    ]
    assert saved[0].read_bytes() == saved[1].read_bytes() != saved[2].read_bytes()


def test_a_trajectory_with_every_call_excluded_stays_in_the_mean_and_is_warned_about(lab: Lab) -> None:
    result = lab.train(pair(d=0.0))
    assert result.applied
    assert result.metrics["trajectories/without_targets"] == 1
    assert result.metrics["reward/mean"] == 0.5
    assert any("second" in warning and "none that train_on= keeps" in warning for warning in result.warnings)


def test_train_on_that_leaves_every_call_out_is_an_error_that_says_so(lab: Lab) -> None:
    with pytest.raises(TrainError, match=r"4 calls with the weight 0.*let train_on= keep calls") as error:
        lab.train(pair(a=0.0, b=0.0, c=0.0, d=0.0))
    assert error.value.reason == "bad_job"


# ---- numbers that overflow


@pytest.mark.parametrize("rewards", [(1e308, -1e308), (1e308, 1e308), (1e200, 0.0)])
@pytest.mark.parametrize("scale", [True, False])
def test_rewards_that_overflow_are_refused_with_their_group(
    lab: Lab, rewards: tuple[float, float], scale: bool
) -> None:
    huge = [replace(t, id=f"{t.id}-huge", reward=reward) for t, reward in zip(pair()[0], rewards, strict=True)]
    with pytest.raises(TrainError, match=r"group 1: rewards beyond \+-1e\+100 overflow") as error:
        lab.train([pair()[0], huge], TrainConfig(scale_rewards=scale))
    assert error.value.reason == "bad_job"
    assert repr(list(rewards)) in str(error.value)


def test_large_rewards_of_a_sane_scale_train(lab: Lab) -> None:
    large = [replace(t, reward=reward) for t, reward in zip(pair()[0], (1e100, -1e100), strict=True)]
    result = lab.train([large])
    assert result.applied and math.isfinite(math.fsum(result.metrics.values()))


@pytest.mark.parametrize(("reward", "weight"), [(1e60, 1.0), (1.0, 1e60), (1e60, 1e300)])
def test_a_gradient_that_overflows_for_its_scale_says_so(lab: Lab, reward: float, weight: float) -> None:
    [[first, second]] = pair(a=weight)
    config = TrainConfig(scale_rewards=False)
    with pytest.raises(NotFiniteError, match=r"the largest advantage times weight is (5e\+59|inf)"):
        lab.train([[replace(first, reward=reward), second]], config)
