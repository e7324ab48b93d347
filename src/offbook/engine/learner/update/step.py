# pyright: reportUnknownMemberType=false
# torch's own annotations are partial
"""The computation of one train step: forward and backward passes over rows, loss coefficients, optimizer updates.

Four policies: the sampler (its logprobs were recorded), old (the learner at the start of the step), current, and the
base (adapter off, for the KL term). A loss turns logprobs into one coefficient per target, d loss / d logprob. The
backward pass of a row is that of `sum(coefficient * logprob)`, so the gradient of a minibatch is the sum over its rows.

Suffixes of tensors: _N all targets of the step, _M those of a minibatch, _R those of a row, _K the kept ones of a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from offbook.base.config import TrainConfig
from offbook.base.errors import NotFiniteError
from offbook.engine.learner.rows.cost import ModelShape
from offbook.engine.learner.rows.layouts import ComputeRow, LayoutPlan, plan
from offbook.engine.learner.rows.row_split import RowSplit
from offbook.engine.learner.targets.batch import TrainBatch
from offbook.engine.learner.targets.target_settings import TargetSettings

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
from .loss_scale import LossScale

Report = Callable[[str, int, int], None]
"""Progress callback (phase, done, total). Phases: plan, teacher, old_logprobs, update, evaluate, save."""

HUGE = 1e6
"""If a step is not finite, the error names an advantage above this: rewards or weights have an unusual scale."""


class RowPolicy(Protocol):
    """The interface of `Policy` that a step uses. `tree_refused`: why the model cannot train on trees, else None.
    `unrecomputed_tokens`: see `Policy`."""

    tree_refused: str | None
    shape: ModelShape
    unrecomputed_tokens: int

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
class StepTotals:
    """The result of a step, for metrics and the token file. `plans`: one per minibatch. `old`: scores of all targets
    under the old policy. `losses` and `grad_norms` (before clipping) hold one number per update; `seconds` the wall time
    per phase."""

    plans: tuple[LayoutPlan, ...]
    old: Scores
    last: LastUpdate
    losses: list[float] = field(default_factory=list[float])
    grad_norms: list[float] = field(default_factory=list[float])
    kl_sum: float = 0.0  # sum of k3 to the base
    kl_counted: int = 0  # targets in `kl_sum`
    clipped: int = 0  # of `ratios`: those that the clip affected
    ratios: int = 0  # of `entered`: those with a ratio, which constrained calls have not
    entered: int = 0  # targets that entered a loss, counted once per epoch
    updates: int = 0
    overflows: int = 0  # repeated gradient computations, at a lower loss scale
    learning_rate: float = 0.0  # of the last update
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        """Add the seconds spent in the block to `seconds[phase]`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started


