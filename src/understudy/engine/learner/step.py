# pyright: reportUnknownMemberType=false
# torch's own annotations are partial
"""One step's arithmetic: passes over the rows, coefficients, optimizer updates. It knows no files and no processes.

Three policies: the sampler (recorded), the old one (the learner at the start of the step), the current one.
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

from ...config import TrainConfig
from ...errors import UnderstudyError
from .batch import TrainBatch
from .cost import ModelShape
from .layouts import ComputeRow, LayoutPlan, plan
from .loss import LOSSES, SEQUENCE_LOSSES, Clip, Gradient, Targets, denominators, importance_weights
from .loss_scale import LossScale
from .row_split import RowSplit
from .target_logprobs import TargetSettings

Report = Callable[[str, int, int], None]
"""Called with (phase, done, total): the phases are plan, old_logprobs, update, save."""


HUGE = 1e6
"""An advantage above it is named when a step is not finite: rewards or weights are of a strange scale."""


class NotFiniteError(UnderstudyError, ArithmeticError):
    """A loss or gradient is NaN or infinite."""


class RowPolicy(Protocol):
    """What a step needs of the policy."""

    tree_refused: str | None
    shape: ModelShape

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]: ...

    def row_logprobs(
        self, row: ComputeRow, targets: TargetSettings, *, adapter: bool = True, logits_chunk: int = 512
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class Scores:
    """Per target of the step, on the CPU: logprob and entropy float64 [N], kept bool [N]. Zeros until `put`."""

    logprobs: Tensor
    entropy: Tensor
    kept: Tensor

    @classmethod
    def empty(cls, size: int) -> Scores:
        zeros = torch.zeros(size, dtype=torch.float64)
        return cls(zeros, zeros.clone(), torch.zeros(size, dtype=torch.bool))

    def put(self, ids_n: Tensor, logprobs_n: Tensor, entropy_n: Tensor, kept_n: Tensor) -> None:
        """Store a row's answers under its target numbers."""
        self.logprobs[ids_n] = logprobs_n.detach().cpu().double()
        self.entropy[ids_n] = entropy_n.detach().cpu().double()
        self.kept[ids_n] = kept_n.cpu()


@dataclass(frozen=True)
class LastUpdate:
    """Per target of the step, on the CPU, float64 [N]: d loss / d logprob and the logprob of the last update that took it
    in; `clipped`, bool [N]: the clip touched it in some update. Zeros until `put`."""

    coefficients: Tensor
    logprobs: Tensor
    clipped: Tensor

    @classmethod
    def empty(cls, size: int) -> LastUpdate:
        zeros = torch.zeros(size, dtype=torch.float64)
        return cls(zeros, zeros.clone(), torch.zeros(size, dtype=torch.bool))

    def put(self, ids_n: Tensor, logprobs_n: Tensor, gradient: Gradient) -> None:
        """Store what an update did to these targets."""
        self.coefficients[ids_n] = gradient.coefficients
        self.logprobs[ids_n] = logprobs_n
        self.clipped[ids_n] |= gradient.clipped


