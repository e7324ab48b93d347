"""The losses of a step: pure functions from logprobs and targets to one coefficient per target.

    loss = sum over targets t of inverse_divisors[t] * (importance[t] * policy term[t] + kl_coef * bounded k3[t])
    coefficients[t] = d loss / d logprob[t] (`gspo` has an exception)

The KL term is k3, linear from KL_LINEAR_FROM on.

No parameter of the model appears here. `Step` computes the logprobs of a row, calls a loss, and runs the backward pass
of sum(coefficients * logprobs). A loss does not depend on rows, layouts or packing, because its divisors count the whole
step. docs/learner.md lists its symbols beside the names used here.
Suffixes of tensors: _N targets, _S sequences. Logprobs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """The inputs of a loss besides the current logprobs: N sampled tokens, all tensors [N] and detached.

    They are the targets of a row, or of a whole minibatch for the losses in `SEQUENCE_LOSSES`."""

    old: Tensor  # logprob under the old policy: the learner at the start of the step
    advantages: Tensor  # A, times the call's weight
    inverse_divisors: Tensor  # minibatches / divisor, see `divisors`
    importance: Tensor  # w, the truncated importance weight, see `importance_weights`; 1 where there is none
    sequence: Tensor  # int64: number of the sequence whose ratio a sequence-level loss uses
    base: Tensor | None = None  # logprob under the base, NaN where its kept set excludes the token; None: no KL term


@dataclass(frozen=True)
class Clip:
    """The scalar parameters of a loss. The ratio is clipped to [1 - low, 1 + high]: `epsilon` and `upper_clip` of
    TrainConfig."""

    low: float
    high: float
    kl_coef: float = 0.0


@dataclass(frozen=True)
class LossOutput:
    """The value of a loss, and its derivative with respect to the current logprobs (not the parameters)."""

    value: Tensor  # scalar
    coefficients: Tensor  # [N], d value / d logprob; `gspo` has an exception
    clipped: Tensor  # bool [N]: the clip reduced this target's gradient or set it to zero
    kl: Tensor | None  # [N] k3 to the base


LossFunction = Callable[[Tensor, Targets, Clip], LossOutput]


def grpo(logprobs_N: Tensor, targets: Targets, clip: Clip) -> LossOutput:
    """PPO's clipped surrogate per token: -min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(current - old).

    Sources: PPO 1707.06347 eq. 7; GRPO 2402.03300 eq. 3 (mean over a trajectory's tokens, then over trajectories).
    DAPO 2503.14476 eq. 8 has the same term, a larger `high`, and the mean over the step's tokens.
    Dr. GRPO 2503.20783 section 3.2 has the same term and a constant denominator. See `divisors`."""
    ratio_N = torch.exp(logprobs_N - targets.old)
    bounded_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    surrogate_N = torch.minimum(ratio_N * targets.advantages, bounded_N * targets.advantages)
    clipped_N = _is_clipped(ratio_N, targets.advantages, clip)
    slope_N = torch.where(clipped_N, torch.zeros_like(ratio_N), ratio_N * targets.advantages)
    scale_N = targets.inverse_divisors * targets.importance
    return _with_kl(-(scale_N * surrogate_N), -(scale_N * slope_N), clipped_N, logprobs_N, targets, clip.kl_coef)


def gspo(logprobs_N: Tensor, targets: Targets, clip: Clip) -> LossOutput:
    """The clipped surrogate with one ratio per sequence: s = exp(mean of (current - old) over the sequence's tokens).

    Source: GSPO 2507.18071 eq. 5 and 7, gradient eq. 10. All targets of a sequence must be in one call of this function.

    coefficients[t] = -mean(inverse_divisors * importance over the sequence) * s * advantages[t], 0 where clipped. That is
    the derivative of the value while the advantage is the same in the whole sequence. Where it differs, because calls
    have weights or rewards of their own, every token's gradient has its own advantage, as in the paper's GSPO-token."""
    size = int(targets.sequence.max()) + 1 if targets.sequence.numel() else 0
    empty = torch.zeros(size, dtype=logprobs_N.dtype, device=logprobs_N.device)
    length_S = empty.index_add(0, targets.sequence, torch.ones_like(logprobs_N)).clamp(min=1)
    ratio_S = torch.exp(empty.index_add(0, targets.sequence, logprobs_N - targets.old) / length_S)
    ratio_N = ratio_S[targets.sequence]
    bounded_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    surrogate_N = torch.minimum(ratio_N * targets.advantages, bounded_N * targets.advantages)
    clipped_N = _is_clipped(ratio_N, targets.advantages, clip)
    scale_N = targets.inverse_divisors * targets.importance
    scale_S = empty.index_add(0, targets.sequence, scale_N) / length_S
    slope_N = torch.where(clipped_N, torch.zeros_like(ratio_N), ratio_N * targets.advantages)
    slope_N = scale_S[targets.sequence] * slope_N
    return _with_kl(-(scale_N * surrogate_N), -slope_N, clipped_N, logprobs_N, targets, clip.kl_coef)


def cispo(logprobs_N: Tensor, targets: Targets, clip: Clip) -> LossOutput:
    """-stop_gradient(min(r, 1 + high)) A logprob: the clipped ratio is only a weight, so every token has a gradient.

    Source: CISPO (MiniMax-M1) 2506.13585 eq. 4 and 5, without a lower bound as in its section 3.1; mean over the step's
    tokens."""
    ratio_N = torch.exp(logprobs_N - targets.old)
    factor_N = targets.inverse_divisors * targets.importance * ratio_N.clamp(max=1 + clip.high) * targets.advantages
    clipped_N = ratio_N > 1 + clip.high
    return _with_kl(-(factor_N * logprobs_N), -factor_N, clipped_N, logprobs_N, targets, clip.kl_coef)


def cross_entropy(logprobs_N: Tensor, targets: Targets, clip: Clip) -> LossOutput:
    """-weight x logprob: supervised training. The weight of a target stands in `advantages`; no ratio, nothing clipped.

    Its divisors are `supervised_divisors`."""
    scale_N = targets.inverse_divisors * targets.advantages
    nothing_N = torch.zeros_like(logprobs_N, dtype=torch.bool)
    return _with_kl(-(scale_N * logprobs_N), -scale_N, nothing_N, logprobs_N, targets, clip.kl_coef)


LOSSES: Mapping[str, LossFunction] = {
    "grpo": grpo,
    "dapo": grpo,
    "dr_grpo": grpo,
    "gspo": gspo,
    "cispo": cispo,
    "cross_entropy": cross_entropy,
}
SEQUENCE_LOSSES = frozenset({"gspo"})
"""Losses whose coefficients depend on the logprobs of whole sequences, which several rows may share."""


def divisors(loss: str, trajectory_N: Tensor, max_tokens: int) -> Tensor:
    """The divisor of every target's loss term, float64 [N].

    trajectory_N: the trajectory number of every target of the step, also of those outside the kept set. grpo, gspo:
    targets of the trajectory x number of trajectories. dapo, cispo: targets of the step. dr_grpo: max_tokens x number of
    trajectories. Trajectories without targets do not count.

    >>> divisors("grpo", torch.tensor([0, 0, 0, 1]), max_tokens=2048).tolist()  # 3 tokens, then 1; 2 trajectories
    [6.0, 6.0, 6.0, 2.0]
    >>> divisors("dapo", torch.tensor([0, 0, 0, 1]), max_tokens=2048).tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    if loss in ("dapo", "cispo"):
        return torch.full(trajectory_N.shape, float(trajectory_N.numel()), dtype=torch.float64)
    lengths = torch.bincount(trajectory_N)
    trajectories = float((lengths > 0).sum())
    if loss == "dr_grpo":
        return torch.full(trajectory_N.shape, max_tokens * trajectories, dtype=torch.float64)
    return lengths[trajectory_N].to(torch.float64) * trajectories


def supervised_divisors(
    call_N: Tensor, trajectory_N: Tensor, divisor: Literal["tokens", "messages", "trajectories"] | float
) -> Tensor:
    """The divisor of every target of `cross_entropy`, float64 [N]. call_N, trajectory_N: the numbers of the call and of the
    trajectory of every target.

    tokens: the targets of the step. messages: the targets of the call x the number of calls. trajectories: the same of
    trajectories, so that a long one weighs as much as a short one. A number is taken as it is.

    >>> call, trajectory = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 1])
    >>> supervised_divisors(call, trajectory, "tokens").tolist()
    [5.0, 5.0, 5.0, 5.0, 5.0]
    >>> supervised_divisors(call, trajectory, "messages").tolist()  # 3 tokens, 1 and 1; 3 messages
    [9.0, 9.0, 9.0, 3.0, 3.0]
    >>> supervised_divisors(call, trajectory, "trajectories").tolist()  # 4 tokens, then 1; 2 trajectories
    [8.0, 8.0, 8.0, 8.0, 2.0]
    """
    if divisor == "messages":
        return divisors("grpo", call_N, 0)
    if divisor == "trajectories":
        return divisors("grpo", trajectory_N, 0)
    value = float(call_N.numel()) if divisor == "tokens" else divisor
    return torch.full(call_N.shape, value, dtype=torch.float64)


def importance_weights(old_N: Tensor, sampler_N: Tensor, cap: float | None) -> Tensor:
    """Truncated importance weights: min(exp(old - sampler), cap), [N], detached.

    They correct for the difference between the sampler's and the learner's probabilities. 1 where the sampler's logprob
    is NaN, and everywhere if `cap` is None."""
    if cap is None:
        return torch.ones_like(old_N)
    ratio_N = torch.exp(old_N - sampler_N).clamp(max=cap)
    return torch.where(torch.isnan(sampler_N), torch.ones_like(old_N), ratio_N).detach()


def teacher_advantages(teacher_N: Tensor, old_N: Tensor) -> Tensor:
    """teacher - old per sampled token, [N], nats: the negative of the one-sample estimate of KL(policy || teacher).

    Its expectation as an advantage is the gradient of the reverse KL on the policy's own samples (GKD 2306.13649, section
    3.1; MiniLLM 2306.08543, eq. 2). 0 where the teacher is NaN."""
    return torch.where(torch.isnan(teacher_N), 0.0, teacher_N - old_N)


KL_LINEAR_FROM = 2.6
"""Nats below the base from which the KL term of a token grows linearly, where k3 is 10.

k3 grows exponentially for tokens that training makes unlikely: without the bound on its slope, one of them outweighs the
step. verl's low_var_kl cuts k3 off at 10, so that a token beyond it is no longer pulled back to the base."""


def k3(reference_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Estimate of KL(current || reference) per token, [N]: k3 = exp(d) - d - 1 with d = reference - current.

    Source: GRPO 2402.03300 eq. 4. 0 where the reference is NaN."""
    difference_N = reference_N - logprobs_N
    return torch.where(torch.isnan(reference_N), 0.0, torch.exp(difference_N) - difference_N - 1)


def _is_clipped(ratio_N: Tensor, advantages_N: Tensor, clip: Clip) -> Tensor:
    """Where the minimum in the surrogate selects its clipped side, whose gradient is zero."""
    return ((ratio_N > 1 + clip.high) & (advantages_N > 0)) | ((ratio_N < 1 - clip.low) & (advantages_N < 0))


def _with_kl(
    loss_N: Tensor, coefficients_N: Tensor, clipped_N: Tensor, logprobs_N: Tensor, targets: Targets, kl_coef: float
) -> LossOutput:
    """Add kl_coef x k3, linear from KL_LINEAR_FROM on, and its derivative with the same divisors: 1 - exp(min(d,
    KL_LINEAR_FROM)) with d = base - current. The KL term has neither advantage nor importance weight. `kl` is plain k3."""
    if targets.base is None:
        return LossOutput(loss_N.sum(), coefficients_N, clipped_N, None)
    kl_N = k3(targets.base, logprobs_N)
    difference_N = torch.where(torch.isnan(targets.base), 0.0, targets.base - logprobs_N)
    near_N = difference_N.clamp(max=KL_LINEAR_FROM)
    kl_slope_N = 1 - torch.exp(near_N)
    term_N = torch.exp(near_N) - near_N - 1 - kl_slope_N * (difference_N - near_N)
    value = (loss_N + targets.inverse_divisors * kl_coef * term_N).sum()
    return LossOutput(value, coefficients_N + targets.inverse_divisors * kl_coef * kl_slope_N, clipped_N, kl_N)