class Step:
    """One train step of `policy` on `batch`: `epochs` x `minibatches` optimizer updates.

    `updates_before`: optimizer updates of the model's earlier steps, for warm-up. `scale`: the loss scale of a float16
    base; the step updates it in place. `teacher`: its advantages are added to the batch's."""

    def __init__(
        self,
        policy: RowPolicy,
        optimizer: torch.optim.Optimizer,
        batch: TrainBatch,
        config: TrainConfig,
        updates_before: int,
        report: Report,
        scale: LossScale | None = None,
        teacher: TeacherScores | None = None,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._batch = batch
        self._config = config
        self._updates_before = updates_before
        self._report = report
        self._scale = scale
        self._loss = LOSSES[config.loss]
        self._by_sequence = config.loss in SEQUENCE_LOSSES
        self._clip = Clip(config.epsilon, config.upper_clip, config.kl_coef)
        self._sampler = torch.from_numpy(batch.sampler)
        self._advantages = torch.from_numpy(batch.advantages)
        self._constrained = torch.from_numpy(batch.constrained)
        by_call = self._by_sequence and config.sequence == "call"
        self._sequence = torch.from_numpy(batch.call if by_call else batch.trajectory)
        self._minibatches = batch.minibatches(config.minibatches)
        if config.supervised:
            divisors_N = supervised_divisors(torch.from_numpy(batch.call), config.divisor)
        else:
            divisors_N = divisors(config.loss, torch.from_numpy(batch.trajectory), config.max_tokens)
        self._inverse_divisors = len(self._minibatches) / divisors_N  # a minibatch estimates the step's gradient
        self._base: Tensor | None = None
        self._teacher = teacher
        self._split = RowSplit(policy)

    def run(self) -> StepTotals:
        """Do all updates of the step, then clear the gradients.

        Raises NotFiniteError if a loss, gradient norm or weight is not finite. The adapter may have changed: the
        caller restores the last checkpoint."""
        try:
            return self._run()
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def scores(self, phase: str, *, adapter: bool = True) -> Scores:
        """The logprobs of all targets under the policy as it is, or the base. `phase`: reported as progress."""
        scores = Scores.empty(len(self._batch))
        self._score_rows(self._plans(), scores, phase, adapter=adapter)
        return scores

    def _run(self) -> StepTotals:
        started = time.monotonic()
        totals = StepTotals(self._plans(), Scores.empty(len(self._batch)), LastUpdate.empty(len(self._batch)))
        totals.seconds["plan"] = time.monotonic() - started
        updates = self._config.epochs * len(totals.plans)
        self._base = self._base_logprobs(totals)
        # Where no later update needs them, the update's own forward pass gives the old logprobs.
        one_pass = self._config.supervised or (updates == 1 and not self._by_sequence)
        if not one_pass:
            with totals.timed("old_logprobs"):
                self._score_rows(totals.plans, totals.old, "old_logprobs")
        rows = sum(len(minibatch.rows) for minibatch in totals.plans) * self._config.epochs
        done = 0
        self._report("update", 0, rows)
        with totals.timed("update"):
            for _ in range(self._config.epochs):
                for minibatch in totals.plans:
                    precomputed = self._sequence_loss(minibatch, totals) if self._by_sequence else None
                    loss = self._backward(
                        minibatch, totals, one_pass, precomputed, lambda i, n=done: self._report("update", n + i, rows)
                    )
                    done += len(minibatch.rows)
                    self._update(loss, totals)
        return totals

    def _backward(
        self,
        minibatch: LayoutPlan,
        totals: StepTotals,
        one_pass: bool,
        precomputed: _SequenceLoss | None,
        report: Callable[[int], None],
    ) -> float:
        """Accumulate the gradient of a minibatch, row by row; returns its loss.

        After an overflow it starts again at a lower loss scale; after out-of-memory, with split rows. It always starts
        from zero, because an aborted backward pass leaves partial gradients."""
        counts = totals.entered, totals.ratios, totals.clipped, totals.kl_counted, totals.kl_sum
        while True:
            totals.entered, totals.ratios, totals.clipped, totals.kl_counted, totals.kl_sum = counts
            self._optimizer.zero_grad(set_to_none=True)
            loss = 0.0 if precomputed is None else float(precomputed.value)
            try:
                for i, row in enumerate(self._split.rows(minibatch.rows)):
                    loss += self._backward_row(row, totals, one_pass, precomputed)
                    report(min(i + 1, len(minibatch.rows)))
            except torch.OutOfMemoryError as error:
                self._split.after(error)
                continue
            if self._scale is None:
                return loss
            parameters = self._policy.trainable_parameters().values()
            fits = self._scale.divide([value.grad for value in parameters if value.grad is not None])
            if fits or not math.isfinite(loss) or not self._scale.lower():
                return loss
            totals.overflows += 1

    def _plans(self) -> tuple[LayoutPlan, ...]:
        plans: list[LayoutPlan] = []
        self._report("plan", 0, len(self._minibatches))
        for samples in self._minibatches:
            plans.append(
                plan(
                    samples,
                    self._config.layout,
                    self._config.row_tokens,
                    self._policy.shape,
                    tree_refused=self._policy.tree_refused,
                )
            )
            self._report("plan", len(plans), len(self._minibatches))
        return tuple(plans)

    @torch.no_grad()
    def _score_rows(
        self, plans: tuple[LayoutPlan, ...], into: Scores, phase: str | None, *, adapter: bool = True
    ) -> None:
        """Write the current logprobs of the targets of `plans` to `into`. `phase`: reported as progress; None:
        silent."""
        rows = [row for minibatch in plans for row in minibatch.rows]
        while True:
            try:
                for i, row in enumerate(self._split.rows(rows)):
                    if phase is not None:
                        self._report(phase, min(i, len(rows)), len(rows))
                    scores_R = self._policy.row_logprobs(
                        row, self._batch.settings, adapter=adapter, logits_chunk=self._config.logits_chunk
                    )
                    into.put(torch.from_numpy(row.target_numbers), *scores_R)
                break
            except torch.OutOfMemoryError as error:
                self._split.after(error)
        if phase is not None:
            self._report(phase, len(rows), len(rows))

    def _base_logprobs(self, totals: StepTotals) -> Tensor | None:
        """Logprobs [N] under the base, NaN where its kept set excludes the token and for constrained calls; None without
        a KL term."""
        if self._config.kl_coef == 0:
            return None
        scores = Scores.empty(len(self._batch))
        with totals.timed("base_logprobs"):
            self._score_rows(totals.plans, scores, None, adapter=False)
        return torch.where(scores.kept & ~self._constrained, scores.logprobs, torch.nan)

    def _targets(self, target_numbers_K: Tensor, old_K: Tensor, current_K: Tensor) -> Targets:
        """The inputs of a loss. A constrained call was sampled from another distribution than the learner's, whose ratio
        would say nothing: it is 1, and never clipped."""
        importance_K = importance_weights(old_K, self._sampler[target_numbers_K], self._config.importance_cap)
        advantages_K = self._advantages[target_numbers_K]
        if self._teacher is not None:
            own_K = teacher_advantages(self._teacher.logprobs[target_numbers_K], old_K)
            advantages_K = advantages_K + self._teacher.weights[target_numbers_K] * own_K
        return Targets(
            torch.where(self._constrained[target_numbers_K], current_K, old_K),
            advantages_K,
            self._inverse_divisors[target_numbers_K],
            importance_K,
            self._sequence[target_numbers_K],
            None if self._base is None else self._base[target_numbers_K],
        )

    def _sequence_loss(self, minibatch: LayoutPlan, totals: StepTotals) -> _SequenceLoss:
        """The loss and coefficients of a whole minibatch, for losses whose ratio needs all tokens of a sequence.

        In the first update the current policy is the old one; before later updates the targets are scored again."""
        scores = totals.old
        if totals.updates:
            scores = Scores.empty(len(self._batch))
            self._score_rows((minibatch,), scores, None)
        target_numbers_M = torch.cat([torch.from_numpy(row.target_numbers) for row in minibatch.rows]).sort().values
        target_numbers_M = target_numbers_M[totals.old.kept[target_numbers_M] & scores.kept[target_numbers_M]]
        current_M = scores.logprobs[target_numbers_M]
        targets = self._targets(target_numbers_M, totals.old.logprobs[target_numbers_M], current_M)
        output = self._loss(current_M, targets, self._clip)
        coefficients_N = torch.zeros(len(self._batch), dtype=torch.float64)
        coefficients_N[target_numbers_M] = output.coefficients
        totals.last.put(target_numbers_M, current_M, output)
        self._count_targets(target_numbers_M, targets, output, totals)
        return _SequenceLoss(output.value, coefficients_N)

    def _backward_row(
        self, row: ComputeRow, totals: StepTotals, one_pass: bool, precomputed: _SequenceLoss | None
    ) -> float:
        """Forward and backward pass of one row; returns its part of the loss.

        `one_pass`: a target's first logprobs here are also the old policy's. A target enters the loss if its token is in
        the kept set of both the old and the current policy."""
        target_numbers_R = torch.from_numpy(row.target_numbers)
        logprobs_R, entropy_R, kept_R = self._policy.row_logprobs(
            row, self._batch.settings, logits_chunk=self._config.logits_chunk
        )
        if one_pass and totals.updates < len(totals.plans):
            totals.old.put(target_numbers_R, logprobs_R, entropy_R, kept_R)
        index_K = (kept_R.cpu() & totals.old.kept[target_numbers_R]).nonzero()[:, 0]
        target_numbers_K = target_numbers_R[index_K]
        if not len(target_numbers_K):
            return 0.0
        logprobs_K = logprobs_R[index_K.to(logprobs_R.device)]
        if precomputed is not None:
            coefficients_K, value = precomputed.coefficients[target_numbers_K], 0.0
        else:
            current_K = logprobs_K.detach().cpu().double()
            targets = self._targets(target_numbers_K, totals.old.logprobs[target_numbers_K], current_K)
            output = self._loss(current_K, targets, self._clip)
            totals.last.put(target_numbers_K, current_K, output)
            self._count_targets(target_numbers_K, targets, output, totals)
            coefficients_K, value = output.coefficients, float(output.value)
        scale = 1.0 if self._scale is None else self._scale.value
        (logprobs_K * (coefficients_K * scale).to(logprobs_K)).sum().backward()
        return value

    def _count_targets(self, target_numbers: Tensor, targets: Targets, output: LossOutput, totals: StepTotals) -> None:
        free = ~self._constrained[target_numbers]
        totals.entered += len(free)
        totals.ratios += int(free.sum())
        totals.clipped += int((output.clipped & free).sum())
        if output.kl is not None and targets.base is not None:
            totals.kl_counted += int((~torch.isnan(targets.base)).sum())
            totals.kl_sum += float(output.kl.sum())

    def _update(self, loss: float, totals: StepTotals) -> None:
        """Clip the gradient's norm and update, at the rate after warm-up. A gradient of exactly zero is skipped:
        AdamW would still move along its momentum and decay the weights."""
        parameters = list(self._policy.trainable_parameters().values())
        if all(parameter.grad is None for parameter in parameters):
            return
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        for name, value in (("loss", loss), ("gradient norm", norm)):
            self._check_finite(name, value, totals)
        if norm == 0:
            return
        warmup = self._config.warmup_updates
        count = self._updates_before + totals.updates + 1
        totals.learning_rate = self._config.learning_rate * (min(1.0, count / warmup) if warmup else 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = totals.learning_rate
        self._optimizer.step()
        total = torch.stack([parameter.detach().sum() for parameter in parameters]).sum()
        self._check_finite("sum of the adapter's weights", float(total), totals)
        if self._scale is not None:
            self._scale.applied()
        totals.updates += 1
        totals.losses.append(loss)
        totals.grad_norms.append(norm)

    def _check_finite(self, name: str, value: float, totals: StepTotals) -> None:
        if not math.isfinite(value):
            largest = float(self._advantages.abs().max())
            scale = f"; the largest advantage times weight is {largest:g}: scale the rewards" if largest > HUGE else ""
            half = (
                ""
                if self._scale is None
                else "; float16 ends at 65504: take --dtype float32, or bfloat16 if the GPU has it"
            )
            raise NotFiniteError(
                f"the {name} of update {totals.updates + 1} is {value!r}, so the step was not applied: lower "
                f"learning_rate (now {self._config.learning_rate:g}), or look for a broken adapter or base model{scale}{half}"
            )


@dataclass(frozen=True)
class _SequenceLoss:
    """A sequence-level loss, computed before the forward and backward passes that use its coefficients."""

    value: Tensor  # scalar
    coefficients: Tensor  # float64 [N]; 0 outside the minibatch
