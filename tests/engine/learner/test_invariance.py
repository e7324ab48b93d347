"""Loss and gradients do not depend on layout, packing, splitting or order, and equal plain autograd on one row per call."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbook.base.config import LossName, TrainConfig
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.targets.advantage import group_advantages, supervised_advantages
from offbook.engine.learner.targets.batch import TrainBatch, make_batch
from offbook.engine.learner.update.step import Step, StepTotals
from offbook.engine.protocol import JobTrajectory
from tests.engine.learner.jobs import random_groups

VOCABULARY = 29
CLIPPING: list[LossName] = ["grpo", "dapo", "dr_grpo", "gspo", "cispo"]
LOSSES: list[LossName] = [*CLIPPING, "cross_entropy"]
CLIPS = {
    loss: {"epsilon": size, "epsilon_high": size}
    for loss, size in zip(LOSSES, (0.1, 0.1, 0.1, 0.01, 0.1, 0.1), strict=True)
}
Policies = Callable[[str, torch.dtype], Policy]
Groups = Sequence[Sequence[JobTrajectory]]


class Shifting(torch.optim.Optimizer):
    """Keeps a copy of each gradient and moves the weights by fixed random amounts, so that ratios leave 1 and are
    clipped in the same way whatever the layout; `restore` takes them back."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], amount: float) -> None:
        super().__init__(parameters.values(), {"lr": 0.0})
        self._parameters = parameters
        self._before = {name: value.detach().clone() for name, value in parameters.items()}
        self._amount = amount
        self._generator = torch.Generator().manual_seed(4)
        self.gradients: list[dict[str, Tensor]] = []

    def step(self, closure: None = None) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in self._parameters.items() if p.grad is not None})
        for value in self._parameters.values():
            value.data += self._amount * torch.randn(value.shape, generator=self._generator, dtype=value.dtype)

    def restore(self) -> None:
        for name, value in self._parameters.items():
            value.data = self._before[name]


def batch_of(groups: Groups, loss: LossName = "grpo") -> TrainBatch:
    if loss == "cross_entropy":
        groups = [
            [
                replace(t, samples=tuple(replace(s, weight=0.5 + len(s.prompt_ids) % 3) for s in t.samples))
                for t in group
            ]
            for group in groups
        ]
        return make_batch(
            groups, supervised_advantages([[t.failed for t in group] for group in groups]), supervised=True
        )
    rewards = [[t.reward for t in group] for group in groups]
    return make_batch(groups, group_advantages(rewards, min_group_size=2, divide_by_std=True))


def gradients(
    policy: Policy, batch: TrainBatch, config: TrainConfig, amount: float = 0.0
) -> tuple[StepTotals, list[dict[str, Tensor]]]:
    optimizer = Shifting(policy.trainable_parameters(), amount)
    try:
        outcome = Step(policy, optimizer, batch, config, 0, lambda *_: None).run()
    finally:
        optimizer.restore()
    return outcome, optimizer.gradients


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative to the norm of the reference `b`."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n] - b[n]).double().pow(2).sum()) for n in b)
    norm = sum(float(value.double().pow(2).sum()) for value in b.values())
    assert norm > 0
    return (difference / norm) ** 0.5


def shuffled(groups: Groups, seed: int) -> Groups:
    """Groups, rollouts and calls in another order."""
    draw = random.Random(seed)

    def mixed(items: Sequence[object]) -> list:
        return draw.sample(list(items), len(items))

    return [[replace(t, samples=tuple(mixed(t.samples))) for t in mixed(group)] for group in mixed(groups)]


def config_of(loss: LossName, **changes: Any) -> TrainConfig:
    # A huge norm limit keeps gradients as they are.
    return TrainConfig(loss=loss, kl_coef=0.1, max_grad_norm=1e9, **changes)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@settings(deadline=None, max_examples=5)
@given(
    seed=st.integers(0, 10_000),
    row_tokens=st.sampled_from([64, 96, 16_384]),
    chunk=st.sampled_from([1, 5, 512]),
    sequence=st.sampled_from(["trajectory", "call"]),
    epochs=st.sampled_from([1, 2]),
)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_do_not_depend_on_layout_packing_or_order(
    policies: Policies, loss: LossName, seed: int, row_tokens: int, chunk: int, sequence: str, epochs: int
) -> None:
    policy = policies("qwen2", torch.float64)
    groups = random_groups(seed, turns=3, vocabulary=VOCABULARY)
    plain = config_of(loss, sequence=sequence, epochs=epochs, layout="call_rows", **CLIPS[loss])
    reference, expected = gradients(policy, batch_of(groups, loss), plain, 0.02)
    for layout in ("call_rows", "leaf_rows", "tree", "auto"):
        config = plain.model_copy(update={"layout": layout, "row_tokens": row_tokens, "logits_chunk": chunk})
        outcome, found = gradients(policy, batch_of(shuffled(groups, seed), loss), config, 0.02)
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-9, abs=1e-12)
        assert [distance(a, b) for a, b in zip(found, expected, strict=True)] == pytest.approx([0] * epochs, abs=1e-5)
        assert outcome.clipped == reference.clipped


