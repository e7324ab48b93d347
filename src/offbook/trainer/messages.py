"""The lines that a run prints: notes of steps, evaluations, warnings and the closing line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from offbook.base.text import counted
from offbook.base.types import TrajectoryGroup
from offbook.client.connection.progress import NO_SIGNAL
from offbook.client.model import TrainableModel
from offbook.client.rollouts.failures import FailureKind, details, summary

from .evaluate import Evaluation, failed_note, steps_line, unscored_kinds
from .models import ModelStep, StepOutcome
from .report import Iteration, Stopped, TrainReport, never_called
from .run import Repeats, Run

MORE_STEPS = (
    "steps= counts all steps of the model since its creation: raise it to continue, or use another name= to start again"
)
"""What to change where nothing is left to train."""


def step_note(iteration: Iteration, repeats: Repeats) -> str:
    """The note of an iteration: why the first model was not trained, the other models, failures and alerts; without sentences
    that `repeats` has already."""
    first, *others = iteration.models.items()
    notes = [no_signal_note(first[1].why, repeats)] if first[1].outcome == StepOutcome.NO_SIGNAL else []
    notes += ["no calls"] if first[1].outcome == StepOutcome.NO_CALLS else []
    notes += [other_note(name, step, repeats) for name, step in others]
    if iteration.failed:
        new = repeats.new(summary(iteration.failures), shortened=True)
        short = f"{counted(iteration.failed, 'rollout')} failed"
        notes.append(failed_note(iteration.failed, iteration.failures) if new else short)
    metrics = iteration.metrics
    notes += [f"{share:.0%} of the calls rendered"] if (share := metrics.get("calls/rendered_share", 0)) else []
    refused = ["plain rows: the tree is refused"] if metrics.get("layout/tree_refused") else []
    notes += [f"the judge scored {1 - share:.0%} of the groups"] if (share := metrics.get("judge/dropped", 0)) else []
    notes += filter(repeats.new, [*refused, *(f"alert: {alert.message}" for alert in iteration.alerts)])
    return "; ".join(notes)


def other_note(name: str, result: ModelStep, repeats: Repeats) -> str:
    """`writer: step 3`, with the outcome if the model was not trained."""
    outcomes = {StepOutcome.NO_CALLS: ", no calls", StepOutcome.DONE: ", done"}
    outcome = outcomes.get(result.outcome, "")
    if result.outcome == StepOutcome.NO_SIGNAL:
        outcome = f", {no_signal_note(result.why, repeats)}"
    return f"{name}: step {result.step}{outcome}"


def no_signal_note(why: str, repeats: Repeats) -> str:
    """`no signal`, with the reason if the run has not said it yet."""
    return f"no signal: {why}" if repeats.new(why, shortened=True) else "no signal"


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


def interrupted_line(run: Run) -> str:
    """Where a run was interrupted, how to resume it, and which activities it waits for."""
    update = " (the server may still apply the update that was under way)" if run.under_way else ""
    waiting = f". Waiting for: {', '.join(run.doing.now)}" if run.doing.now else ""
    return (
        f"interrupted after {steps_line(run.current)} of {run.steps}{update}: run the same again to continue from "
        f"there{waiting}"
    )


def watch_line(models: Sequence[TrainableModel], run: str) -> str:
    """Where the pages of a run are."""
    places = dict.fromkeys(model.backend.watched_at(run) for model in models)
    return f"watch the run: {', '.join(places)}"


def evaluation_failures_line(evaluation: Evaluation) -> str:
    """How many rollouts of an evaluation count for nothing in its mean, and why."""
    rollouts = evaluation.failed + sum(len(score.rewards) for score in evaluation.scores)
    return (
        f"{evaluation.failed} of {counted(rollouts, 'rollout')} of the evaluation failed and are left out of its mean reward: "
        f"{summary(evaluation.failures)}"
    )


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
        Stopped.NO_SIGNAL: f"{steps}, stopped: for {counted(patience, 'iteration')} {seen}. {advice}",
        Stopped.BUDGET: f"{steps}, stopped: max_cost= for other LLMs is spent. Raise it and run the same again to "
        "continue",
        Stopped.NO_CALLS: f"{steps}, stopped: for {counted(patience, 'iteration')} nothing was trained, and "
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
