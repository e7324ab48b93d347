"""The reasons why a job with scored groups does not change the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbook.base.types import NoSignalKind, TrainResult

from ..protocol import TrainCommand
from .selection import Selection
from .targets.advantage import Advantages, GroupClass
from .targets.batch import TrainBatch
from .update.row_pass import TeacherScores
from .update.step import StepTotals


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
    if selection.uncalled:
        return no_calls(selection.uncalled)
    classes = selection.classes
    if truncated := classes.count(GroupClass.TRUNCATED):
        return NoSignal(
            "truncated",
            f"all rollouts with an advantage in {truncated} of {len(classes)} groups ended at a limit of tokens, and "
            "mask_truncated_completions leaves them out; the other groups have none",
        )
    if min_reward is None:
        return equal_rewards(selection.advantages)
    if GroupClass.ALL_GOOD in classes:
        return NoSignal(
            "all_or_none_good", f"in each group all rollouts have a reward of at least {min_reward:g}, or none has"
        )
    return none_good(min_reward)


def equal_rewards(advantages: Advantages) -> NoSignal:
    """All groups have equal rewards or too few scored rollouts."""
    too_few = advantages.count(GroupClass.DROPPED_TOO_FEW)
    if too_few == len(advantages.classes):  # with a teacher alone, which needs no rewards
        return NoSignal("no_advantage", "all rollouts failed")
    more = f", and {too_few} more have too few scored rollouts" if too_few else ""
    what = "rewards" if advantages.by_call is None else "parts of the rewards"
    return NoSignal("equal_rewards", f"all {what} of each group are equal{more}")


def none_good(min_reward: float) -> NoSignal:
    """No rollout has the reward from which they are imitated."""
    return NoSignal("none_good", f"no rollout has a reward of at least {min_reward:g}, so there is none to imitate")


def no_calls(uncalled: int) -> NoSignal:
    """Only rollouts without an advantage called the model, as happens where an agent has several models."""
    return NoSignal("no_advantage", f"none of the {uncalled} rollouts with an advantage called this model")


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
