"""Decides what a job trains: the advantages of its rollouts, and the targets that they reach; and says why
a job with scored groups changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from offbook.base.config import TrainConfig
from offbook.base.errors import TrainError
from offbook.base.types import NoSignalKind, TrainResult

from ..protocol import JobTrajectory, TrainCommand, TrainJob
from .model.policy import Policy
from .targets.advantage import (
    Advantages,
    GroupClass,
    call_advantages,
    good_advantages,
    group_advantages,
    supervised_advantages,
    with_teacher,
    without,
)
from .targets.batch import ChoiceMasks, Groups, TrainBatch, make_batch
from .targets.render import RENDERED, Renderer, last_turns, rendered_warning
from .update.row_pass import TeacherScores
from .update.step import StepTotals

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Selection:
    """What a job trains. `groups`: the job's, with rendered histories as samples. `batch`: None if no group has an
    advantage, or if only others called the model (`uncalled` have an advantage).
    `skipped`: why messages were not rendered."""

    config: TrainConfig
    groups: Groups
    advantages: Advantages
    batch: TrainBatch | None = None
    skipped: tuple[str, ...] = ()
    uncalled: int = 0

    @property
    def classes(self) -> tuple[GroupClass, ...]:
        """The class of each of the job's own groups. Replayed rollouts, a group each, follow these."""
        trained = set(self.batch.trajectories if self.batch is not None else ())
        return tuple(
            GroupClass.WITHOUT_TARGETS
            if was is GroupClass.TRAINED and not any(trajectory.id in trained for trajectory in group)
            else was
            for was, group in zip(self.advantages.classes, self.groups, strict=True)
            if not any(trajectory.replayed for trajectory in group)
        )


