"""The learner: applies train jobs to models that share one base. A step is applied completely or not at all.

A job's path: `train` reads it, `_restore` loads the model's newest checkpoint, `_step` computes advantages, batch and
updates, `_save` writes the next checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import TrainError
from offbook.base.types import TrainResult

from ..checkpoint_files import Checkpoint, CheckpointNote
from ..protocol import JobTrajectory, Progressed, TrainCommand, TrainJob, Warned, read_job
from ..token_file import Fork
from . import checkpoints, peak_memory
from .checkpoints import Draft, OptimizerState, restore_state, state_tensors
from .metrics import batch_metrics, fork_metrics, reward_metrics, sampler_mismatch, step_metrics
from .model.policy import Policy
from .no_signal import NoSignal, equal_rewards, no_gradient
from .targets.advantage import Advantages, call_advantages, group_advantages
from .targets.batch import Groups, TrainBatch, make_batch
from .targets.choice_masks import ChoiceMasks
from .targets.prompt_forks import find_forks
from .targets.render import RENDERED, render_trajectory, rendered_warning
from .token_trace import make_token_file, store_token_file
from .update.loss_scale import LossScale
from .update.step import Step, StepTotals

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
    `row_tokens` on this machine; None: no bound."""

    def __init__(self, policy: Policy, base_model: str, emit: Emit, row_limit: int | None = None) -> None:
        self._policy = policy
        self._row_limit = row_limit
        self._base_model = base_model
        self._emit = emit
        self._state: _State | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._generators: dict[str, Tensor] = {}
        self._updates = 0
        self._scale: LossScale | None = None
        self._warnings: list[str] = []
        self._refusal_known = False
        self._constraints_known: set[str] = set()
        self._choice_masks = ChoiceMasks(lambda: policy.tokenizer, lambda: policy.end_ids, policy.vocabulary)

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
        stored = checkpoints.made_by(command.checkpoints, command.model, command.request_id)
        if stored is not None:
            return stored.result()
        newest = checkpoints.newest(command.checkpoints, warn, trusted=self._step_at(command.checkpoints))
        self._check_step(command, newest)
        job = _read(command)
        try:
            self._restore(command, newest)
            peak_memory.reset(self._policy.device)
            return self._step(command, job)
        except BaseException:
            self._state = None
            stored = checkpoints.made_by(command.checkpoints, command.model, command.request_id)
            if stored is not None:  # it failed after the rename, so the step is applied
                return stored.result()
            self._restore(command, newest)
            raise

    def _step_at(self, folder: Path) -> int:
        """The step of the loaded adapter if it is of this checkpoint folder, else 0."""
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

    def _step(self, command: TrainCommand, job: TrainJob) -> TrainResult:
        started = time.monotonic()
        config = self._within_limit(job.config)
        advantages = _advantages(job)
        groups = self._rendered(job, advantages, command.step)
        metrics = reward_metrics(groups, advantages)
        if self._policy.tree_difference is not None:
            metrics["layout/probe_difference"] = self._policy.tree_difference
        if advantages.trained_groups == 0:
            return self._no_signal(command, metrics, equal_rewards(advantages))
        batch = make_batch(groups, advantages, self._choice_masks)
        self._check_batch(batch, command.request_id)
        self._warn_of_constraints(batch, command.request_id)
        forks = self._forks(groups, advantages)
        metrics |= batch_metrics(batch, command.step) | fork_metrics(forks)
        if (rendered := metrics["calls/rendered_share"]) > config.rendered_warn:
            self._warner(command.request_id)(rendered_warning(rendered))
        assert self._optimizer is not None  # created by _restore
        for group in self._optimizer.param_groups:
            group.update(betas=config.betas, weight_decay=config.weight_decay)
        # The step's seed depends on the checkpoint's generator state and on the request's seed.
        torch.manual_seed(int(torch.randint(2**62, (1,))) ^ config.seed)  # pyright: ignore[reportUnknownMemberType]  # torch's own annotations are partial

        def report(phase: str, done: int, total: int) -> None:
            self._emit(Progressed(request_id=command.request_id, phase=phase, done=done, total=total))

        self._warn_of_plain_rows(config.layout, command.request_id)
        outcome = Step(self._policy, self._optimizer, batch, config, self._updates, report, self._scale).run()
        self._check_outcome(outcome)
        self._updates += outcome.updates
        mismatch = sampler_mismatch(batch, outcome)
        metrics |= step_metrics(batch, outcome, mismatch, config.importance_cap, self._updates)
        metrics |= peak_memory.memory_metrics(peak_memory.read(self._policy.device))
        if self._scale is not None:
            metrics |= {"loss/scale": self._scale.value, "loss/overflows": float(outcome.overflows)}
        if mismatch is not None and mismatch.kl > config.kl_warn:
            self._warner(command.request_id)(
                f"sampler and learner disagree: KL {mismatch.kl:.3g} nats per token over {mismatch.tokens} tokens, above "
                f"kl_warn={config.kl_warn:g} (largest logprob difference {mismatch.max_difference:.3g}; "
                f"{metrics['calls/stale_share']:.0%} of the calls are from earlier steps): {_same_precision(self._policy)}"
            )
        tokens = make_token_file(command, job, batch, outcome, forks) if command.keep_tokens else None
        if outcome.updates:
            result = self._save(command, job, metrics, started, report)
        else:
            self._state = None  # generators and loss scale changed, so the next job reloads the checkpoint
            result = self._no_signal(command, metrics, no_gradient(batch, outcome, half=self._scale is not None))
        if tokens is not None:
            store_token_file(command, tokens, self._warner(command.request_id))
        return result.model_copy(update={"warnings": tuple(self._warnings)})

    def _within_limit(self, config: TrainConfig) -> TrainConfig:
        """The job's options, with `row_tokens` of at most `row_limit`."""
        if self._row_limit is None or config.row_tokens <= self._row_limit:
            return config
        return config.model_copy(update={"row_tokens": self._row_limit})

    def _rendered(self, job: TrainJob, advantages: Advantages, step: int) -> Groups:
        """The job's groups. Histories of trajectories with an advantage are rendered as samples."""
        return tuple(
            tuple(
                trajectory
                if value is None
                else render_trajectory(self._policy.chat_template, self._policy.end_ids, trajectory, step)
                for trajectory, value in zip(group, values, strict=True)
            )
            if any(trajectory.histories for trajectory in group)
            else group
            for group, values in zip(job.groups, advantages.values, strict=True)
        )

    def _no_signal(self, command: TrainCommand, metrics: dict[str, float], signal: NoSignal) -> TrainResult:
        return TrainResult(
            model=command.model,
            step=command.step,
            applied=False,
            reason="no_signal",
            no_signal=signal.kind,
            why=signal.why,
            metrics=metrics,
            request_id=command.request_id,
            warnings=tuple(self._warnings),
        )

    def _warn_of_plain_rows(self, layout: str, request_id: str) -> None:
        """Warn why trees are refused: once in the life of this process, and whenever the job asks for them."""
        refused = self._policy.tree_refused
        if refused is not None and (layout == "tree" or not self._refusal_known):
            self._warner(request_id)(f"layout={layout!r}: plain rows are used instead of the token tree: {refused}")
        self._refusal_known = refused is not None

    def _warn_of_constraints(self, batch: TrainBatch, request_id: str) -> None:
        """Warn of calls whose constraint the learner does not know: once for each constraint in the life of this
        process."""
        constraints = {sample.constrained for sample in batch.samples if sample.constrained not in (None, RENDERED)}
        new = sorted(str(name) for name in constraints - self._constraints_known)
        self._constraints_known |= {str(name) for name in constraints}
        if new:
            self._warner(request_id)(
                f"{batch.constrained.mean():.0%} of the trained tokens were sampled under {'; '.join(new)}, which the learner "
                "does not reproduce: they are trained, and left out of KL, ratio, clip and entropy"
            )

    def _check_batch(self, batch: TrainBatch, request_id: str) -> None:
        if not len(batch):
            causes = ", ".join(f"{count} {_LEFT_OUT[why]}" for why, count in sorted(batch.left_out.items()) if count)
            raise TrainError(
                f"nothing to train: {len(batch.without_targets)} trajectories have an advantage, and none of them a sampled "
                f"token ({causes or 'they have no calls'}): sample through this server at a temperature above 0"
                f"{', and let train_on= keep calls' if batch.left_out['excluded'] else ''}",
                reason="bad_job",
            )
        largest = max(
            int(max(sample.prompt_ids.max(), sample.completion_ids.max()))
            for sample in batch.samples
            if len(sample.prompt_ids)
        )
        if largest >= self._policy.vocabulary:
            raise TrainError(
                f"token id {largest} is outside the base model's vocabulary of {self._policy.vocabulary}: the calls were "
                "recorded with another base model",
                reason="bad_job",
            )
        if batch.without_targets:
            names = ", ".join(batch.without_targets[:3])
            self._warner(request_id)(
                f"{len(batch.without_targets)} trajectories have a reward and nothing to train ({names}"
                f"{', ...' if len(batch.without_targets) > 3 else ''}): they made no call, none that was "
                "sampled here and kept, or none that train_on= keeps"
            )

    def _check_outcome(self, outcome: StepTotals) -> None:
        if not outcome.entered:
            raise TrainError(
                f"nothing to train: all {len(outcome.old.kept)} sampled tokens are outside the learner's own top-k, "
                "top-p or min-p set: the calls were recorded with another base model, or sampling is too narrow",
                reason="bad_job",
            )

    def _forks(self, groups: Groups, advantages: Advantages) -> list[Fork]:
        tokenizer = self._policy.tokenizer

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids)))  # pyright: ignore[reportUnknownMemberType]  # transformers' tokenizers are only partly typed

        return [
            fork
            for group, values in zip(groups, advantages.values, strict=True)
            for trajectory, value in zip(group, values, strict=True)
            if value is not None
            for fork in find_forks(trajectory, decode, self._policy.end_ids)
        ]

    def _save(
        self,
        command: TrainCommand,
        job: TrainJob,
        metrics: dict[str, float],
        started: float,
        report: Callable[[str, int, int], None],
    ) -> TrainResult:
        assert self._optimizer is not None  # created by _restore
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
                config=job.config.model_dump(mode="json"),
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

    def _warner(self, request_id: str) -> Callable[[str], None]:
        def warn(message: str) -> None:
            self._warnings.append(message)
            self._emit(Warned(request_id=request_id, message=message))

        return warn


