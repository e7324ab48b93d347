"""Tests at start-up, on the real weights: that the loaded model computes the same logprobs and gradients on a tree as on plain rows,
and on a plain row the same logprobs as with transformers' `eager` attention."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch's own annotations are partial

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from offbook.base.errors import ConfigError
from offbook.engine.learner.rows.layouts import plan
from offbook.engine.protocol import Sample
from offbook.engine.sampling import TargetSettings
from offbook.engine.token_tree import numbered

from .policy import Policy

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a logprob that rounding explains, in nats. A wrong mask is off by more, save on a flat
model."""
EAGER_TOLERANCE = {**TOLERANCE, torch.float16: 0.25}
"""The same for `eager`, which keeps its scores in half precision where other kernels do not: the bundled policy is off by
0.07 in float16."""
GRADIENT_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Largest relative error of the adapter's gradient, in the 2-norm, that rounding explains."""
PROMPT = 24
EAGER_TOKENS = 1088
"""Prompt of the comparison with `eager` for a base with sliding windows of up to 1,024 tokens, whose scores take that many
tokens squared per head; windows that are longer are compared as full attention."""
MAX_WINDOW = 8192
"""Sliding windows up to this many tokens are probed, by a prompt that is longer. Trees are refused beyond."""
ROW_TOKENS = 4096


def mask_probe(policy: Policy) -> str | None:
    """Compare a small branching tree with plain rows: logprobs with and without gradients, which may select different
    kernels, and gradients. Returns why the tree is refused, or None. Sets `policy.tree_difference`, and `policy.tree_refused` if they differ, if the tree raises
    an error, or if a layer computes another attention. Clears the adapter's gradients."""
    reason = policy.tree_refused or _too_long(policy.window)
    if reason is not None:
        return _refused(policy, reason)
    samples = _samples(policy.vocabulary, max(PROMPT, (policy.window or 0) + 1))
    targets = _plain_settings(samples)
    expected = _logprobs(policy, samples, targets, "call_rows")
    plain, gradient = _gradient(policy, samples, targets, "call_rows")
    before = policy.tree_calls
    try:
        on_tree = _logprobs(policy, samples, targets, "tree")
        differentiable, tree_gradient = _gradient(policy, samples, targets, "tree")
    except Exception as error:  # noqa: BLE001  # whatever a patched forward pass raises on a tree: plain rows ran
        return _refused(policy, f"a tree raises {type(error).__name__}: {str(error).strip()[:300]}")
    others = torch.stack([plain, on_tree, differentiable])
    difference = policy.tree_difference = float((others - expected).abs().max())
    allowed = TOLERANCE[policy.dtype]
    if not difference <= allowed:
        reason = f"the mask probe differs by {difference:.2g} nats between tree and plain rows (allowed {allowed:g})"
        return _refused(policy, reason)
    error = float((tree_gradient - gradient).norm() / gradient.norm())
    allowed = GRADIENT_TOLERANCE[policy.dtype]
    if not error <= allowed:
        reason = f"the gradients of tree and plain rows differ by {error:.2g} of their norm (allowed {allowed:g})"
        return _refused(policy, reason)
    rows = 2 * len(plan(samples, "tree", ROW_TOKENS, policy.shape).rows)
    if (calls := policy.tree_calls - before) < rows * policy.shape.layers:
        reason = f"{calls} of {rows * policy.shape.layers} attention layers of the mask probe ran on the tree"
        return _refused(policy, reason)
    return None


def eager_probe(policy: Policy) -> float | None:
    """Compare the attention of a plain row with transformers' `eager`, which computes all that the architecture defines.
    Returns the largest difference of a logprob in nats; None if the layers run Unsloth's own attention, which cannot be
    exchanged. Raises ConfigError if they differ by more than rounding."""
    if policy.attention_of_rows == "unsloth":
        return None
    draw = np.random.default_rng(1)
    window = policy.window or 0
    prompt = max(PROMPT, window + PROMPT) if window + PROMPT <= EAGER_TOKENS else PROMPT
    ids = draw.integers(0, policy.vocabulary, prompt + PROMPT).astype(np.int32)
    samples = numbered([Sample.bare(ids[:prompt], ids[prompt:])])
    targets = _plain_settings(samples)
    own = _logprobs(policy, samples, targets, "call_rows")
    with policy.eager_attention():
        eager = _logprobs(policy, samples, targets, "call_rows")
    difference, allowed = float((own - eager).abs().max()), EAGER_TOLERANCE[policy.dtype]
    if not difference <= allowed:
        raise ConfigError(
            f"base model {policy.model_type!r}: logprobs with the attention {policy.attention_of_rows!r} differ by {difference:.2g} "
            f"nats from those with transformers' `eager` (allowed {allowed:g}), so training would learn from the difference: choose "
            "another base model, and report this one"
        )
    return difference