@pytest.mark.parametrize("loss", CLIPPING)
def test_the_shifted_second_epoch_of_these_tests_really_clips(policies: Policies, loss: LossName) -> None:
    batch = batch_of(random_groups(1, turns=3, vocabulary=VOCABULARY))
    outcome, _ = gradients(policies("qwen2", torch.float64), batch, config_of(loss, epochs=2, **CLIPS[loss]), 0.02)
    assert 0 < outcome.clipped < outcome.entered


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", ["leaf_rows", "tree"])
def test_layouts_agree_in_float32_too(policies: Policies, loss: LossName, layout: str) -> None:
    policy = policies("qwen2", torch.float32)
    batch = batch_of(random_groups(11, turns=3, vocabulary=VOCABULARY), loss)
    _, [expected] = gradients(policy, batch, config_of(loss, layout="call_rows"))
    _, [found] = gradients(policy, batch, config_of(loss, layout=layout, row_tokens=64))
    assert distance(found, expected) < 1e-4


@pytest.mark.parametrize("loss", LOSSES)
def test_the_steps_gradient_equals_plain_autograd_of_the_published_loss(policies: Policies, loss: LossName) -> None:
    """One forward pass per call through the whole model, the loss written in probabilities, one backward pass."""
    policy = policies("qwen2", torch.float64)
    batch = batch_of(random_groups(5, turns=3, vocabulary=VOCABULARY), loss)
    config = TrainConfig(loss=loss, max_grad_norm=1e9, layout="tree", importance_cap=1.5)
    _, [found] = gradients(policy, batch, config)
    parts = []
    for row in batch.samples:
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        logits = policy.model(input_ids=ids[None]).logits[0, len(row.prompt_ids) - 1 : -1]
        scaled = (logits / row.sampling.temperature).log_softmax(-1)
        parts.append(scaled.gather(1, ids[len(row.prompt_ids) :, None])[:, 0])
    now = torch.cat(parts)
    old = now.detach()
    sampler = torch.from_numpy(batch.sampler)
    weight = torch.where(sampler.isnan(), 1.0, (old - sampler).exp().clamp(max=1.5))
    advantage, trajectory = torch.from_numpy(batch.advantages), torch.from_numpy(batch.trajectory)
    lengths = torch.bincount(trajectory)
    if loss == "gspo":
        constrained = torch.from_numpy(batch.constrained)
        free = torch.bincount(trajectory[~constrained], minlength=len(lengths)).clamp(min=1)
        changes = torch.where(constrained, 0.0, now - old)
        mean = torch.zeros(len(lengths), dtype=now.dtype).index_add(0, trajectory, changes) / free
        ratio = torch.where(constrained, (now - old).exp(), mean.exp()[trajectory])
        term = -ratio * advantage * weight
    elif loss in ("cispo", "cross_entropy"):  # the recorded logprobs of supervised training are NaN: weight is 1
        term = -advantage * now * weight
    else:
        term = -(now - old).exp() * advantage * weight
    divisor = {
        "grpo": lengths[trajectory] * len(lengths),
        "gspo": lengths[trajectory] * len(lengths),
        "dr_grpo": torch.full_like(trajectory, 2048 * len(lengths)),
    }.get(loss, torch.full_like(trajectory, len(trajectory)))
    parameters = policy.trainable_parameters()
    expected = torch.autograd.grad((term / divisor).sum(), list(parameters.values()))
    assert distance(found, dict(zip(parameters, expected, strict=True))) < 1e-9


@pytest.mark.parametrize("loss", LOSSES)
def test_minibatches_average_to_the_steps_gradient_and_each_trajectory_is_in_one(
    policies: Policies, loss: LossName
) -> None:
    """Without updates in between, the mean over minibatches is the gradient of the whole step."""
    policy = policies("qwen2", torch.float64)
    batch = batch_of(random_groups(7, groups=3, vocabulary=VOCABULARY), loss)
    _, [whole] = gradients(policy, batch, config_of(loss))
    outcome, parts = gradients(policy, batch, config_of(loss, minibatches=4))
    assert outcome.updates == len(parts) == 4
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in whole}
    assert distance(mean, whole) < 1e-9
    dealt = [row.offset for part in batch.minibatches(4) for row in part]
    assert sorted(dealt) == [row.offset for row in batch.samples]


def test_more_minibatches_than_trajectories_make_one_update_per_trajectory(policies: Policies) -> None:
    batch = batch_of(random_groups(7, groups=1, rollouts=2, vocabulary=VOCABULARY))
    outcome, _ = gradients(policies("qwen2", torch.float64), batch, config_of("grpo", minibatches=50))
    assert outcome.updates == 2
