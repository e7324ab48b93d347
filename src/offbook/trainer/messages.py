"""The lines that a run prints: table rows, evaluations, advice about held-out scenarios, warnings and the closing line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from offbook.base.alerts import taught_share
from offbook.base.config import TrainConfig
from offbook.base.text import counted
from offbook.base.types import TrajectoryGroup
from offbook.base.wire import CheckpointState
from offbook.client.connection.progress import NO_SIGNAL
from offbook.client.model import TrainableModel
from offbook.client.rollouts.failures import FailureKind, details, summary

from .evaluate import Evaluation, failed_note, mean, steps_line, unscored_kinds
from .models import ModelStep, StepOutcome
from .progress import StepRow
from .report import Iteration, Stopped, TrainReport, never_called
from .run import Repeats, Run
from .statistics import paired_difference

MORE_STEPS = (
    "steps= counts all steps of the model since its creation: raise it to continue, or use another name= to start again"
)
"""What to change where nothing is left to train."""


LARGE_FOLDER = 100 * 10**6
"""Bytes of a model's checkpoints from which a run says what they take."""
LAST_ITERATIONS = 3
"""The iterations at the end of a run whose mean reward is compared with the held-out one."""
ENOUGH_SCENARIOS = 10
"""Held-out scenarios from which something is said."""
SOLVED = 0.9
"""Success before a run that leaves little to learn."""
ENOUGH_ITERATIONS = 8
"""Iterations after which a gain is expected."""


def checkpoints_line(model: str, saved: Sequence[CheckpointState]) -> list[str]:
    """What a model's checkpoints take on the server's disk, if it is much."""
    size = sum(checkpoint.size for checkpoint in saved)
    if size < LARGE_FOLDER:
        return []
    return [
        f"{counted(len(saved), 'checkpoint')} of {model} take {size / 1e9:,.1f} GB in "
        f"{os.path.dirname(saved[-1].path)}: keep_checkpoints=N keeps the newest N and the best"
    ]


def table_row(iteration: Iteration, number: int, repeats: Repeats) -> StepRow:
    """The table row of iteration `number`: the first model's values; the other models are in the note, without
    sentences that the run has said, by `repeats`."""
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
    stale = (metrics["staleness/mean"], metrics["staleness/max"]) if "staleness/mean" in metrics else None
    return StepRow(
        step=iteration.step,
        iteration=number,
        reward=iteration.reward,
        success=iteration.success,
        rollout_seconds=iteration.rollout_seconds,
        train_seconds=iteration.train_seconds,
        tokens=metrics.get("tokens/trained"),
        kl=metrics.get("kl/sampler_learner"),
        note="; ".join(notes),
        beside_seconds=metrics.get("overlap/seconds"),
        staleness=stale,
        taught=taught_share(metrics),
    )


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


def overlap_line(configs: Iterable[TrainConfig]) -> str | None:
    """What overlap does; None if it is off."""
    allowed = [config.max_staleness for config in configs if config.overlap]
    if not allowed:
        return None
    steps = counted(min(allowed), "step")
    return f"overlap: rollouts go on during the updates and are at most {steps} old when they are trained"


def interrupted_line(run: Run) -> str:
    """Where a run was interrupted, how to resume it, and which activities it waits for."""
    update = " (the server may still apply the update that was under way)" if run.under_way else ""
    waiting = f". Waiting for: {', '.join(run.doing.now)}" if run.doing.now else ""
    return (
        f"interrupted after {steps_line(run.current)} of {run.steps}{update}: run the same again to continue from "
        f"there{waiting}"
    )


def untrained_line(rollouts: int) -> str:
    """How many finished rollouts an error left untrained."""
    return f"not trained: {counted(rollouts, 'finished rollout')}; their calls stay on the server"


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


def solved_line(evaluation: Evaluation) -> str | None:
    """What to do where the model solves the held-out scenarios before the run."""
    success = evaluation.success
    if success is None or success < SOLVED:
        return None
    return f"success is {success:.0%} before this run: harder scenarios, or other words for them, leave more to learn"


def held_out_lines(report: TrainReport, kept: Collection[int]) -> Iterator[str]:
    """What the evaluations of a run say about its newest step, and what to do. `kept`: the steps that have a checkpoint."""
    measured = [one for one in report.evaluations if one.reward is not None and one.scored >= ENOUGH_SCENARIOS]
    if not measured or measured[-1].step != report.step:
        return
    first, last = measured[0], measured[-1]
    lines = (_gap(report, last), _better_step(measured, kept), _no_gain(report, first, last))
    yield from (line for line in lines if line is not None)


def _gap(report: TrainReport, held_out: Evaluation) -> str | None:
    """Where the policy has learned its own scenarios and not the held-out ones: those of the last evaluation are below
    the last iterations by a fifth of the range of rewards, and by two standard errors."""
    last = report.iterations[-LAST_ITERATIONS:]
    if not last or held_out.reward is None:
        return None
    learned = mean([iteration.reward for iteration in last])
    lowest = min(iteration.metrics.get("reward/min", iteration.reward) for iteration in report.iterations)
    highest = max(iteration.metrics.get("reward/max", iteration.reward) for iteration in report.iterations)
    if learned - held_out.reward <= max((highest - lowest) / 5, 2 * held_out.reward_error):
        return None
    return (
        f"the reward of held-out scenarios is {held_out.reward:.2f}, in training it was {learned:.2f}: the model learned "
        "these scenarios more than the task. Train on more of them, in more wordings"
    )


def _better_step(measured: list[Evaluation], kept: Collection[int]) -> str | None:
    last = measured[-1]
    best = max((one for one in measured if one.step in kept), key=lambda one: one.reward or 0.0, default=last)
    if best.step == last.step or _gain(best, last) <= 0:
        return None
    return (
        f"step {best.step} was better on the held-out scenarios than step {last.step}: reward {best.reward:.3f}, now "
        f"{last.reward:.3f}. `step={best.step}` of `trained` and `inference_name` takes it, and `offbook export --step {best.step}`"
    )


def _no_gain(report: TrainReport, first: Evaluation, last: Evaluation) -> str | None:
    iterations = len(report.iterations)
    if first.step != report.started or iterations < ENOUGH_ITERATIONS or solved_line(first) or _gain(last, first) > 0:
        return None
    imitates = "loss/cross_entropy" in report.iterations[-1].metrics
    advice = "" if imitates else "If your reward says right or wrong, imitate the good rollouts: `min_reward=`. "
    return (
        f"no certain gain on the held-out scenarios in {iterations} iterations: reward {first.reward:.3f} before, "
        f"{last.reward:.3f} now. {advice}Look at some rollouts: is the right answer ever sampled, and rewarded?"
    )


def _gain(later: Evaluation, earlier: Evaluation) -> float:
    """The low end of the interval of the paired difference; 0 where the two share no scenario."""
    values, baseline = later.rewards(), earlier.rewards()
    return paired_difference(values, baseline).low if values.keys() & baseline.keys() else 0.0