def _refused(policy: Policy, reason: str) -> str:
    policy.tree_refused = reason
    return reason


def _too_long(window: int | None) -> str | None:
    if window is None or window <= MAX_WINDOW:
        return None
    return f"a sliding window of {window} tokens is longer than the mask probe's {MAX_WINDOW}"


def _samples(vocabulary: int, prompt_tokens: int) -> tuple[Sample, ...]:
    """Samples with two turns and three branches, one of them inside a completion, and one sample without a shared
    prompt."""
    draw = np.random.default_rng(0)
    prompt, first, second, more = (draw.integers(0, vocabulary, n).astype(np.int32) for n in (prompt_tokens, 12, 9, 10))
    fork = np.concatenate([first[:5], (first[5:] + 1) % vocabulary]).astype(np.int32)
    later = np.concatenate([prompt, first, more])
    other = ((prompt[:PROMPT] + 1) % vocabulary).astype(np.int32)
    rows = [(prompt, first), (prompt, fork), (prompt, second), (later, second), (later, fork), (other, more)]
    return numbered([Sample.bare(*row) for row in rows])


def _plain_settings(samples: Sequence[Sample]) -> TargetSettings:
    ids = np.concatenate([sample.completion_ids for sample in samples]).astype(np.int64)
    ones = np.ones(len(ids))
    return TargetSettings(ids, ones, ones, np.zeros(len(ids), np.int64), np.zeros(len(ids)))


def base_logprobs(policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """The logprobs of a completion's C tokens under the policy's base, nats, float64 [C] on the CPU."""
    samples = numbered([Sample.bare(np.asarray(prompt, np.int32), np.asarray(completion, np.int32))])
    targets = replace(_plain_settings(samples), temperature=np.full(len(completion), temperature))
    return _logprobs(policy, samples, targets, "call_rows", adapter=False)


def _logprobs(
    policy: Policy,
    samples: Sequence[Sample],
    targets: TargetSettings,
    layout: Literal["tree", "call_rows"],
    *,
    adapter: bool = True,
) -> Tensor:
    result = torch.zeros(len(targets.token_ids), dtype=torch.float64)
    for row in plan(samples, layout, ROW_TOKENS, policy.shape).rows:
        with torch.no_grad():
            values, _, _ = policy.row_logprobs(row, targets, adapter=adapter)
        result[torch.from_numpy(row.target_numbers)] = values.cpu().double()  # mps has no float64
    return result


def _gradient(
    policy: Policy, samples: Sequence[Sample], targets: TargetSettings, layout: Literal["tree", "call_rows"]
) -> tuple[Tensor, Tensor]:
    """The logprobs of all targets, and the adapter's gradient of a fixed combination of them, in one vector."""
    result = torch.zeros(len(targets.token_ids), dtype=torch.float64)
    weights = torch.linspace(-1, 1, len(result))
    parameters = list(policy.trainable_parameters().values())
    for value in parameters:
        value.grad = None
    try:
        for row in plan(samples, layout, ROW_TOKENS, policy.shape).rows:
            index = torch.from_numpy(row.target_numbers)
            with torch.enable_grad():
                values, _, _ = policy.row_logprobs(row, targets)
                (values * weights[index].to(values)).sum().backward()  # reentrant recomputation knows no autograd.grad
            result[index] = values.detach().cpu().double()
        return result, torch.cat([value.grad.flatten().float() for value in parameters if value.grad is not None])
    finally:
        for value in parameters:
            value.grad = None
