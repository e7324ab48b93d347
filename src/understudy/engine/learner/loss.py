"""The policy-gradient losses: pure functions from logprobs and targets to one coefficient per target.

A loss never sees rows, layouts or packing. `weights` hold its denominators and come from the whole step, so

    loss = sum over targets of weights[t] * (policy term[t] + kl_coef * k3[t])
    coefficients[t] = d loss / d logprob[t]

and a row only has to add up coefficient x gradient of logprob. Names with the suffix _N are tensors over N targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """What is known of N sampled tokens before the update. All tensors are [N] and detached."""

    old: Tensor  # logprob under the learner at the start of the step
    advantages: Tensor
    weights: Tensor  # 1 / denominator
    importance: Tensor  # truncated importance weight, 1 where there is none
    sequence: Tensor  # int64: the sequence whose ratio a sequence-level loss takes
    reference: Tensor | None = None  # logprob under the base; NaN where the base gives none; None: no KL

    def take(self, index_M: Tensor) -> Targets:
        """The targets at these positions."""
        return Targets(
            self.old[index_M],
            self.advantages[index_M],
            self.weights[index_M],
            self.importance[index_M],
            self.sequence[index_M],
            None if self.reference is None else self.reference[index_M],
        )


@dataclass(frozen=True)
class Clip:
    """The scalars of a loss. The ratio's range is [1 - low, 1 + high]."""

    low: float
    high: float
    kl_coef: float = 0.0


@dataclass(frozen=True)
class Gradient:
    """A loss's value (scalar), d value / d logprob, and what it did to each target."""

    value: Tensor
    coefficients: Tensor  # [N]
    clipped: Tensor  # bool [N]: the clip cut or stopped this target's gradient
    kl: Tensor | None  # [N] k3 to the base


LossFunction = Callable[[Tensor, Targets, Clip], Gradient]


def grpo(logprobs_N: Tensor, targets: Targets, clip: Clip) -> Gradient:
    """PPO's clipped surrogate per token: -min(r A, clip(r, 1 - low, 1 + high) A), r = current / old.

    Sources: PPO 1707.06347 eq. 7; GRPO 2402.03300 eq. 3 (mean over a trajectory's tokens, then over trajectories).
    DAPO 2503.14476 eq. 8 is the same term with `high` raised and the mean over the step's tokens;
    Dr. GRPO 2503.20783 section 3.2 the same with a constant denominator. See `denominators`."""
    ratio_N = torch.exp(logprobs_N - targets.old)
    bounded_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    surrogate_N = torch.minimum(ratio_N * targets.advantages, bounded_N * targets.advantages)
    clipped_N = _outside(ratio_N, targets.advantages, clip)
    slope_N = torch.where(clipped_N, torch.zeros_like(ratio_N), ratio_N * targets.advantages)
    scale_N = targets.weights * targets.importance
    return _with_kl(-(scale_N * surrogate_N), -(scale_N * slope_N), clipped_N, logprobs_N, targets, clip.kl_coef)


def gspo(logprobs_N: Tensor, targets: Targets, clip: Clip) -> Gradient:
    """The clipped surrogate of a sequence's ratio s = exp(mean of (current - old) over its tokens).

    Source: GSPO 2507.18071 eq. 5 and 7, gradient eq. 10; where advantages differ inside a sequence, because calls are
    weighted, its GSPO-token: each token's gradient has its own. Needs every target of each sequence at once. Each token
    carries its weight times its importance weight, of which the gradient takes the sequence's mean."""
    size = int(targets.sequence.max()) + 1 if targets.sequence.numel() else 0
    empty = torch.zeros(size, dtype=logprobs_N.dtype, device=logprobs_N.device)
    length_S = empty.index_add(0, targets.sequence, torch.ones_like(logprobs_N)).clamp(min=1)
    ratio_S = torch.exp(empty.index_add(0, targets.sequence, logprobs_N - targets.old) / length_S)
    ratio_N = ratio_S[targets.sequence]
    bounded_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    surrogate_N = torch.minimum(ratio_N * targets.advantages, bounded_N * targets.advantages)
    clipped_N = _outside(ratio_N, targets.advantages, clip)
    scale_N = targets.weights * targets.importance
    scale_S = empty.index_add(0, targets.sequence, scale_N) / length_S
    slope_N = torch.where(clipped_N, torch.zeros_like(ratio_N), ratio_N * targets.advantages)
    slope_N = scale_S[targets.sequence] * slope_N
    return _with_kl(-(scale_N * surrogate_N), -slope_N, clipped_N, logprobs_N, targets, clip.kl_coef)