class Selector:
    """Selects for one policy. Names each unknown constraint of calls once in its life."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._choice_masks = ChoiceMasks(lambda: policy.tokenizer, lambda: policy.end_ids, policy.vocabulary)
        self._constraints_known: set[str] = set()

    def select(self, job: TrainJob, step: int, warn: Warn) -> Selection:
        """What the job trains. `step`: the model's current one. Warns of rollouts and calls that are not trained as
        their sender may think. Raises TrainError (bad_job, no_scored_groups), ConfigError."""
        advantages = _advantages(job)
        _warn_of_small_groups(job, warn)
        groups, skipped = self._rendered(job, advantages, step)
        chosen = job.config.imitates_the_good
        if chosen:
            good = _good(groups, advantages)
            usable = any(sample.weight for rollout in good for sample in rollout.samples)
            if not good or (groups[-1][0].replayed and not usable):  # earlier rollouts alone make no step
                return Selection(job.config, groups, advantages, uncalled=len(good))
        nobody = not advantages.count(GroupClass.TRAINED)
        if nobody and (advantages.count(GroupClass.TRUNCATED) or not job.config.supervised):
            return Selection(job.config, groups, advantages)
        if job.config.supervised:
            batch = make_batch(groups, advantages, supervised=True)
            _warn_of_skipped(skipped, warn)
        else:
            batch = make_batch(groups, advantages, self._choice_masks)
        if chosen or not job.config.supervised:
            called = any(trajectory.samples for group in groups for trajectory in group)
            if called and not len(batch) and not any(batch.left_out.values()) and not skipped:
                return Selection(job.config, groups, advantages, uncalled=len(batch.without_targets))
        self._check(batch, job.config.supervised, skipped, warn)
        if not job.config.supervised:
            self._warn_of_constraints(batch, warn)
            if batch.rendered_share > job.config.rendered_warn:
                warn(rendered_warning(batch.rendered_share))
        return Selection(job.config, groups, advantages, batch, skipped)

    def _rendered(self, job: TrainJob, advantages: Advantages, step: int) -> tuple[Groups, tuple[str, ...]]:
        """The job's groups, with the histories of trajectories that have an advantage as samples; and why messages were
        skipped."""
        config, skipped = job.config, list[str]()
        last = config.supervised and config.turns == "last"

        def rendered(trajectory: JobTrajectory) -> JobTrajectory:
            trajectory = last_turns(trajectory) if last else trajectory
            if not trajectory.histories:
                return trajectory
            policy, skip = self._policy, config.supervised and config.skip_bad
            renderer = Renderer(policy.chat_template, policy.end_ids, policy.longest_context, skip)
            whole, bad = renderer.trajectory(trajectory, step)
            skipped.extend(bad)
            return whole

        groups = tuple(
            tuple(
                trajectory if value is None else rendered(trajectory)
                for trajectory, value in zip(group, values, strict=True)
            )
            for group, values in zip(job.groups, advantages.values, strict=True)
        )
        return groups, tuple(skipped)

    def _check(self, batch: TrainBatch, supervised: bool, skipped: Sequence[str], warn: Warn) -> None:
        if not len(batch):
            what, advice = "an advantage", "sample through this server at a temperature above 0"
            if supervised:
                what, advice = "been sent", "give conversations with a message of the assistant"
            left_out = {_LEFT_OUT[why]: count for why, count in batch.left_out.items()}
            left_out["messages that were skipped"] = len(skipped)
            causes = ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()) if count)
            raise TrainError(
                f"nothing to train: {len(batch.without_targets)} trajectories have {what}, and none of them a sampled "
                f"token ({causes or 'they have no calls'}): {advice}"
                f"{', and let train_on= keep calls' if batch.left_out['excluded'] else ''}",
                reason="bad_job",
            )
        sampled = (sample for sample in batch.samples if len(sample.prompt_ids))
        largest = max((int(max(one.prompt_ids.max(), one.completion_ids.max())) for one in sampled), default=0)
        if largest >= self._policy.vocabulary:
            raise TrainError(
                f"token id {largest} is outside the base model's vocabulary of {self._policy.vocabulary}: the calls were "
                "recorded with another base model",
                reason="bad_job",
            )
        if batch.without_targets:
            names = ", ".join(batch.without_targets[:3])
            warn(
                f"{len(batch.without_targets)} trajectories have {'' if supervised else 'a reward and '}nothing to train ({names}"
                f"{', ...' if len(batch.without_targets) > 3 else ''}): they made no call, none that was "
                "sampled here and kept, or none that train_on= keeps"
            )

    def _warn_of_constraints(self, batch: TrainBatch, warn: Warn) -> None:
        """Warn of calls whose constraint the learner does not know: once for each constraint in the life of this
        process."""
        constraints = {sample.constrained for sample in batch.samples if sample.constrained not in (None, RENDERED)}
        new = sorted(str(name) for name in constraints - self._constraints_known)
        self._constraints_known |= {str(name) for name in constraints}
        if new:
            warn(
                f"{batch.constrained.mean():.0%} of the trained tokens were sampled under {'; '.join(new)}, which the learner "
                "does not reproduce: they are trained, and left out of KL, ratio, clip and entropy"
            )


def _warn_of_small_groups(job: TrainJob, warn: Warn) -> None:
    """Groups that are too small from the start, not since rollouts failed."""
    smallest = job.config.min_group_size
    small = sum(len(group) < smallest for group in job.groups)
    if small and not job.config.supervised and job.config.distill is None:
        warn(
            f"{small} of {len(job.groups)} groups have fewer than min_group_size={smallest} rollouts and train nothing: put "
            "all rollouts of a scenario in one group"
        )


def _warn_of_skipped(skipped: Sequence[str], warn: Warn) -> None:
    if skipped:
        more = f"; and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
        warn(f"{len(skipped)} messages were skipped: {'; '.join(skipped[:_NAMED])}{more}")


def _good(groups: Groups, advantages: Advantages) -> list[JobTrajectory]:
    """The job's own rollouts that are imitated: earlier ones, which follow them, are not among these."""
    pairs = zip(chain(*groups), chain(*advantages.values), strict=True)
    return [rollout for rollout, value in pairs if value and not rollout.replayed]


_NAMED = 3
"""Skipped messages that a warning names."""
_LEFT_OUT = {
    "excluded": "calls with the weight 0",
    "greedy": "calls at temperature 0",
    "not_trained": "calls cancelled, failed, late, with an image or without a sampled token",
}


def _advantages(job: TrainJob) -> Advantages:
    """Advantages of the job. Raises TrainError if a reward is not finite, or no group has enough scored rollouts."""
    try:
        advantages = _by_rewards(job)
    except ValueError as error:
        raise TrainError(str(error), reason="bad_job") from error
    if not job.config.mask_truncated_completions:
        return advantages
    return without(advantages, [[is_truncated(trajectory) for trajectory in group] for group in job.groups])


