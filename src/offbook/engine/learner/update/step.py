# pyright: reportUnknownMemberType=false
# torch's own annotations are partial
"""The computation of one train step: plans, the order of its passes, sequence-level losses, optimizer updates.

Four policies: the sampler (its logprobs were recorded), old (the learner at the start of the step), current, and the
base (adapter off, for the KL term). A loss turns logprobs into one coefficient per target, d loss / d logprob. The
backward pass of a row is that of `sum(coefficient * logprob)`, so the gradient of a minibatch is the sum over its rows.
`row_pass.py` computes rows.

Suffixes of tensors: _N all targets of the step, _M those of a minibatch.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from offbook.base.config import TrainConfig
from offbook.base.errors import NotFiniteError, TrainError
from offbook.engine.learner.rows.layouts import LayoutPlan, plan
from offbook.engine.learner.targets.batch import TrainBatch

from .loss import SEQUENCE_LOSSES
from .row_pass import LastUpdate, LossInputs, RowPass, RowPolicy, Scores, Tally, TeacherScores, UpdateState

Report = Callable[[str, int, int], None]
"""Progress callback (phase, done, total). Phases: plan, teacher, old_logprobs, update, evaluate, save."""
RowPasses = Callable[[RowPolicy, LossInputs], RowPass]
"""Makes what computes the rows of a step."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

HUGE = 1e6
"""If a step is not finite, the error names an advantage above this: rewards or weights have an unusual scale."""


FIRST, LOWEST, HIGHEST = 2.0**16, 1.0, 2.0**24
LOWER, GROW = 1 / 4, 2.0
PATIENCE = 50
"""Updates without an overflow after which a larger scale is tried."""


@dataclass
class LossScale:
    """The loss scale of a float16 base (Micikevicius et al. 1710.03740, section 3.2), whose gradients range from 6e-8
    to 65504: the loss is multiplied by it before the backward pass, and the adapter's float32 gradients are divided by it
    afterwards. `clean`: updates since it last changed. Both are saved in checkpoints."""

    value: float = FIRST
    clean: int = 0

    def divide(self, gradients: Sequence[Tensor]) -> bool:
        """Divide the gradients by the scale, in place. Returns whether all are finite."""
        for gradient in gradients:
            gradient.div_(self.value)
        return not gradients or bool(torch.stack([gradient.abs().sum() for gradient in gradients]).isfinite().all())

    def lower(self) -> bool:
        """Lower the scale after an overflow. Returns False if it is already at its minimum."""
        if self.value <= LOWEST:
            return False
        self.value, self.clean = max(LOWEST, self.value * LOWER), 0
        return True

    def applied(self) -> None:
        """Count an update without an overflow, and raise the scale after `PATIENCE` of them."""
        self.clean += 1
        if self.clean >= PATIENCE and self.value < HIGHEST:
            self.value, self.clean = self.value * GROW, 0


