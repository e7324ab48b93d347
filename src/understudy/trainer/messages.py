"""The lines that a run prints: table rows, evaluations, warnings and the closing line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from understudy.client.failures import FailureKind, details, summary
from understudy.client.model import TrainableModel
from understudy.config import TrainConfig
from understudy.types import TrajectoryGroup

from .evaluate import Evaluation, failed_note, steps_line, unscored_kinds
from .models import ModelStep, StepOutcome
from .progress import StepRow
from .report import Iteration, Stopped, TrainReport, never_called

NO_SIGNAL = {
    "equal_rewards": (
        "all rewards of each group were equal",
        "Raise group_size or the temperature, take scenarios of another difficulty, or give partial rewards",
    ),
    "no_advantage": (
        "no call that could be trained was of a rollout above or below its group's mean",
        "Look for calls that are never trained: at temperature 0, left out by train_on=, or not made at all",
    ),
    "zero_gradient": (
        "the gradient was exactly zero",
        "Let the policy choose: a temperature above 0 without top_k=1 or a small top_p, and fewer forced answers",
    ),
}
"""Kind of no signal -> (what was observed, what to change)."""

MORE_STEPS = "steps= counts all steps of the model's life: raise it to go on, or take another name= to begin anew"
"""What to change where nothing is left to train."""


def table_row(iteration: Iteration) -> StepRow:
    """The table row of an iteration: the first model's values; the other models are in the note."""
    first, *others = iteration.models.items()
    notes = [f"no signal: {first[1].why}"] if first[1].outcome == StepOutcome.NO_SIGNAL else []
    notes += ["no calls"] if first[1].outcome == StepOutcome.NO_CALLS else []
    notes += [other_note(name, step) for name, step in others]
    notes += [failed_note(iteration.failed, iteration.failures)] if iteration.failed else []
    metrics = iteration.metrics
    notes += [f"{share:.0%} of the calls rendered"] if (share := metrics.get("calls/rendered_share", 0)) else []
    notes += ["plain rows: the tree is refused"] if metrics.get("layout/tree_refused") else []
    notes += [f"the judge scored {1 - share:.0%} of the groups"] if (share := metrics.get("judge/dropped", 0)) else []
    notes += [f"alert: {alert.message}" for alert in iteration.alerts]
    stale = (metrics["staleness/mean"], metrics["staleness/max"]) if "staleness/mean" in metrics else None
    return StepRow(
        step=iteration.step,
        reward=iteration.reward,
        success=iteration.success,
        rollout_seconds=iteration.rollout_seconds,
        train_seconds=iteration.train_seconds,
        tokens=metrics.get("tokens/trained"),
        kl=metrics.get("kl/sampler_learner"),
        note="; ".join(notes),
        beside_seconds=metrics.get("overlap/seconds"),
        staleness=stale,
    )


def other_note(name: str, result: ModelStep) -> str:
    """`writer: step 3`, with the outcome if the model was not trained."""
    outcomes = {
        StepOutcome.NO_SIGNAL: f", no signal: {result.why}",
        StepOutcome.NO_CALLS: ", no calls",
        StepOutcome.DONE: ", done",
    }
    return f"{name}: step {result.step}{outcomes.get(result.outcome, '')}"


def failure_lines(kinds: Iterable[FailureKind]) -> Iterator[str]:
    """The tracebacks of the kinds that have one."""
    return (f"why rollouts failed: {kind.line()}\n{kind.traceback}" for kind in kinds if kind.traceback)


def unscored_causes(groups: Sequence[TrajectoryGroup]) -> str:
    """Why no rollout is scored, with the tracebacks."""
    return details(unscored_kinds(groups)) or "no rollout was made"


def warnings_of(models: Mapping[str, ModelStep]) -> Iterator[str]:
    """The warnings of the models' train requests."""
    several = len(models) > 1
    for name, result in models.items():
        if result.outcome == StepOutcome.NO_CALLS:
            yield f"warning: {name} was not trained in this iteration: {result.why}"
        yield from (f"warning: {name + ': ' if several else ''}{warning}" for warning in result.warnings)


def overlap_line(configs: Iterable[TrainConfig]) -> str | None:
    """What overlap does; None if it is off."""
    allowed = [config.max_staleness for config in configs if config.overlap]
    if not allowed:
        return None
    steps = "1 step" if min(allowed) == 1 else f"{min(allowed)} steps"
    return f"overlap: rollouts go on during the updates and are at most {steps} old when they are trained"


def interrupted_line(steps: Mapping[str, int], total: int, under_way: int) -> str:
    """Where a run was interrupted, and how to resume it."""
    update = " (the server may still apply the update that was under way)" if under_way else ""
    return f"interrupted after {steps_line(steps)} of {total}{update}: run the same again to go on from there"


def untrained_line(rollouts: int) -> str:
    """How many finished rollouts an error left untrained."""
    return f"{rollouts} finished rollouts were not trained; their calls stay on the server"


def watch_line(models: Sequence[TrainableModel], run: str) -> str:
    """Where the pages of a run are."""
    places = dict.fromkeys(model.backend.watched_at(run) for model in models)
    return f"watch the run: {', '.join(places)}"


def evaluation_failures_line(evaluation: Evaluation) -> str:
    """How many rollouts of an evaluation count for nothing in its mean, and why."""
    rollouts = evaluation.failed + sum(len(score.rewards) for score in evaluation.scores)
    return (
        f"{evaluation.failed} of {rollouts} rollouts of the evaluation failed and are left out of its mean reward: "
        f"{summary(evaluation.failures)}"
    )


def evaluation_line(evaluation: Evaluation) -> str:
    """An evaluation in one line."""
    return str(evaluation)


def closing_line(report: TrainReport, patience: int, target_reward: float) -> str:
    """Why the run ended, and the folders of the LoRAs."""
    last = report.iterations[-patience:]
    results = [step for iteration in last for step in iteration.models.values()]
    kinds = dict.fromkeys(step.no_signal for step in results if step.no_signal)
    seen = " or ".join(NO_SIGNAL[kind][0] for kind in kinds)
    advice = ". ".join(NO_SIGNAL[kind][1] for kind in kinds)
    solved = "every rollout of a scenario earns the same" if list(kinds) == ["equal_rewards"] else seen
    steps = " and ".join(f"{name} is at step {model.step}" for name, model in report.models.items())
    reason = {
        Stopped.FINISHED: steps,
        Stopped.NOTHING_LEFT: f"{steps}: nothing is left to train",
        Stopped.SOLVED: f"{steps}, solved: {solved}, and the mean reward has reached {target_reward:g}",
        Stopped.NO_SIGNAL: f"{steps}, stopped: for {patience} iterations {seen}. {advice}",
        Stopped.BUDGET: f"{steps}, stopped: max_cost= for other LLMs is spent. Raise it and run the same again to go on",
        Stopped.NO_CALLS: f"{steps}, stopped: for {patience} iterations nothing was trained, and "
        f"{', '.join(never_called(last))} had no call in any rollout that counts: does select= "
        "send it any?",
    }[report.stopped]
    if report.failures:
        reason += f". {failed_note(sum(kind.count for kind in report.failures), report.failures)}"
    saved = {name: model.checkpoint for name, model in report.models.items() if model.checkpoint}
    if not saved:
        return f"{reason}. No step was applied"
    if len(report.models) == 1:
        line = f"{reason}. The LoRA is in {report.checkpoint}"
    else:
        line = f"{reason}. The LoRAs are in " + ", ".join(f"{path} ({name})" for name, path in saved.items())
    return f"{line}. {MORE_STEPS}" if report.stopped is Stopped.NOTHING_LEFT else line
