"""The facts and warnings at the top of a run's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...alerts import AlertLimits, signs
from .numbers import DASH, fixed, number, percent, seconds, signed
from .run_charts import evaluations_by_split, saved_by_tree, score
from .source import RunOverview

_LOOKED_BACK = 10
"""Warnings of so many last updates are shown."""


@dataclass(frozen=True)
class Fact:
    """`note` is shown small under the value."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunWarning:
    """What goes wrong, and at which step of the model. The same warning of several steps
    is shown once, with the last of them."""

    step: int | None
    from_step: int | None
    text: str
    times: int = 1


def facts_of(found: RunOverview) -> list[Fact]:
    """Step, reward, evaluation, entropy, clipped tokens, lag, what the tree saves, time of a step."""
    done = [update for update in found.updates if update.state == "done"]
    metrics = done[-1].metrics if done else {}
    rewards = [update.metrics["reward/mean"] for update in done if "reward/mean" in update.metrics]
    steps = [update.result_step for update in done if update.result_step is not None]
    scored = [entries[-1] for split, entries in evaluations_by_split(found.evaluations).items() if split == "val"]
    if not scored:
        scored = [entries[-1] for entries in evaluations_by_split(found.evaluations).values()]
    times = [later.created_at - earlier.created_at for earlier, later in pairwise(done[-6:])]
    saved = saved_by_tree(done[-1]) if done else None
    return [
        Fact("Step", number(max(steps)) if steps else "0", f"{len(done)} updates"),
        Fact("Reward", fixed(rewards[-1], 3) if rewards else fixed(found.last.reward, 3), _change(rewards)),
        Fact(
            "Evaluation", fixed(score(scored[0]), 3) if scored else DASH, _where(scored[0].step) if scored else "none"
        ),
        Fact("Entropy", number(metrics.get("entropy")), "nats per token"),
        Fact("Clipped", percent(metrics.get("clip_fraction"), 1), "of trained tokens"),
        Fact("Sampler lag", number(metrics.get("calls/staleness_mean")), "steps, on average"),
        Fact("Tree saves", percent(saved), "of the tokens"),
        Fact("A step takes", seconds(sum(times) / len(times)) if times else DASH, "mean of the last"),
    ]


def warnings_of(found: RunOverview, limits: AlertLimits | None = None) -> list[RunWarning]:
    """Alerts and warnings of the last updates, the newest first, and the error that ended the last one."""
    updates = found.updates[-_LOOKED_BACK:]
    history = [update.metrics for update in found.updates]
    warned: list[RunWarning] = []
    for at, update in enumerate(updates, start=len(found.updates) - len(updates)):
        texts = [sign.message for sign in signs(history[: at + 1], limits or AlertLimits())] if update.metrics else []
        texts += update.warnings
        if update.state == "failed" or (update.state == "interrupted" and update is found.updates[-1]):
            texts.append(f"train request {update.state}: {update.why}")
        elif update.state == "done" and not update.applied:
            texts.append(f"nothing was learned: {update.why}")
        warned += [RunWarning(update.result_step, update.step, text) for text in texts]
    return _once(list(reversed(warned)))


def _once(warned: Sequence[RunWarning]) -> list[RunWarning]:
    """Each text once, the newest kept; numbers in it may differ."""
    kept: dict[str, RunWarning] = {}
    for each in warned:
        kind = "".join(letter for letter in each.text if not letter.isdigit())
        first = kept.get(kind)
        kept[kind] = each if first is None else RunWarning(first.step, first.from_step, first.text, first.times + 1)
    return list(kept.values())


def _change(rewards: Sequence[float]) -> str:
    if len(rewards) < 2:
        return ""
    back = min(10, len(rewards) - 1)
    return f"{signed(rewards[-1] - rewards[-1 - back], 3)} in {back} step{'s' if back > 1 else ''}"


def _where(step: int | None) -> str:
    return "" if step is None else f"at step {step}"