def cispo(logprobs_N: Tensor, targets: Targets, clip: Clip) -> Gradient:
    """-sg(min(r, 1 + high)) A logprob: a clipped ratio is a weight, so that every token keeps a gradient.

    Source: CISPO (MiniMax-M1) 2506.13585 eq. 4 and 5, without a lower bound as its section 3.1 runs it, token mean
    over the step."""
    ratio_N = torch.exp(logprobs_N - targets.old)
    slope_N = targets.weights * targets.importance * ratio_N.clamp(max=1 + clip.high) * targets.advantages
    clipped_N = ratio_N > 1 + clip.high
    return _with_kl(-(slope_N * logprobs_N), -slope_N, clipped_N, logprobs_N, targets, clip.kl_coef)


LOSSES: Mapping[str, LossFunction] = {"grpo": grpo, "dapo": grpo, "dr_grpo": grpo, "gspo": gspo, "cispo": cispo}
SEQUENCE_LOSSES = frozenset({"gspo"})
"""Losses whose coefficients need the logprobs of whole sequences, not of one row."""


def denominators(loss: str, trajectory_N: Tensor, max_tokens: int) -> Tensor:
    """1 / weights, float64 [N], from the trajectory index of every sampled token of the step.

    grpo, gspo: tokens of the trajectory x trajectories. dapo, cispo: tokens of the step. dr_grpo: max_tokens x
    trajectories. A trajectory without sampled tokens is not counted."""
    if loss in ("dapo", "cispo"):
        return torch.full(trajectory_N.shape, float(trajectory_N.numel()), dtype=torch.float64)
    lengths = torch.bincount(trajectory_N)
    trajectories = float((lengths > 0).sum())
    if loss == "dr_grpo":
        return torch.full(trajectory_N.shape, max_tokens * trajectories, dtype=torch.float64)
    return lengths[trajectory_N].to(torch.float64) * trajectories


def importance_weights(old_N: Tensor, sampler_N: Tensor, cap: float | None) -> Tensor:
    """min(old / sampler, cap), detached: corrects for sampler and learner computing different probabilities
    (truncated importance sampling). 1 where the sampler's logprob is NaN, and everywhere without a cap."""
    if cap is None:
        return torch.ones_like(old_N)
    ratio_N = torch.exp(old_N - sampler_N).clamp(max=cap)
    return torch.where(torch.isnan(sampler_N), torch.ones_like(old_N), ratio_N).detach()


def k3(reference_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """KL(current || reference) per token, k3 = exp(d) - d - 1 with d = reference - current (GRPO 2402.03300 eq. 4);
    0 where the reference is NaN."""
    difference_N = reference_N - logprobs_N
    return torch.where(torch.isnan(reference_N), 0.0, torch.exp(difference_N) - difference_N - 1)


def _outside(ratio_N: Tensor, advantages_N: Tensor, clip: Clip) -> Tensor:
    """Where the minimum takes the clipped side, whose gradient is zero."""
    return ((ratio_N > 1 + clip.high) & (advantages_N > 0)) | ((ratio_N < 1 - clip.low) & (advantages_N < 0))


def _with_kl(
    loss_N: Tensor, coefficients_N: Tensor, clipped_N: Tensor, logprobs_N: Tensor, targets: Targets, kl_coef: float
) -> Gradient:
    """Adds kl_coef x k3 and its gradient, 1 - exp(reference - current), with the same weights."""
    if targets.reference is None:
        return Gradient(loss_N.sum(), coefficients_N, clipped_N, None)
    kl_N = k3(targets.reference, logprobs_N)
    slope_N = torch.where(torch.isnan(targets.reference), 0.0, 1 - torch.exp(targets.reference - logprobs_N))
    value = (loss_N + targets.weights * kl_coef * kl_N).sum()
    return Gradient(value, coefficients_N + targets.weights * kl_coef * slope_N, clipped_N, kl_N)
