"""Does this model, as loaded, follow the tree? Asked at start-up on the real weights, never assumed."""

# pyright: reportUnknownMemberType=false
# torch.from_numpy takes an array of unknown type.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .layouts import plan
from .policy import Policy
from .target_logprobs import TargetSettings
from .token_tree import Row

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
    rows = _rows(policy.vocabulary)
    targets = _plain_settings(rows)
    expected = _logprobs(policy, rows, targets, "call_rows", gradients=False)
    others = [
        _logprobs(policy, rows, targets, name, gradients=on)
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


def _rows(vocabulary: int) -> list[Row]:
    """Two turns, three branches, one of them within a completion."""
    draw = np.random.default_rng(0)
    prompt, first, second, more = (draw.integers(0, vocabulary, n).astype(np.int32) for n in (24, 12, 9, 10))
    fork = np.concatenate([first[:5], (first[5:] + 1) % vocabulary]).astype(np.int32)
    later = np.concatenate([prompt, first, more])
    rows = [(prompt, first), (prompt, fork), (prompt, second), (later, second), (later, fork)]
    offsets = np.cumsum([0, *(len(completion) for _, completion in rows)])
    return [Row(p, c, int(offset)) for (p, c), offset in zip(rows, offsets[:-1], strict=True)]


def _plain_settings(rows: list[Row]) -> TargetSettings:
    ids = np.concatenate([row.completion_ids for row in rows]).astype(np.int64)
    ones = np.ones(len(ids))
    return TargetSettings(ids, ones, ones, np.zeros(len(ids), np.int64), np.zeros(len(ids)))


def _logprobs(
    policy: Policy, rows: list[Row], targets: TargetSettings, layout: str, *, gradients: bool
) -> torch.Tensor:
    made = plan(rows, "tree" if layout == "tree" else "call_rows", 4096, policy.shape)
    result = torch.zeros(len(targets.token_ids), dtype=torch.float64)
    for row in made.rows:
        with torch.set_grad_enabled(gradients):
            values, _, _ = policy.row_logprobs(row, targets)
        result[torch.from_numpy(row.target_ids)] = values.detach().double().cpu()
    return result
