"""The learner: applies train jobs to models that share one base. A step is applied whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...config import LoraOptions, TrainConfig
from ...errors import TrainError
from ...types import TrainResult
from ..checkpoint_files import Checkpoint, CheckpointNote
from ..protocol import JobTrajectory, Progressed, TrainCommand, TrainJob, Warned, read_job
from ..token_file import Fork
from . import checkpoints
from .advantage import Advantages, call_advantages, group_advantages
from .batch import Groups, TrainBatch, make_batch
from .checkpoints import Draft, OptimizerState
from .forks import find_forks
from .loss_scale import LossScale
from .metrics import batch_metrics, fork_metrics, reward_metrics, sampler_mismatch, step_metrics
from .no_signal import NoSignal, equal_rewards, no_gradient
from .optimizer_state import restore_state, state_tensors
from .policy import Policy
from .render import render_trajectory
from .step import Step, StepTotals
from .token_trace import keep, trace

Emit = Callable[[Progressed | Warned], None]
SAVE_STAGES = 5  # adapter, optimizer, generators, on the disk, in place


@dataclass(frozen=True)
class _State:
    """Which checkpoint adapter, optimizer and generators are at. `made`: its request and time, None at step 0."""

    folder: Path
    step: int
    lora: LoraOptions
    made: tuple[str | None, float] | None


class Learner:
    """Holds one policy; `base_model` is written into checkpoints. `emit` gets progress and warnings as they happen."""

    def __init__(self, policy: Policy, base_model: str, emit: Emit, row_limit: int | None = None) -> None:
        """`row_limit`: tokens of a row that fit beside everything else, whatever a job asks for."""
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

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the model that was trained last."""
        return self._optimizer

    def train(self, command: TrainCommand) -> TrainResult:
        """Apply the job, or return the stored result when this request was applied before. Any exception means that
        nothing was applied, and that adapter, optimizer and generators are those of checkpoint `command.step` again.

        Raises TrainError (bad_job, no_scored_groups), NotFiniteError, ConfigError, OSError, torch's errors."""
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
            self._bring(command, newest)
            return self._step(command, job)
        except BaseException:
            self._state = None
            stored = checkpoints.made_by(command.checkpoints, command.model, command.request_id)
            if stored is not None:  # it failed after the rename: the step is applied
                return stored.result()
            self._bring(command, newest)
            raise

    # ---- state

    def _step_at(self, folder: Path) -> int:
        """The step of these checkpoints that adapter and optimizer are at; 0 when they are at another model's."""
        return self._state.step if self._state is not None and self._state.folder == folder.absolute() else 0

    def _check_step(self, command: TrainCommand, newest: Checkpoint | None) -> None:
        on_disk = newest.note.step if newest is not None else 0
        if on_disk != command.step:
            raise TrainError(
                f"model {command.model!r} is at step {on_disk} in {command.checkpoints}, and the request expects step "
                f"{command.step}: restart the server, which reads the steps from the disk",
                reason="bad_job",
            )

    def _bring(self, command: TrainCommand, newest: Checkpoint | None) -> None:
        """Adapter, optimizer and generators of the model's newest checkpoint, or of step 0; nothing when they are here."""
        made = (newest.note.request_id, newest.note.created_at) if newest is not None else None
        wanted = _State(command.checkpoints.absolute(), command.step, command.lora, made)
        if self._state == wanted and self._optimizer is not None:
            checkpoints.set_rng_states(self._generators)  # merging and probing draw from them too
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

    # ---- the step

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
        batch = make_batch(groups, advantages)
        self._check_batch(batch, command.request_id)
        forks = self._forks(groups, advantages)
        metrics |= batch_metrics(batch, command.step) | fork_metrics(forks)
        if (rendered := metrics["calls/rendered_share"]) > config.rendered_warn:
            self._warner(command.request_id)(_rendered_calls(rendered))
        assert self._optimizer is not None  # brought before the step
        for group in self._optimizer.param_groups:
            group.update(betas=config.betas, weight_decay=config.weight_decay)
        # The step's randomness goes on from the checkpoint's and depends on the request's seed.
        torch.manual_seed(int(torch.randint(2**62, (1,))) ^ config.seed)  # pyright: ignore[reportUnknownMemberType]  # torch's own annotations are partial

        def report(phase: str, done: int, total: int) -> None:
            self._emit(Progressed(request_id=command.request_id, phase=phase, done=done, total=total))

        if config.layout == "tree" and self._policy.tree_refused is not None:
            self._warner(command.request_id)(f"layout='tree': plain rows are used instead: {self._policy.tree_refused}")
        outcome = Step(self._policy, self._optimizer, batch, config, self._updates, report, self._scale).run()
        self._check_outcome(outcome)
        self._updates += outcome.updates
        mismatch = sampler_mismatch(batch, outcome)
        metrics |= step_metrics(batch, outcome, mismatch, config.importance_cap, self._updates)
        if self._scale is not None:
            metrics |= {"loss/scale": self._scale.value, "loss/overflows": float(outcome.overflows)}
        if mismatch.kl > config.kl_warn:
            self._warner(command.request_id)(
                f"sampler and learner disagree: KL {mismatch.kl:.3g} nats per token over {mismatch.tokens} tokens, above "
                f"kl_warn={config.kl_warn:g} (largest logprob difference {mismatch.max_difference:.3g}; "
                f"{metrics['calls/stale_share']:.0%} of the calls are from earlier steps): {_same_precision(self._policy)}"
            )
        tokens = trace(command, job, batch, outcome, forks) if command.keep_tokens else None
        if outcome.updates:
            result = self._save(command, job, metrics, started, report)
        else:
            self._state = None  # generators and loss scale have moved: the next job begins at the checkpoint again
            result = self._no_signal(command, metrics, no_gradient(batch, outcome, half=self._scale is not None))
        if tokens is not None:
            keep(command, tokens, self._warner(command.request_id))
        return result.model_copy(update={"warnings": tuple(self._warnings)})

    def _within_limit(self, config: TrainConfig) -> TrainConfig:
        """The job's options, with rows of at most `row_limit` tokens."""
        if self._row_limit is None or config.row_tokens <= self._row_limit:
            return config
        return config.model_copy(update={"row_tokens": self._row_limit})

    def _rendered(self, job: TrainJob, advantages: Advantages, step: int) -> Groups:
        """The job's groups; histories of trajectories that have an advantage are samples."""
        return tuple(
            tuple(
                trajectory
                if value is None
                else render_trajectory(self._policy.tokenizer, self._policy.end_ids, trajectory, step)
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
                f"nothing to train: all {len(outcome.first.kept)} sampled tokens are outside the learner's own top-k, "
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

    # ---- saving

    def _save(
        self,
        command: TrainCommand,
        job: TrainJob,
        metrics: dict[str, float],
        started: float,
        report: Callable[[str, int, int], None],
    ) -> TrainResult:
        assert self._optimizer is not None  # brought before the step
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
        made = (note.request_id, note.created_at)
        self._generators = generators
        self._state = _State(command.checkpoints.absolute(), step, command.lora, made)
        report("save", 5, SAVE_STAGES)
        return result

    def _warner(self, request_id: str) -> Callable[[str], None]:
        def warn(message: str) -> None:
            self._warnings.append(message)
            self._emit(Warned(request_id=request_id, message=message))

        return warn


def _rendered_calls(share: float) -> str:
    return (
        f"{share:.0%} of the calls were rendered from messages, as their choices name no call that was recorded here: keep "
        "`completion.choices[0]` of this server's answers. If they are another endpoint's, and meant to be trained on, "
        "rendered_warn=1 says so"
    )


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
    """Advantages of the job. Raises TrainError when a reward is not finite or no group has enough scored rollouts."""
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
    every: list[JobTrajectory] = [trajectory for group in job.groups for trajectory in group]
    failed = sum(t.failed for t in every)
    unscored = sum(t.reward is None and not t.failed for t in every)
    sizes = sorted({len(group) for group in job.groups})
    return TrainError(
        f"none of the {len(job.groups)} groups has min_group_size={job.config.min_group_size} scored rollouts (group sizes: "
        f"{', '.join(map(str, sizes))}; of {len(every)} rollouts {failed} failed and {unscored} have no reward): run more "
        "rollouts of each scenario, repair the failing ones, or return a reward",
        reason="no_scored_groups",
    )