def is_truncated(trajectory: JobTrajectory) -> bool:
    """Whether a call that is trained ended at a limit of tokens."""
    return any(sample.cut_off and sample.weight for sample in trajectory.samples)


def _by_rewards(job: TrainJob) -> Advantages:
    config = job.config
    failed = [[trajectory.failed for trajectory in group] for group in job.groups]
    rewards = [[None if t.failed else t.reward for t in group] for group in job.groups]
    if config.min_reward is not None:
        return good_advantages(rewards, config.min_reward)
    if config.supervised:
        return supervised_advantages(failed)
    if config.distill is not None and config.distill.alone:
        return with_teacher(None, failed)
    least, divide = config.min_group_size, config.scale_rewards and config.loss != "dr_grpo"
    if config.call_rewards:
        earned = [[t.call_rewards for t in group] for group in job.groups]
        advantages = call_advantages(rewards, earned, min_group_size=least, divide_by_std=divide)
    else:
        advantages = group_advantages(rewards, min_group_size=least, divide_by_std=divide)
    if config.distill is not None:
        return with_teacher(advantages, failed)
    if advantages.count(GroupClass.DROPPED_TOO_FEW) == len(job.groups):
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


@dataclass(frozen=True)
class NoSignal:
    """The kind of `TrainResult.no_signal`, and an explanation."""

    kind: NoSignalKind
    why: str

    def result(self, command: TrainCommand, metrics: dict[str, float], warnings: Sequence[str]) -> TrainResult:
        """The result of a job that changed nothing."""
        return TrainResult(
            model=command.model,
            step=command.step,
            applied=False,
            reason="no_signal",
            no_signal=self.kind,
            why=self.why,
            metrics=metrics,
            request_id=command.request_id,
            warnings=tuple(warnings),
        )


def no_selection(selection: Selection, min_reward: float | None) -> NoSignal:
    """Why a job's selection has no batch. `min_reward`: of a job that imitates rollouts from this reward on."""
    classes = selection.classes
    if selection.uncalled:  # as happens where an agent has several models
        return NoSignal(
            "no_advantage", f"none of the {selection.uncalled} rollouts with an advantage called this model"
        )
    if truncated := classes.count(GroupClass.TRUNCATED):
        return NoSignal(
            "truncated",
            f"all rollouts with an advantage in {truncated} of {len(classes)} groups ended at a limit of tokens, and "
            "mask_truncated_completions leaves them out; the other groups have none",
        )
    if min_reward is not None and GroupClass.ALL_GOOD in classes:
        return NoSignal(
            "all_or_none_good", f"in each group all rollouts have a reward of at least {min_reward:g}, or none has"
        )
    if min_reward is not None:
        return NoSignal("none_good", f"no rollout has a reward of at least {min_reward:g}, so there is none to imitate")
    advantages = selection.advantages
    too_few = advantages.count(GroupClass.DROPPED_TOO_FEW)
    if too_few == len(advantages.classes):  # with a teacher alone, which needs no rewards
        return NoSignal("no_advantage", "all rollouts failed")
    more = f", and {too_few} more have too few scored rollouts" if too_few else ""
    what = "rewards" if advantages.by_call is None else "parts of the rewards"
    return NoSignal("equal_rewards", f"all {what} of each group are equal{more}")


def no_gradient(
    batch: TrainBatch, totals: StepTotals, teacher: TeacherScores | None, *, half: bool = False
) -> NoSignal:
    """All updates of a step had a gradient of exactly zero. `half`: the base is float16."""
    if not batch.advantages.any():
        if teacher is not None and not teacher.logprobs.isnan().all():
            return NoSignal(
                "same_as_teacher", f"the teacher gives the {len(batch)} sampled tokens the probabilities of the policy"
            )
        return NoSignal(
            "no_advantage",
            f"the advantage is 0 for all {len(batch)} tokens that could be trained; {len(batch.without_targets)} rollouts "
            "with another reward have none",
        )
    if not totals.old.entropy[totals.old.kept].any():
        return NoSignal(
            "zero_gradient",
            f"the gradient is exactly zero: each of the {len(batch)} sampled tokens was the only one that the call's "
            "top-k, top-p, min-p and temperature left",
        )
    return NoSignal(
        "zero_gradient",
        f"the gradient is exactly zero over {len(batch)} sampled tokens: rollouts with different rewards sampled the same, "
        f"or the policy is certain of each{', or their gradients vanished in float16' * half}",
    )