def _same_precision(policy: Policy) -> str:
    dtype = str(policy.dtype).removeprefix("torch.")
    if policy.four_bit:
        return (
            "the learner holds the base in 4 bits (load_in_4bit) and the sampler does not; without load_in_4bit both "
            f"have the same base, in dtype {dtype}"
        )
    return f"give both the same dtype (the learner has {dtype})"


_LEFT_OUT = {
    "excluded": "calls that train_on= left out",
    "greedy": "calls at temperature 0",
    "not_trained": "calls cancelled, failed, late or without a sampled token",
}


def _read(command: TrainCommand) -> TrainJob:
    try:
        return read_job(command.job)
    except (OSError, ValueError, KeyError) as error:
        raise TrainError(f"the job in {command.job} cannot be read: {error}", reason="bad_job") from error


def _advantages(job: TrainJob) -> Advantages:
    """Advantages of the job. Raises TrainError if a reward is not finite, or no group has enough scored rollouts."""
    config = job.config
    rewards = [[None if t.failed else t.reward for t in group] for group in job.groups]
    least, divide = config.min_group_size, config.scale_rewards and config.loss != "dr_grpo"
    try:
        if config.call_rewards:
            earned = [[t.call_rewards for t in group] for group in job.groups]
            advantages = call_advantages(rewards, earned, min_group_size=least, divide_by_std=divide)
        else:
            advantages = group_advantages(rewards, min_group_size=least, divide_by_std=divide)
    except ValueError as error:
        raise TrainError(str(error), reason="bad_job") from error
    if advantages.too_few == len(job.groups):
        raise _no_scored_groups(job)
    return advantages


def _no_scored_groups(job: TrainJob) -> TrainError:
    rollouts: list[JobTrajectory] = [trajectory for group in job.groups for trajectory in group]
    failed = sum(t.failed for t in rollouts)
    unscored = sum(t.reward is None and not t.failed for t in rollouts)
    sizes = sorted({len(group) for group in job.groups})
    return TrainError(
        f"none of the {len(job.groups)} groups has min_group_size={job.config.min_group_size} scored rollouts (group sizes: "
        f"{', '.join(map(str, sizes))}; of {len(rollouts)} rollouts {failed} failed and {unscored} have no reward): run more "
        "rollouts of each scenario, repair the failing ones, or return a reward",
        reason="no_scored_groups",
    )