@dataclass
class StepTotals:
    """What a step did. `first`: every target's scores at the start of the step; `last`: what its last update did to each.
    Lists have one number per update."""

    plans: tuple[LayoutPlan, ...]
    first: Scores
    last: LastUpdate
    losses: list[float] = field(default_factory=list[float])
    grad_norms: list[float] = field(default_factory=list[float])
    base_scored: bool = False
    kl_sum: float = 0.0  # of k3 to the base, over `entered`
    clipped: int = 0
    entered: int = 0  # targets that entered a loss, once per epoch
    updates: int = 0
    overflows: int = 0  # updates computed again at a lower loss scale
    learning_rate: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        """Adds the seconds spent inside to `seconds[phase]`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started


class Step:
    """One train step of `policy` on `batch`. `updates_before`: optimizer updates in the model's life so far; `scale`: the
    loss scale of a float16 base, which the step changes."""

    def __init__(
        self,
        policy: RowPolicy,
        optimizer: torch.optim.Optimizer,
        batch: TrainBatch,
        config: TrainConfig,
        updates_before: int,
        report: Report,
        scale: LossScale | None = None,
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
        by_call = self._by_sequence and config.sequence == "call"
        self._sequence = torch.from_numpy(batch.call if by_call else batch.trajectory)
        self._parts = batch.minibatches(config.minibatches)
        divisors = denominators(config.loss, torch.from_numpy(batch.trajectory), config.max_tokens)
        self._weights = len(self._parts) / divisors  # each minibatch estimates the step's gradient, not a part of it
        self._reference: Tensor | None = None
        self._split = RowSplit(policy.shape)

    def run(self) -> StepTotals:
        """All updates of the step; no gradient is left. Raises NotFiniteError before an update that would apply a bad one."""
        try:
            return self._run()
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _run(self) -> StepTotals:
        started = time.monotonic()
        outcome = StepTotals(self._plans(), Scores.empty(len(self._batch)), LastUpdate.empty(len(self._batch)))
        outcome.seconds["plan"] = time.monotonic() - started
        updates = self._config.epochs * len(outcome.plans)
        self._reference = self._base_logprobs(outcome)
        one_pass = updates == 1 and not self._by_sequence
        if not one_pass:
            with outcome.timed("old_logprobs"):
                self._score(outcome.plans, outcome.first, "old_logprobs")
        rows = sum(len(part.rows) for part in outcome.plans) * self._config.epochs
        done = 0
        self._report("update", 0, rows)
        with outcome.timed("update"):
            for _ in range(self._config.epochs):
                for part in outcome.plans:
                    known = None if one_pass or not self._by_sequence else self._sequence_gradient(part, outcome)
                    loss = self._gradient(
                        part, outcome, one_pass, known, lambda i, done=done: self._report("update", done + i, rows)
                    )
                    done += len(part.rows)
                    self._apply(loss, outcome)
        return outcome

    def _gradient(
        self,
        part: LayoutPlan,
        outcome: StepTotals,
        one_pass: bool,
        known: _Known | None,
        report: Callable[[int], None],
    ) -> float:
        """The gradient of a minibatch, on the parameters; its loss. What overflows is computed again at a lower scale, what
        runs out of memory in rows that are split: from the start, as a backward pass that breaks off leaves parts behind."""
        counted = outcome.entered, outcome.clipped, outcome.kl_sum
        while True:
            outcome.entered, outcome.clipped, outcome.kl_sum = counted
            self._optimizer.zero_grad(set_to_none=True)
            loss = 0.0 if known is None else float(known.value)
            try:
                for i, row in enumerate(self._split.rows(part.rows)):
                    loss += self._row(row, outcome, one_pass, known)
                    report(min(i + 1, len(part.rows)))
            except torch.OutOfMemoryError as error:
                self._split.after(error)
                continue
            if self._scale is None:
                return loss
            parameters = self._policy.trainable_parameters().values()
            fits = self._scale.divide([value.grad for value in parameters if value.grad is not None])
            if fits or not math.isfinite(loss) or not self._scale.lower():
                return loss
            outcome.overflows += 1

    def _plans(self) -> tuple[LayoutPlan, ...]:
        plans: list[LayoutPlan] = []
        self._report("plan", 0, len(self._parts))
        for samples in self._parts:
            plans.append(
                plan(
                    samples,
                    self._config.layout,
                    self._config.row_tokens,
                    self._policy.shape,
                    tree_refused=self._policy.tree_refused,
                )
            )
            self._report("plan", len(plans), len(self._parts))
        return tuple(plans)

    # ---- passes without gradients

    @torch.no_grad()
    def _score(self, plans: tuple[LayoutPlan, ...], into: Scores, phase: str | None, *, adapter: bool = True) -> None:
        rows = [row for part in plans for row in part.rows]
        while True:
            try:
                for i, row in enumerate(self._split.rows(rows)):
                    if phase is not None:
                        self._report(phase, min(i, len(rows)), len(rows))
                    answers = self._policy.row_logprobs(
                        row, self._batch.settings, adapter=adapter, logits_chunk=self._config.logits_chunk
                    )
                    into.put(torch.from_numpy(row.target_ids), *answers)
                break
            except torch.OutOfMemoryError as error:
                self._split.after(error)
        if phase is not None:
            self._report(phase, len(rows), len(rows))

    def _base_logprobs(self, outcome: StepTotals) -> Tensor | None:
        """Logprobs under the base, NaN where it keeps no such token; None without a KL term."""
        if self._config.kl_coef == 0:
            return None
        scores = Scores.empty(len(self._batch))
        outcome.base_scored = True
        with outcome.timed("base_logprobs"):
            self._score(outcome.plans, scores, None, adapter=False)
        return torch.where(scores.kept, scores.logprobs, torch.nan)

    # ---- coefficients

    def _targets(self, ids_n: Tensor, old_n: Tensor) -> Targets:
        importance_n = importance_weights(old_n, self._sampler[ids_n], self._config.importance_cap)
        return Targets(
            old_n,
            self._advantages[ids_n],
            self._weights[ids_n],
            importance_n,
            self._sequence[ids_n],
            None if self._reference is None else self._reference[ids_n],
        )

    def _sequence_gradient(self, part: LayoutPlan, outcome: StepTotals) -> _Known:
        """Coefficients of a whole minibatch: the first update is at the old policy, later ones are scored again."""
        scores = outcome.first
        if outcome.updates:
            scores = Scores.empty(len(self._batch))
            self._score((part,), scores, None)
        ids = torch.cat([torch.from_numpy(row.target_ids) for row in part.rows]).sort().values
        ids = ids[outcome.first.kept[ids] & scores.kept[ids]]
        gradient = self._loss(scores.logprobs[ids], self._targets(ids, outcome.first.logprobs[ids]), self._clip)
        coefficients = torch.zeros(len(self._batch), dtype=torch.float64)
        coefficients[ids] = gradient.coefficients
        outcome.last.put(ids, scores.logprobs[ids], gradient)
        self._count(gradient, outcome)
        return _Known(gradient.value, coefficients)

    def _row(self, row: ComputeRow, outcome: StepTotals, one_pass: bool, known: _Known | None) -> float:
        """Forward and backward of one row; its part of the loss."""
        ids_n = torch.from_numpy(row.target_ids)
        logprobs_n, entropy_n, kept_n = self._policy.row_logprobs(
            row, self._batch.settings, logits_chunk=self._config.logits_chunk
        )
        if one_pass:
            outcome.first.put(ids_n, logprobs_n, entropy_n, kept_n)
        kept = (kept_n.cpu() & outcome.first.kept[ids_n]).nonzero()[:, 0]
        ids_m = ids_n[kept]
        if not len(ids_m):
            return 0.0
        now_m = logprobs_n[kept.to(logprobs_n.device)]
        if known is not None:
            coefficients_m, value = known.coefficients[ids_m], 0.0
        else:
            targets = self._targets(ids_m, outcome.first.logprobs[ids_m])
            current_m = now_m.detach().cpu().double()
            gradient = self._loss(current_m, targets, self._clip)
            outcome.last.put(ids_m, current_m, gradient)
            self._count(gradient, outcome)
            coefficients_m, value = gradient.coefficients, float(gradient.value)
        scale = 1.0 if self._scale is None else self._scale.value
        (now_m * (coefficients_m * scale).to(now_m)).sum().backward()
        return value

    def _count(self, gradient: Gradient, outcome: StepTotals) -> None:
        outcome.entered += len(gradient.clipped)
        outcome.clipped += int(gradient.clipped.sum())
        if gradient.kl is not None:
            outcome.kl_sum += float(gradient.kl.sum())

    def _apply(self, loss: float, outcome: StepTotals) -> None:
        """Clip the gradient's norm and update, at the rate that warm-up allows. A gradient of exactly zero is no update:
        AdamW would still follow its momentum and decay the weights."""
        parameters = list(self._policy.trainable_parameters().values())
        if all(parameter.grad is None for parameter in parameters):
            return
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        for name, value in (("loss", loss), ("gradient norm", norm)):
            self._check_finite(name, value, outcome)
        if norm == 0:
            return
        warmup = self._config.warmup_updates
        count = self._updates_before + outcome.updates + 1
        outcome.learning_rate = self._config.learning_rate * (min(1.0, count / warmup) if warmup else 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = outcome.learning_rate
        self._optimizer.step()
        total = torch.stack([parameter.detach().sum() for parameter in parameters]).sum()
        self._check_finite("sum of the adapter's weights", float(total), outcome)
        if self._scale is not None:
            self._scale.applied()
        outcome.updates += 1
        outcome.losses.append(loss)
        outcome.grad_norms.append(norm)

    def _check_finite(self, name: str, value: float, outcome: StepTotals) -> None:
        if not math.isfinite(value):
            largest = float(self._advantages.abs().max())
            scale = f"; the largest advantage times weight is {largest:g}: scale the rewards" if largest > HUGE else ""
            half = (
                ""
                if self._scale is None
                else "; float16 ends at 65504: take --dtype float32, or bfloat16 if the GPU has it"
            )
            raise NotFiniteError(
                f"the {name} of update {outcome.updates + 1} is {value!r}, so the step was not applied: lower "
                f"learning_rate (now {self._config.learning_rate:g}), or look for a broken adapter or base model{scale}{half}"
            )


@dataclass(frozen=True)
class _Known:
    """A sequence-level loss, computed before the rows: its value, and a coefficient for each target of the step."""

    value: Tensor
    coefficients: Tensor
