"""The learner: applies train jobs to models that share one base. A step is applied completely or not at all.

A job's path: `train` reads it, `_restore` loads the model's newest checkpoint, `_step` decides what the job trains
(`selection.py`), computes the updates (`update/step.py`) and records them: metrics, checkpoint, token file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offbook.base.config import SELF, LoraOptions, TrainConfig
from offbook.base.errors import TrainError
from offbook.base.types import TrainResult

from ..checkpoint_files import Checkpoint, CheckpointNote
from ..protocol import Progressed, TrainCommand, TrainJob, Warned, read_job
from . import checkpoints
from .checkpoints import Draft, OptimizerState, restore_state, state_tensors
from .metrics import (
    cross_entropy_metrics,
    make_token_file,
    memory_metrics,
    reset_memory_peaks,
    sampler_mismatch,
    selection_metrics,
    step_metrics,
    store_token_file,
    teacher_metrics,
)
from .model.policy import Policy
from .selection import Selection, Selector, Warn, no_gradient, no_selection
from .targets.batch import TrainBatch
from .teacher import endpoint_scores, load_teacher, teacher_scores, with_hint
from .update.row_pass import RowPass, TeacherScores
from .update.step import LossScale, Report, RowPasses, Step, StepTotals

Emit = Callable[[Progressed | Warned], None]
SAVE_STAGES = 5  # adapter, optimizer, generators, synced to disk, renamed into place


@dataclass(frozen=True)
class _State:
    """The checkpoint that adapter, optimizer and generators currently equal."""

    folder: Path
    step: int
    lora: LoraOptions
    origin: tuple[str | None, float] | None  # request id and creation time of the checkpoint; None at step 0


class Learner:
    """Trains the adapters of one base, one job at a time.

    `base_model`: its name in checkpoints. `emit` receives progress and warnings. `row_limit`: upper bound of a job's
    `row_tokens` on this machine; None: no bound. `passes` makes what computes a step's rows."""

    def __init__(
        self,
        policy: Policy,
        base_model: str,
        emit: Emit,
        row_limit: int | None = None,
        passes: RowPasses = RowPass,
    ) -> None:
        self._policy = policy
        self._row_limit = row_limit
        self._passes = passes
        self._base_model = base_model
        self._emit = emit
        self._state: _State | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._generators: dict[str, Tensor] = {}
        self._updates = 0
        self._scale: LossScale | None = None
        self._warnings: list[str] = []
        self._refusal_known = False
        self._selector = Selector(policy)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the model that is loaded; None before the first job."""
        return self._optimizer

    def train(self, command: TrainCommand) -> TrainResult:
        """Apply the job. If this request was applied before, return the stored result.

        Raises TrainError (bad_job, no_scored_groups), NotFiniteError, ConfigError, OSError, torch's errors. After an
        exception nothing was applied, and adapter, optimizer and generators equal checkpoint `command.step`."""
        self._warnings = []
        warn = self._warner(command.request_id)
        checkpoints.remove_scratch(command.checkpoints)
        stored = checkpoints.of_request(command.checkpoints, command.model, command.request_id)
        if stored is not None:
            return stored.result()
        newest = checkpoints.newest(command.checkpoints, warn, trusted=self._step_at(command.checkpoints))
        self._check_step(command, newest)
        job = _read(command)
        try:
            self._restore(command, newest)
            reset_memory_peaks(self._policy.device)
            return self._step(command, job, newest)
        except BaseException:
            self._state = None
            stored = checkpoints.of_request(command.checkpoints, command.model, command.request_id)
            if stored is not None:  # it failed after the rename, so the step is applied
                return stored.result()
            self._restore(command, newest)
            raise

    def _step_at(self, folder: Path) -> int:
        return self._state.step if self._state is not None and self._state.folder == folder.absolute() else 0

    def _check_step(self, command: TrainCommand, newest: Checkpoint | None) -> None:
        on_disk = newest.note.step if newest is not None else 0
        if on_disk != command.step:
            raise TrainError(
                f"model {command.model!r} is at step {on_disk} in {command.checkpoints}, and the request expects step "
                f"{command.step}: restart the server, which reads the steps from the disk",
                reason="bad_job",
            )

    def _restore(self, command: TrainCommand, newest: Checkpoint | None) -> None:
        """Load adapter, optimizer and generators of the newest checkpoint, or initialise them at step 0. If the adapter
        and optimizer are already those, only reset the generators."""
        origin = (newest.note.request_id, newest.note.created_at) if newest is not None else None
        wanted = _State(command.checkpoints.absolute(), command.step, command.lora, origin)
        if self._state == wanted and self._optimizer is not None:
            checkpoints.set_rng_states(self._generators)  # merges and probes advance them
            return
        self._state = self._optimizer = None
        if newest is None or self._policy.lora != command.lora:
            self._policy.reset_adapter(command.lora)
        parameters = self._policy.trainable_parameters()
        optimizer = torch.optim.AdamW(parameters.values())
        self._updates = 0
        self._scale = LossScale() if self._policy.dtype == torch.float16 else None
        if newest is None:
            torch.manual_seed(command.lora.seed)  # pyright: ignore[reportUnknownMemberType]  # torch's own annotations are partial
        else:
            self._policy.load_adapter(newest.path)
            saved = checkpoints.load_optimizer(newest.path)
            restore_state(optimizer, parameters, saved.tensors)
            self._updates = saved.updates
            self._scale = self._scale and (saved.scale or self._scale)
            checkpoints.set_rng_states(checkpoints.load_rng(newest.path))
        self._generators = checkpoints.rng_states()
        self._optimizer, self._state = optimizer, wanted

    def _step(self, command: TrainCommand, job: TrainJob, newest: Checkpoint | None) -> TrainResult:
        started = time.monotonic()
        warn = self._warner(command.request_id)
        selection = self._selector.select(job, command.step, warn)
        if selection.batch is None:
            metrics = selection_metrics(selection, command.step, self._policy)
            return no_selection(selection, job.config.min_reward).result(command, metrics, self._warnings)
        config = job.config
        if self._row_limit is not None and config.row_tokens > self._row_limit:
            config = config.model_copy(update={"row_tokens": self._row_limit})
        if job.evaluate:
            return self._evaluate(command, config, selection, selection.batch)
        teacher = self._teacher_scores(command, config, selection.batch, newest)
        totals = self._compute(selection.batch, config, command.request_id, teacher)
        return self._record(command, job, selection, selection.batch, totals, started, teacher)

    def _teacher_scores(
        self, command: TrainCommand, config: TrainConfig, batch: TrainBatch, newest: Checkpoint | None
    ) -> TeacherScores | None:
        """The scores of the job's teacher, None without one. Leaves adapter, optimizer and generators as they are."""
        if config.distill is None:
            return None
        assert self._optimizer is not None  # created by _restore
        shown = batch if config.distill.hint is None else with_hint(batch, config.distill.hint, self._policy)
        report = self._reporter(command.request_id)
        if (endpoint := config.distill.endpoint) is not None:
            scores = endpoint_scores(endpoint, shown, self._policy.tokenizer, partial(report, "teacher"))
            return teacher_scores(scores, batch, config.distill.weight)
        if command.teacher is not None:
            self._state = None
            load_teacher(self._policy, command.teacher)
        step = Step(self._policy, self._optimizer, shown, config, self._updates, report, passes=self._passes)
        scores = step.scores("teacher", adapter=command.teacher is not None or config.distill.teacher == SELF)
        if command.teacher is not None:
            self._restore(command, newest)
        return teacher_scores(scores, batch, config.distill.weight)

    def _evaluate(
        self, command: TrainCommand, config: TrainConfig, selection: Selection, batch: TrainBatch
    ) -> TrainResult:
        """The loss of the job's targets under the loaded adapter, which stays as it is."""
        assert self._optimizer is not None  # created by _restore
        started, report = time.monotonic(), self._reporter(command.request_id)
        step = Step(self._policy, self._optimizer, batch, config, self._updates, report, passes=self._passes)
        scores = step.scores("evaluate")
        metrics = selection_metrics(selection, command.step, self._policy) | cross_entropy_metrics(scores)
        metrics["seconds/evaluate"] = time.monotonic() - started
        return TrainResult(
            model=command.model,
            step=command.step,
            applied=False,
            reason="evaluated",
            metrics=metrics,
            request_id=command.request_id,
            warnings=tuple(self._warnings),
        )

    def _compute(
        self, batch: TrainBatch, config: TrainConfig, request_id: str, teacher: TeacherScores | None
    ) -> StepTotals:
        """Update the adapter. Raises TrainError if no target is in the learner's own kept set, and as `Step.run`."""
        assert self._optimizer is not None  # created by _restore
        for group in self._optimizer.param_groups:
            group.update(betas=config.betas, weight_decay=config.weight_decay)
        # The step's seed depends on the checkpoint's generator state and on the request's seed.
        torch.manual_seed(int(torch.randint(2**62, (1,))) ^ config.seed)  # pyright: ignore[reportUnknownMemberType]  # torch's own annotations are partial
        self._warn_of_plain_rows(config.layout, request_id)
        report = self._reporter(request_id)
        totals = Step(
            self._policy, self._optimizer, batch, config, self._updates, report, self._scale, teacher, self._passes
        ).run()
        if not totals.entered:
            raise TrainError(
                f"nothing to train: all {len(batch)} sampled tokens are outside the learner's own top-k, top-p or min-p set: "
                "the calls were recorded with another base model, or sampling is too narrow",
                reason="bad_job",
            )
        self._updates += totals.updates
        return totals

    def _record(
        self,
        command: TrainCommand,
        job: TrainJob,
        selection: Selection,
        batch: TrainBatch,
        totals: StepTotals,
        started: float,
        teacher: TeacherScores | None,
    ) -> TrainResult:
        warn = self._warner(command.request_id)
        mismatch = sampler_mismatch(batch, totals)
        metrics = selection_metrics(selection, command.step, self._policy)
        metrics |= step_metrics(batch, totals, mismatch, job.config.importance_cap, self._updates)
        if teacher is not None:
            metrics |= teacher_metrics(totals, teacher)
        if job.config.supervised:
            metrics |= cross_entropy_metrics(totals.old)
        metrics |= memory_metrics(self._policy.device)
        if self._scale is not None:
            metrics |= {"loss/scale": self._scale.value, "loss/overflows": float(totals.overflows)}
        if mismatch is not None and mismatch.kl > job.config.kl_warn:
            warn(mismatch.warning(job.config.kl_warn, metrics["calls/stale_share"], self._policy))
        tokens = make_token_file(command, job, batch, totals) if command.keep_tokens else None
        if totals.updates:
            result = self._save(command, job.config, metrics, started)
        else:
            self._state = None  # generators and loss scale changed, so the next job reloads the checkpoint
            signal = no_gradient(batch, totals, teacher, half=self._scale is not None)
            result = signal.result(command, metrics, self._warnings)
        if tokens is not None:
            store_token_file(command, tokens, warn)
        return result.model_copy(update={"warnings": tuple(self._warnings)})

    def _warn_of_plain_rows(self, layout: str, request_id: str) -> None:
        """Warn why trees are refused: once in the life of this process, and whenever the job asks for them."""
        refused = self._policy.tree_refused
        if refused is not None and (layout == "tree" or not self._refusal_known):
            self._warner(request_id)(f"layout={layout!r}: plain rows are used instead of the token tree: {refused}")
        self._refusal_known = refused is not None

    def _save(
        self, command: TrainCommand, config: TrainConfig, metrics: dict[str, float], started: float
    ) -> TrainResult:
        assert self._optimizer is not None  # created by _restore
        report = self._reporter(command.request_id)
        saving, step = time.monotonic(), command.step + 1
        report("save", 0, SAVE_STAGES)
        with Draft(command.checkpoints, step) as draft:
            self._policy.save_adapter(draft.path)
            report("save", 1, SAVE_STAGES)
            tensors = state_tensors(self._optimizer, self._policy.trainable_parameters())
            draft.write_optimizer(OptimizerState(tensors, self._updates, self._scale))
            report("save", 2, SAVE_STAGES)
            generators = checkpoints.rng_states()
            draft.write_rng(generators)
            report("save", 3, SAVE_STAGES)
            draft.sync()
            now = time.monotonic()
            metrics |= {"seconds/save": now - saving, "seconds/total": now - started}
            result = TrainResult(
                model=command.model,
                step=step,
                applied=True,
                metrics=metrics,
                checkpoint=str(draft.target),
                request_id=command.request_id,
                warnings=tuple(self._warnings),
            )
            note = CheckpointNote(
                step=step,
                request_id=command.request_id,
                model=command.model,
                base_model=self._base_model,
                lora=command.lora,
                config=config.model_dump(mode="json"),
                metrics=metrics,
                result=result,
                created_at=time.time(),
            )
            report("save", 4, SAVE_STAGES)
            draft.commit(note)
        self._generators = generators
        origin = (note.request_id, note.created_at)
        self._state = _State(command.checkpoints.absolute(), step, command.lora, origin)
        report("save", 5, SAVE_STAGES)
        return result

    def _reporter(self, request_id: str) -> Report:
        def report(phase: str, done: int, total: int) -> None:
            self._emit(Progressed(request_id=request_id, phase=phase, done=done, total=total))

        return report

    def _warner(self, request_id: str) -> Warn:
        def warn(message: str) -> None:
            self._warnings.append(message)
            self._emit(Warned(request_id=request_id, message=message))

        return warn


def _read(command: TrainCommand) -> TrainJob:
    try:
        return read_job(command.job)
    except (OSError, ValueError, KeyError) as error:
        raise TrainError(f"the job in {command.job} cannot be read: {error}", reason="bad_job") from error
