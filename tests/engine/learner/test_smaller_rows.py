"""A step that runs out of memory is computed with smaller rows: loss, gradients and scores are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offbook.base.config import LayoutName, LossName
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.rows.layouts import ComputeRow
from offbook.engine.learner.update.step import Step
from tests.engine.learner.jobs import random_groups
from tests.engine.learner.test_invariance import VOCABULARY, Shifting, batch_of, config_of, distance, gradients

Policies = Callable[[str, torch.dtype], Policy]


class SmallDevice:
    """A policy on a device that has room for rows of fewer than `largest` tokens: a larger one breaks off where `place`
    says, in the backward pass after the later layers have left their gradients."""

    def __init__(self, policy: Policy, largest: int, place: str) -> None:
        self._policy = policy
        self._largest = largest
        self._place = place
        self._breaks = False
        self.tree_refused, self.shape = policy.tree_refused, policy.shape
        self.refused: list[int] = []
        first = next(iter(policy.trainable_parameters().values()))
        self.hook = first.register_hook(self._backward)

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._policy.trainable_parameters()

    def row_logprobs(self, row: ComputeRow, *arguments: object, **options: object):
        large = row.token_ids.size >= self._largest
        if large:
            self.refused.append(row.token_ids.size)
        if large and (self._place == "forward" or not torch.is_grad_enabled()):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self._breaks = large
        return self._policy.row_logprobs(row, *arguments, **options)  # pyright: ignore[reportArgumentType]

    def _backward(self, gradient: torch.Tensor) -> None:
        if self._breaks:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("loss", "layout", "place"),
    [
        ("grpo", "tree", "forward"),
        ("grpo", "tree", "backward"),
        ("grpo", "call_rows", "backward"),
        ("dapo", "leaf_rows", "forward"),
        ("gspo", "tree", "backward"),
    ],
)
def test_smaller_rows_equal_larger_ones(policies: Policies, loss: LossName, layout: LayoutName, place: str) -> None:
    policy = policies("qwen2", torch.float64)
    batch = batch_of(random_groups(7, turns=3, vocabulary=VOCABULARY))
    config = config_of(loss, layout=layout, epochs=2)
    whole, expected = gradients(policy, batch, config, 0.02)
    largest = max(row.token_ids.size for part in whole.plans for row in part.rows)
    device = SmallDevice(policy, largest, place)
    optimizer = Shifting(policy.trainable_parameters(), 0.02)
    try:
        found = Step(device, optimizer, batch, config, 0, lambda *_: None).run()
    finally:
        device.hook.remove()
        optimizer.restore()
    assert device.refused == [largest]  # it failed once, and was never tried whole again
    assert found.losses == pytest.approx(whole.losses, rel=1e-9, abs=1e-12)
    assert [distance(a, b) for a, b in zip(optimizer.gradients, expected, strict=True)] == pytest.approx(
        [0, 0], abs=1e-9
    )
    assert (found.entered, found.clipped) == (whole.entered, whole.clipped)
    assert found.kl_sum == pytest.approx(whole.kl_sum)
    torch.testing.assert_close(found.old.logprobs, whole.old.logprobs)
    assert all(value.grad is None for value in policy.trainable_parameters().values())  # gone after a step


def test_rows_that_fail_again_refuse_the_step(policies: Policies) -> None:
    policy = policies("qwen2", torch.float64)
    batch = batch_of(random_groups(7, turns=3, vocabulary=VOCABULARY))
    device = SmallDevice(policy, 2, "forward")
    optimizer = Shifting(policy.trainable_parameters(), 0.0)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            Step(device, optimizer, batch, config_of("grpo"), 0, lambda *_: None).run()
    finally:
        device.hook.remove()
    assert sorted(device.refused, reverse=True) == device.refused and optimizer.gradients == []