@dataclass(kw_only=True)
class StepTotals(Tally):
    """The result of a step, for metrics and the token file. `plans`: one per minibatch. `old`: scores of all targets
    under the old policy. `losses` and `grad_norms` (before clipping) hold one number per update; `seconds` the wall time
    per phase. A target counts once per epoch."""

    plans: tuple[LayoutPlan, ...]
    old: Scores
    last: LastUpdate
    losses: list[float] = field(default_factory=list[float])
    grad_norms: list[float] = field(default_factory=list[float])
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
    base; the step updates it in place. `teacher`: its advantages are added to the batch's. `passes` makes what computes
    the rows."""

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
        passes: RowPasses = RowPass,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._batch = batch
        self._config = config
        self._updates_before = updates_before
        self._report = report
        self._scale = scale
        self._by_sequence = config.loss in SEQUENCE_LOSSES
        self._minibatches = batch.minibatches(config.minibatches)
        self._inputs = LossInputs.of(batch, config, len(self._minibatches), teacher)
        self._rows = passes(policy, self._inputs)
        self._base: Tensor | None = None
        self._plans: tuple[LayoutPlan, ...] = ()

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
        self._plans = self._planned(self._config.row_tokens)
        scores = Scores.empty(len(self._batch))
        self._score_rows(scores, phase, adapter=adapter)
        return scores

    def _run(self) -> StepTotals:
        started = time.monotonic()
        targets = len(self._batch)
        self._plans = self._planned(self._config.row_tokens)
        totals = StepTotals(plans=self._plans, old=Scores.empty(targets), last=LastUpdate.empty(targets))
        totals.seconds["plan"] = time.monotonic() - started
        updates = self._config.epochs * len(totals.plans)
        self._base = self._base_logprobs(totals)
        # Where no later update needs them, the update's own forward pass gives the old logprobs.
        one_pass = self._config.supervised or (updates == 1 and not self._by_sequence)
        if not one_pass:
            with totals.timed("old_logprobs"):
                self._score_rows(totals.old, "old_logprobs")
        rows = sum(len(minibatch.rows) for minibatch in self._plans) * self._config.epochs
        done = 0
        self._report("update", 0, rows)
        with totals.timed("update"):
            for epoch in range(self._config.epochs):
                for number in range(len(self._plans)):
                    precomputed = self._sequence_loss(number, totals) if self._by_sequence else None
                    first = one_pass and epoch == 0

                    def report(count: int, before: int = done) -> None:
                        self._report("update", min(before + count, rows), rows)

                    loss = self._backward(number, totals, first, precomputed, report)
                    done += len(self._plans[number].rows)
                    self._update(loss, totals)
        totals.plans = self._plans
        return totals

    def _backward(
        self,
        number: int,
        totals: StepTotals,
        first: bool,
        precomputed: _SequenceLoss | None,
        report: Callable[[int], None],
    ) -> float:
        """Compute the gradient of minibatch `number`; returns its loss. `first`: this pass also gives the old logprobs. After an
        overflow it starts again at a lower loss scale."""
        coefficients = None if precomputed is None else precomputed.coefficients
        while True:
            scale = 1.0 if self._scale is None else self._scale.value
            update = UpdateState(totals.old, totals.last, self._base, first, coefficients, scale)
            loss, tally = self._fitting(partial(self._backward_rows, number, update, report))
            loss += 0.0 if precomputed is None else float(precomputed.value)
            if self._scale is not None:
                parameters = self._policy.trainable_parameters().values()
                fits = self._scale.divide([value.grad for value in parameters if value.grad is not None])
                if not fits and math.isfinite(loss) and self._scale.lower():
                    totals.overflows += 1
                    continue
            totals.add(tally)
            return loss

    def _backward_rows(self, number: int, update: UpdateState, report: Callable[[int], None]) -> tuple[float, Tally]:
        return self._rows.backward(self._plans[number].rows, update, report)

    def _fitting(self, compute: Callable[[], Result]) -> Result:
        """The result of `compute`, which computes rows of `self._plans`. After an out-of-memory error it runs again, with rows
        that take less memory: neither gradients nor scores depend on them. Raises the error if no row can take less."""
        while True:
            try:
                return compute()
            except (torch.OutOfMemoryError, TrainError) as error:
                if not self._reduce_memory(error):
                    raise
            gc.collect()  # outside of the except block, whose traceback holds the failed pass
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _reduce_memory(self, error: torch.OutOfMemoryError | TrainError) -> bool:
        """Plan rows of half the size. Returns False if rows cannot be smaller, or if the error is of another kind."""
        if isinstance(error, TrainError) and error.reason != "out_of_memory":
            return False
        largest = _largest_row(self._plans)
        smaller = self._planned(largest // 2)
        if _largest_row(smaller) >= largest:
            return False
        self._plans = smaller
        logger.warning(
            "Out of memory: this step's rows have at most %d tokens now, not %d. Lower row_tokens to do so at once",
            *(_largest_row(smaller), largest),
        )
        return True

    def _planned(self, row_tokens: int) -> tuple[LayoutPlan, ...]:
        plans: list[LayoutPlan] = []
        self._report("plan", 0, len(self._minibatches))
        for samples in self._minibatches:
            plans.append(
                plan(
                    samples,
                    self._config.layout,
                    row_tokens,
                    self._policy.shape,
                    tree_refused=self._policy.tree_refused,
                )
            )
            self._report("plan", len(plans), len(self._minibatches))
        return tuple(plans)

    def _score_rows(
        self, into: Scores, phase: str | None, *, minibatch: int | None = None, adapter: bool = True
    ) -> None:
        """Write the current logprobs of all targets, or those of one minibatch, to `into`. `phase`: reported as progress;
        None: silent."""

        def score() -> None:
            plans = self._plans if minibatch is None else (self._plans[minibatch],)
            rows = [row for plan in plans for row in plan.rows]

            def done(count: int) -> None:
                if phase is not None:
                    self._report(phase, count, len(rows))

            self._rows.score(rows, into, done, adapter=adapter)
            done(len(rows))

        self._fitting(score)

    def _base_logprobs(self, totals: StepTotals) -> Tensor | None:
        """Logprobs [N] under the base, NaN where its kept set excludes the token and for constrained calls; None without
        a KL term."""
        if self._config.kl_coef == 0:
            return None
        scores = Scores.empty(len(self._batch))
        with totals.timed("base_logprobs"):
            self._score_rows(scores, None, adapter=False)
        return torch.where(scores.kept & ~self._inputs.constrained, scores.logprobs, torch.nan)

    def _sequence_loss(self, number: int, totals: StepTotals) -> _SequenceLoss:
        """The loss and coefficients of the whole minibatch `number`, for losses whose ratio needs all tokens of a sequence.

        In the first update the current policy is the old one; before later updates the targets are scored again."""
        scores = totals.old
        if totals.updates:
            scores = Scores.empty(len(self._batch))
            self._score_rows(scores, None, minibatch=number)
        rows = self._plans[number].rows
        target_numbers_M = torch.cat([torch.from_numpy(row.target_numbers) for row in rows]).sort().values
        target_numbers_M = target_numbers_M[totals.old.kept[target_numbers_M] & scores.kept[target_numbers_M]]
        current_M = scores.logprobs[target_numbers_M]
        output, tally = self._inputs.loss(target_numbers_M, current_M, totals.old, self._base)
        coefficients_N = torch.zeros(len(self._batch), dtype=torch.float64)
        coefficients_N[target_numbers_M] = output.coefficients
        totals.last.put(target_numbers_M, current_M, output)
        totals.add(tally)
        return _SequenceLoss(output.value, coefficients_N)

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
            largest = float(self._inputs.advantages.abs().max())
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


def _largest_row(plans: Sequence[LayoutPlan]) -> int:
    """Tokens of the largest row, padding included."""
    return max(row.token_ids.size for plan in plans for row in plan.rows)


@dataclass(frozen=True)
class _SequenceLoss:
    """A sequence-level loss, computed before the forward and backward passes that use its coefficients."""

    value: Tensor  # scalar
    coefficients: Tensor  # float64 [N]; 0 outside the minibatch
