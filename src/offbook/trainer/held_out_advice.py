"""What a run says about its held-out scenarios: solved before, a gap to training, a step that was better, no gain."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .evaluate import Evaluation, mean
from .report import TrainReport
from .statistics import paired_difference

LAST_ITERATIONS = 3
"""The iterations at the end of a run whose mean reward is compared with the held-out one."""
ENOUGH_SCENARIOS = 10
"""Held-out scenarios from which something is said."""
SOLVED = 0.9
"""Success before a run that leaves little to learn."""
ENOUGH_ITERATIONS = 8
"""Iterations after which a gain is expected."""


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
    """Where an earlier step did better than the newest, scenario by scenario."""
    last = measured[-1]
    best = max((one for one in measured if one.step in kept), key=lambda one: one.reward or 0.0, default=last)
    if best.step == last.step or _gain(best, last) <= 0:
        return None
    return (
        f"step {best.step} was better on the held-out scenarios than step {last.step}: reward {best.reward:.3f}, now "
        f"{last.reward:.3f}. `step={best.step}` of `trained` and `inference_name` takes it, and `offbook export --step {best.step}`"
    )


def _no_gain(report: TrainReport, first: Evaluation, last: Evaluation) -> str | None:
    """Where many iterations have made no certain gain."""
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
