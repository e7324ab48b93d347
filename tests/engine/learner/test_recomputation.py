"""Layers that recompute their activations for the backward pass, as on a GPU: the gradients are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbook.base.config import LayoutName, LoraOptions
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.rows.layouts import ComputeRow, plan
from offbook.engine.sampling import TargetSettings
from tests.engine.learner.jobs import random_groups
from tests.engine.learner.test_invariance import VOCABULARY, batch_of
from tests.engine.learner.tiny_models import warm


def policy(base: Callable[[str], Path], *, recomputes: bool) -> Policy:
    made = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4), dtype=torch.float64)
    if recomputes:
        made.model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
        made.reset_adapter(LoraOptions(r=2, alpha=4))
    return warm(made)


def backward(policy: Policy, row: ComputeRow, settings: TargetSettings) -> tuple[list[Tensor], int]:
    """The adapter's gradients, and how often a layer's forward pass ran."""
    counts: Counter[str] = Counter()
    first = next(module for name, module in policy.model.named_modules() if name.endswith("layers.0"))
    hook = first.register_forward_pre_hook(lambda *_: counts.update(["forward"]))
    try:
        logprobs, _, _ = policy.row_logprobs(row, settings)
        parameters = list(policy.trainable_parameters().values())
        return list(torch.autograd.grad(logprobs.sum(), parameters)), counts["forward"]
    finally:
        hook.remove()


@pytest.mark.parametrize("layout", ["tree", "call_rows"])
def test_layers_run_twice_and_no_gradient_depends_on_it(base: Callable[[str], Path], layout: LayoutName) -> None:
    batch = batch_of(random_groups(3, turns=2, vocabulary=VOCABULARY))
    once, twice = (policy(base, recomputes=recomputes) for recomputes in (False, True))
    row = plan(batch.samples, layout, 16_384, once.shape).rows[0]
    (kept, one), (recomputed, two) = (backward(one, row, batch.settings) for one in (once, twice))
    assert (one, two) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))
