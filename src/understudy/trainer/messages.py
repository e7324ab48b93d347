"""What a run says in single lines: a table row, an evaluation, the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from understudy.client.failures import FailureKind, details, summary
from understudy.config import TrainConfig
from understudy.types import TrajectoryGroup

from .evaluate import Evaluation, unscored_kinds
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
"""Kind of no signal -> what there was to see in every iteration, and what to change."""


def table_row(iteration: Iteration) -> StepRow:
    """An iteration as the table shows it: the first model's facts, the other models in the note."""
    first, *others = iteration.models.items()
    notes = [f"no signal: {first[1].why}"] if first[1].outcome == StepOutcome.NO_SIGNAL else []
    notes += ["no calls"] if first[1].outcome == StepOutcome.NO_CALLS else []
    notes += [other_note(name, step) for name, step in others]
    notes += [failed_note(iteration.failed, iteration.failures)] if iteration.failed else []
    metrics = iteration.metrics
    notes += [f"{share:.0%} of the calls rendered"] if (share := metrics.get("calls/rendered_share", 0)) else []
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


def other_note(name: str, made: ModelStep) -> str:
    """`writer: step 3`, and what else there is to say."""
    said = {
        StepOutcome.NO_SIGNAL: f", no signal: {made.why}",
        StepOutcome.NO_CALLS: ", no calls",
        StepOutcome.DONE: ", done",
    }
    return f"{name}: step {made.step}{said.get(made.outcome, '')}"


def failed_note(count: int, kinds: Sequence[FailureKind]) -> str:
    """`2 rollouts failed: 2 x KeyError: 'city' at app.py:31`."""
    return f"{count} rollout{'s' * (count != 1)} failed: {summary(kinds)}"


def failure_lines(kinds: Iterable[FailureKind]) -> Iterator[str]:
    """One traceback for each kind that has one."""
    return (f"why rollouts failed: {kind.line()}\n{kind.traceback}" for kind in kinds if kind.traceback)


def unscored_causes(groups: Sequence[TrajectoryGroup]) -> str:
    """Why no rollout is scored, with the tracebacks."""
    return details(unscored_kinds(groups)) or "no rollout was made"


def warnings_of(models: Mapping[str, ModelStep]) -> Iterator[str]:
    """What went not quite right with each model."""
    several = len(models) > 1
    for name, made in models.items():
        if made.outcome == StepOutcome.NO_CALLS:
            yield f"warning: {name} was not trained in this iteration: {made.why}"
        yield from (f"warning: {name + ': ' if several else ''}{each}" for each in made.warnings)


def steps_line(steps: Mapping[str, int]) -> str:
    """`step 3`, or `step 3 (writer: 2)` with several models."""
    (_, first), *others = steps.items()
    also = ", ".join(f"{name}: {step}" for name, step in others)
    return f"step {first} ({also})" if also else f"step {first}"


def overlap_line(configs: Iterable[TrainConfig]) -> str | None:
    """What overlap does, where it is on."""
    allowed = [config.max_staleness for config in configs if config.overlap]
    if not allowed:
        return None
    steps = "1 step" if min(allowed) == 1 else f"{min(allowed)} steps"
    return f"overlap: rollouts go on during the updates and are at most {steps} old when they are trained"


def interrupted_line(steps: Mapping[str, int], total: int, under_way: int) -> str:
    """Where a run was interrupted, and how to go on."""
    update = " (the server may still apply the update that was under way)" if under_way else ""
    return f"interrupted after {steps_line(steps)} of {total}{update}: run the same again to go on from there"


def untrained_line(rollouts: int) -> str:
    """What an error left of rollouts that were finished."""
    return f"{rollouts} finished rollouts were not trained; their calls stay on the server"


def evaluation_line(evaluation: Evaluation) -> str:
    """An evaluation in one line."""
    temperature = evaluation.temperature
    sampled = "at the agent's temperature" if temperature is None else f"sampled at temperature {temperature:g}"
    kind = "greedy" if temperature == 0 else sampled
    success = "" if evaluation.success is None else f"success {evaluation.success:.0%}, "
    failed = f", {failed_note(evaluation.failed, evaluation.failures)}" if evaluation.failed else ""
    reward = f"reward {evaluation.reward or 0.0:.3f} ± {evaluation.reward_error:.3f}"
    where = steps_line(evaluation.steps) if evaluation.steps else f"step {evaluation.step}"
    return f"{where}, {kind}, {evaluation.scored} scenarios: {success}{reward}{failed}"


def closing_line(report: TrainReport, patience: int, target_reward: float) -> str:
    """Why the run ended, and where each LoRA is."""
    last = report.iterations[-patience:]
    kinds = dict.fromkeys(step.no_signal for each in last for step in each.models.values() if step.no_signal)
    seen = " or ".join(NO_SIGNAL[kind][0] for kind in kinds)
    advice = ". ".join(NO_SIGNAL[kind][1] for kind in kinds)
    solved = "every rollout of a scenario earns the same" if list(kinds) == ["equal_rewards"] else seen
    at = " and ".join(f"{name} is at step {each.step}" for name, each in report.models.items())
    reason = {
        Stopped.FINISHED: at,
        Stopped.NOTHING_LEFT: f"{at}: nothing is left to train",
        Stopped.SOLVED: f"{at}, solved: {solved}, and the mean reward has reached {target_reward:g}",
        Stopped.NO_SIGNAL: f"{at}, stopped: for {patience} iterations {seen}. {advice}",
        Stopped.BUDGET: f"{at}, stopped: max_cost= for other LLMs is spent. Raise it and run the same again to go on",
        Stopped.NO_CALLS: f"{at}, stopped: for {patience} iterations nothing was trained, and "
        f"{', '.join(never_called(last))} had no call in any rollout that counts: does select= "
        "send it any?",
    }[report.stopped]
    if report.failures:
        reason += f". {failed_note(sum(kind.count for kind in report.failures), report.failures)}"
    saved = {name: each.checkpoint for name, each in report.models.items() if each.checkpoint}
    if not saved:
        return f"{reason}. No step was applied"
    if len(report.models) == 1:
        return f"{reason}. The LoRA is in {report.checkpoint}"
    return f"{reason}. The LoRAs are in " + ", ".join(f"{path} ({name})" for name, path in saved.items())
