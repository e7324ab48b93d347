# pyright: reportUnknownMemberType=false
# torch's own annotations are partial
"""Forward and backward passes over rows of a step, and what the loss of each target depends on.

`Step` decides which rows are computed when. A `RowPass` computes them on one device; a team of learners spreads them
(`team.py`). The gradient of a minibatch is the sum over its rows, so it does not matter who computes which.

Suffixes of tensors: _N all targets of the step, _R those of a row, _K the kept ones of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbook.base.config import TrainConfig
from offbook.engine.learner.rows.cost import ModelShape
from offbook.engine.learner.rows.layouts import ComputeRow
from offbook.engine.learner.targets.batch import TrainBatch
from offbook.engine.sampling import TargetSettings

from .loss import (
    LOSSES,
    SEQUENCE_LOSSES,
    Clip,
    LossOutput,
    Targets,
    divisors,
    importance_weights,
    supervised_divisors,
    teacher_advantages,
)

Done = Callable[[int], None]
"""Called with the number of rows that are computed."""


class RowPolicy(Protocol):
    """The interface of `Policy` that a step uses. `tree_refused`: why the model cannot train on trees, else None."""

    tree_refused: str | None
    shape: ModelShape

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name."""
        ...

    def row_logprobs(
        self, row: ComputeRow, settings: TargetSettings, *, adapter: bool = True, logits_chunk: int = 512
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logprobs, entropy, kept of the row's targets, each [R]; see `Policy.row_logprobs`."""
        ...


@dataclass(frozen=True)
class Scores:
    """Logprobs of all targets under one policy, on the CPU. Filled row by row by `put`; zeros and False before."""

    logprobs: Tensor  # float64 [N], nats
    entropy: Tensor  # float64 [N], nats
    kept: Tensor  # bool [N]: the token is in this policy's top-k, top-p and min-p set

    @classmethod
    def empty(cls, size: int) -> Scores:
        """Scores of `size` targets, all zero and not kept."""
        zeros_N = torch.zeros(size, dtype=torch.float64)
        return cls(zeros_N, zeros_N.clone(), torch.zeros(size, dtype=torch.bool))

    def put(self, target_numbers_R: Tensor, logprobs_R: Tensor, entropy_R: Tensor, kept_R: Tensor) -> None:
        """Store a row's values under its target numbers."""
        self.logprobs[target_numbers_R] = logprobs_R.detach().cpu().double()
        self.entropy[target_numbers_R] = entropy_R.detach().cpu().double()
        self.kept[target_numbers_R] = kept_R.cpu()


@dataclass(frozen=True)
class LastUpdate:
    """Per target, the last update that included it, on the CPU, for the token file. Zeros and False before `put`."""

    coefficients: Tensor  # float64 [N]: d loss / d logprob
    logprobs: Tensor  # float64 [N], nats, before the update
    clipped: Tensor  # bool [N]: the clip affected the target in any update

    @classmethod
    def empty(cls, size: int) -> LastUpdate:
        """The state of `size` targets before the first update."""
        zeros_N = torch.zeros(size, dtype=torch.float64)
        return cls(zeros_N, zeros_N.clone(), torch.zeros(size, dtype=torch.bool))

    def put(self, target_numbers_K: Tensor, logprobs_K: Tensor, output: LossOutput) -> None:
        """Store the coefficients and logprobs of these targets."""
        self.coefficients[target_numbers_K] = output.coefficients
        self.logprobs[target_numbers_K] = logprobs_K
        self.clipped[target_numbers_K] |= output.clipped


@dataclass(frozen=True)
class TeacherScores:
    """The teacher of a step. `logprobs`: its own of each target, float64 [N], nats, NaN where they say nothing. `weights`:
    of its advantages, float64 [N], times the call's weight."""

    logprobs: Tensor
    weights: Tensor


@dataclass
class Tally:
    """Counts and sums over targets that entered a loss."""

    kl_sum: float = 0.0  # sum of k3 to the base
    kl_counted: int = 0  # targets in `kl_sum`
    clipped: int = 0  # of `ratios`: those that the clip affected
    ratios: int = 0  # of `entered`: those with a ratio, which constrained calls have not
    entered: int = 0

    def add(self, other: Tally) -> None:
        """Add those of other targets."""
        self.kl_sum += other.kl_sum
        self.kl_counted += other.kl_counted
        self.clipped += other.clipped
        self.ratios += other.ratios
        self.entered += other.entered


@dataclass(frozen=True)
class LossInputs:
    """What the losses of a step's N targets depend on, beside the policies' logprobs."""

    config: TrainConfig
    settings: TargetSettings
    sampler: Tensor  # float64 [N], see `TrainBatch`
    advantages: Tensor  # float64 [N]
    constrained: Tensor  # bool [N]
    sequence: Tensor  # int64 [N]: whose ratio a sequence-level loss uses; of a constrained target: of its own
    inverse_divisors: Tensor  # float64 [N]: minibatches / divisor
    teacher: TeacherScores | None = None

    @classmethod
    def of(cls, batch: TrainBatch, config: TrainConfig, minibatches: int, teacher: TeacherScores | None) -> LossInputs:
        """The inputs of a batch that is trained in so many minibatches. `teacher`: its advantages are added."""
        call, trajectory = torch.from_numpy(batch.call), torch.from_numpy(batch.trajectory)
        constrained = torch.from_numpy(batch.constrained)
        sequence = call if config.loss in SEQUENCE_LOSSES and config.sequence == "call" else trajectory
        own = int(sequence.max()) + 1 + torch.arange(len(batch))
        if config.supervised:
            divisors_N = supervised_divisors(call, trajectory, config.imitation_divisor)
        else:
            divisors_N = divisors(config.loss, trajectory, config.max_tokens)
        return cls(
            config=config,
            settings=batch.settings,
            sampler=torch.from_numpy(batch.sampler),
            advantages=torch.from_numpy(batch.advantages),
            constrained=constrained,
            sequence=torch.where(constrained, own, sequence),
            inverse_divisors=minibatches / divisors_N,  # a minibatch estimates the step's gradient
            teacher=teacher,
        )

    def loss(
        self, target_numbers_K: Tensor, current_K: Tensor, old: Scores, base_N: Tensor | None
    ) -> tuple[LossOutput, Tally]:
        """The loss of these targets. A constrained call was sampled from another distribution than the learner's, whose
        ratio would say nothing: it is 1, never clipped, and no part of a sequence's mean."""
        config, old_K = self.config, old.logprobs[target_numbers_K]
        constrained_K = self.constrained[target_numbers_K]
        advantages_K = self.advantages[target_numbers_K]
        if self.teacher is not None:
            own_K = teacher_advantages(self.teacher.logprobs[target_numbers_K], old_K)
            advantages_K = advantages_K + self.teacher.weights[target_numbers_K] * own_K
        targets = Targets(
            torch.where(constrained_K, current_K, old_K),
            advantages_K,
            self.inverse_divisors[target_numbers_K],
            importance_weights(old_K, self.sampler[target_numbers_K], config.importance_cap),
            self.sequence[target_numbers_K],
            None if base_N is None else base_N[target_numbers_K],
        )
        output = LOSSES[config.loss](current_K, targets, Clip(config.epsilon, config.upper_clip, config.kl_coef))
        tally = Tally(
            entered=len(target_numbers_K),
            ratios=int((~constrained_K).sum()),
            clipped=int((output.clipped & ~constrained_K).sum()),
        )
        if output.kl is not None and targets.base is not None:
            tally.kl_counted = int((~torch.isnan(targets.base)).sum())
            tally.kl_sum = float(output.kl.sum())
        return output, tally


@dataclass(frozen=True)
class UpdateState:
    """What the passes of one update read of their step, and write to it.

    `old`: the old policy's scores, which the passes write where `first` is set: no pass of its own took them. `last` is
    written. `base`: logprobs [N] under the base; None without a KL term. `coefficients`: float64 [N], of a loss that was
    computed before; None: each row computes its own. `scale`: factor of the gradients."""

    old: Scores
    last: LastUpdate
    base: Tensor | None
    first: bool
    coefficients: Tensor | None
    scale: float


class RowPass:
    """Computes rows of one step of `policy`, on its device."""

    def __init__(self, policy: RowPolicy, inputs: LossInputs) -> None:
        self._policy = policy
        self._inputs = inputs

    @torch.no_grad()
    def score(self, rows: Sequence[ComputeRow], into: Scores, done: Done, *, adapter: bool = True) -> None:
        """Write the current logprobs of the rows' targets to `into`; with `adapter=False` those under the base."""
        for i, row in enumerate(rows):
            done(i)
            into.put(torch.from_numpy(row.target_numbers), *self._logprobs(row, adapter=adapter))

    def backward(self, rows: Sequence[ComputeRow], update: UpdateState, done: Done) -> tuple[float, Tally]:
        """Compute the rows' loss and its gradient, which the parameters have afterwards. The loss is 0 if it was computed
        before."""
        for parameter in self._policy.trainable_parameters().values():
            parameter.grad = None  # an aborted backward pass leaves partial gradients
        loss, tally = 0.0, Tally()
        for i, row in enumerate(rows):
            loss += self._backward_row(row, update, tally)
            done(i + 1)
        return loss, tally

    def _logprobs(self, row: ComputeRow, *, adapter: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        chunk = self._inputs.config.logits_chunk
        return self._policy.row_logprobs(row, self._inputs.settings, adapter=adapter, logits_chunk=chunk)

    def _backward_row(self, row: ComputeRow, update: UpdateState, tally: Tally) -> float:
        """Forward and backward pass of one row; returns its part of the loss, and adds to `tally`. A target enters the
        loss if its token is in the kept set of both the old and the current policy."""
        target_numbers_R = torch.from_numpy(row.target_numbers)
        logprobs_R, entropy_R, kept_R = self._logprobs(row)
        if update.first:
            update.old.put(target_numbers_R, logprobs_R, entropy_R, kept_R)
        index_K = (kept_R.cpu() & update.old.kept[target_numbers_R]).nonzero()[:, 0]
        target_numbers_K = target_numbers_R[index_K]
        if not len(target_numbers_K):
            return 0.0
        logprobs_K = logprobs_R[index_K.to(logprobs_R.device)]
        if update.coefficients is not None:
            coefficients_K, value = update.coefficients[target_numbers_K], 0.0
        else:
            current_K = logprobs_K.detach().cpu().double()
            output, own = self._inputs.loss(target_numbers_K, current_K, update.old, update.base)
            update.last.put(target_numbers_K, current_K, output)
            tally.add(own)
            coefficients_K, value = output.coefficients, float(output.value)
        (logprobs_K * (coefficients_K * update.scale).to(logprobs_K)).sum().backward()
        return value
