"""Does this model, as loaded, follow the tree? Asked at start-up on the real weights, never assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..protocol import Sample
from ..token_tree import numbered
from .layouts import plan
from .policy import Policy
from .target_logprobs import TargetSettings

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a logprob that rounding explains, in nats. A wrong mask is off by more, save on a flat model."""


@dataclass(frozen=True)
class MaskProbe:
    """`max_difference`: of a logprob between tree and plain rows, nats; NaN when the configuration already said no."""

    ok: bool
    max_difference: float
    reason: str | None = None


def mask_probe(policy: Policy) -> MaskProbe:
    """Compare a small branching tree with plain rows, with and without gradients: attention may choose its kernel by
    that. When they differ, `policy.tree_refused` says so from then on."""
    if policy.tree_refused is not None:
        return MaskProbe(False, float("nan"), policy.tree_refused)
    samples = _samples(policy.vocabulary)
    targets = _plain_settings(samples)
    expected = _logprobs(policy, samples, targets, "call_rows", gradients=False)
    others = [
        _logprobs(policy, samples, targets, name, gradients=on)
        for name, on in (("tree", False), ("tree", True), ("call_rows", True))
    ]
    difference = policy.tree_difference = float((torch.stack(others) - expected).abs().max())
    allowed = TOLERANCE[policy.dtype]
    if difference <= allowed:
        return MaskProbe(True, difference)
    policy.tree_refused = (
        f"the mask probe differs by {difference:.2g} nats between tree and plain rows (allowed {allowed:g})"
    )
    return MaskProbe(False, difference, policy.tree_refused)


def _samples(vocabulary: int) -> tuple[Sample, ...]:
    """Two turns, three branches, one of them within a completion."""
    draw = np.random.default_rng(0)
    prompt, first, second, more = (draw.integers(0, vocabulary, n).astype(np.int32) for n in (24, 12, 9, 10))
    fork = np.concatenate([first[:5], (first[5:] + 1) % vocabulary]).astype(np.int32)
    later = np.concatenate([prompt, first, more])
    rows = [(prompt, first), (prompt, fork), (prompt, second), (later, second), (later, fork)]
    return numbered([Sample.bare(*row) for row in rows])


def _plain_settings(samples: Sequence[Sample]) -> TargetSettings:
    ids = np.concatenate([sample.completion_ids for sample in samples]).astype(np.int64)
    ones = np.ones(len(ids))
    return TargetSettings(ids, ones, ones, np.zeros(len(ids), np.int64), np.zeros(len(ids)))


def _logprobs(
    policy: Policy, samples: Sequence[Sample], targets: TargetSettings, layout: str, *, gradients: bool
) -> torch.Tensor:
    made = plan(samples, "tree" if layout == "tree" else "call_rows", 4096, policy.shape)
    result = torch.zeros(len(targets.token_ids), dtype=torch.float64)
    for row in made.rows:
        with torch.set_grad_enabled(gradients):
            values, _, _ = policy.row_logprobs(row, targets)
        result[torch.from_numpy(row.target_ids)] = values.detach().double().cpu()  # pyright: ignore[reportUnknownMemberType]  # torch.from_numpy takes an array of unknown type
    return result
