"""The charts of a run: their metrics, and the values by step and by time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from offbook.base.types import Json
from offbook.server.views.run_index import (
    CROSS_ENTROPY,
    LoggedEvaluation,
    TrainUpdate,
    evaluations_by_split,
    held_out_losses,
    measure,
    saved_by_tree,
    score,
)
from offbook.server.views.run_source import RunOverview

Value = Callable[[TrainUpdate], float | None]
"""Reads a value from an update; None if it has none."""
UPDATES = "updates"
"""Name of the x axis of values per update."""
COST = "costs/"
"""Prefix of metrics of cost."""


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart. `value` reads its y value from an update, `spread` half the height of a band around the line."""

    label: str
    value: Value
    spread: Value | None = None


@dataclass(frozen=True)
class Chart:
    """A chart of one or more lines. `unit` and `note` are shown under its title."""

    key: str
    title: str
    unit: str
    parts: tuple[ChartLine, ...]
    note: str = ""


def metric(name: str) -> Value:
    """Reads a metric by its name."""
    return lambda update: update.metrics.get(name)


def ratio(above: str, below: str) -> Value:
    """Reads the ratio of two metrics; None if one is missing or the divisor is 0."""

    def value(update: TrainUpdate) -> float | None:
        top, bottom = update.metrics.get(above), update.metrics.get(below)
        return None if top is None or not bottom else top / bottom

    return value


def summed(*names: str) -> Value:
    """Reads the sum of metrics; None if all are missing."""

    def value(update: TrainUpdate) -> float | None:
        known = [update.metrics[name] for name in names if name in update.metrics]
        return sum(known) if known else None

    return value


def loss(update: TrainUpdate) -> float | None:
    """The loss of an update; None where it is the cross-entropy, which has a chart of its own."""
    return None if update.imitates else update.metrics.get("loss/value")


CHARTS = (
    Chart(
        CROSS_ENTROPY,
        "Cross-entropy",
        "nats per trained token",
        (ChartLine("train", lambda update: update.cross_entropy),),
        "train: of the batch, before its update",
    ),
    Chart(
        "reward",
        "Reward",
        "mean of the step",
        (ChartLine("mean", lambda update: update.reward, metric("reward/std")),),
        "the band is one standard deviation of the step's rollouts",
    ),
    Chart("loss", "Loss", "mean over the step's updates", (ChartLine("loss", loss),)),
    Chart(
        "kl",
        "KL",
        "nats per token",
        (
            ChartLine("sampler to learner", metric("kl/sampler_learner")),
            ChartLine("to the base", metric("kl/base")),
        ),
    ),
    Chart("entropy", "Entropy", "nats per sampled token", (ChartLine("entropy", metric("entropy")),)),
    Chart(
        "speed",
        "Training speed",
        "trained tokens per second",
        (ChartLine("tokens", ratio("tokens/trained", "seconds/total")),),
    ),
    Chart("tree", "Saved by the tree", "share of tokens not computed again", (ChartLine("saved", saved_by_tree),)),
    Chart(
        "dropped",
        "Groups without a gradient",
        "groups of the step",
        (
            ChartLine("no spread", summed("groups/no_spread", "groups/all_good", "groups/none_good")),
            ChartLine("too few scored", metric("groups/dropped_too_few")),
            ChartLine("nothing to train", summed("groups/truncated", "groups/without_targets")),
        ),
        "no spread: equal rewards; where good rollouts are imitated, all good or none good",
    ),
    Chart("clip", "Clipped", "share of trained tokens", (ChartLine("clipped", metric("clip_fraction")),)),
)


def chart_json(overview: RunOverview) -> dict[str, Json]:
    """The charts as JSON for the browser.

    `x` has the x values by name of the axis, each by step and in minutes since the run began. `charts` has the charts that
    have values; each line names its axis.
    """
    began = overview.first.started_at
    updates = [update for update in overview.updates if update.result_step is not None]
    axes: dict[str, Json] = {
        UPDATES: {
            "step": [update.result_step for update in updates],
            "minutes": [_minutes(update.created_at, began) for update in updates],
        }
    }
    charts = [_chart(chart, updates) for chart in CHARTS]
    for split, entries in evaluations_by_split(held_out_losses(overview.evaluations)).items():
        axis = f"{CROSS_ENTROPY}/{split}"
        axes[axis] = _axis(entries, began)
        charts[0]["parts"].append({"label": split, "x": axis, "y": [score(entry) for entry in entries]})
    scored = [entry for entry in overview.evaluations if measure(entry) != CROSS_ENTROPY]
    for split, entries in evaluations_by_split(scored).items():
        axes[split] = _axis(entries, began)
    charts.insert(2, _evaluation_chart(scored))
    spent = costs_by_step(overview.evaluations)
    axes[COST] = _axis(spent, began)
    charts.append(_cost_chart(spent))
    return {"x": axes, "charts": [chart for chart in charts if chart["parts"]]}


def _axis(entries: Sequence[LoggedEvaluation], began: float) -> dict[str, Json]:
    return {
        "step": [entry.step for entry in entries],
        "minutes": [_minutes(entry.created_at, began) for entry in entries],
    }


def costs_by_step(entries: Iterable[LoggedEvaluation]) -> list[LoggedEvaluation]:
    """The costs of other LLMs, those of a model's step added up: a run that was killed and begun again pays once more for
    the step that it goes on from, and so does one whose rollouts gave no signal."""
    sums: dict[tuple[str, int | None], LoggedEvaluation] = {}
    for entry in entries:
        costs = {name: value for name, value in entry.metrics.items() if name.startswith(COST)}
        if costs:
            before = sums.get((entry.model, entry.step))
            paid = before.metrics if before is not None else {}
            total = {name: paid.get(name, 0.0) + costs.get(name, 0.0) for name in {**paid, **costs}}
            sums[entry.model, entry.step] = replace(entry, metrics=total)
    return list(sums.values())


def _chart(chart: Chart, updates: Sequence[TrainUpdate]) -> dict[str, Json]:
    parts: list[dict[str, Json]] = []
    for part in chart.parts:
        values = [part.value(update) for update in updates]
        if all(value is None for value in values):
            continue
        line: dict[str, Json] = {"label": part.label, "x": UPDATES, "y": values}
        if part.spread is not None:
            line["spread"] = [part.spread(update) for update in updates]
        parts.append(line)
    return {"key": chart.key, "title": chart.title, "unit": chart.unit, "note": chart.note, "parts": parts}


def _evaluation_chart(entries: Iterable[LoggedEvaluation]) -> dict[str, Json]:
    by_split = evaluations_by_split(entries)
    success = any(entry.value("success") is not None for entry in chain.from_iterable(by_split.values()))
    parts = [
        {"label": split, "x": split, "y": [score(entry) for entry in evaluations]}
        for split, evaluations in by_split.items()
    ]
    title = "Held-out success" if success else "Held-out reward"
    return {"key": "evaluation", "title": title, "unit": "mean over scenarios", "note": "", "parts": parts}


def _cost_chart(entries: Sequence[LoggedEvaluation]) -> dict[str, Json]:
    names = sorted({name for entry in entries for name in entry.metrics if name.startswith(COST)})
    parts = [
        {"label": name.removeprefix(COST), "x": COST, "y": [entry.metrics.get(name) for entry in entries]}
        for name in names
    ]
    return {
        "key": "cost",
        "title": "Cost of other LLMs",
        "unit": "USD for the step's rollouts",
        "note": "",
        "parts": parts,
    }


def _minutes(moment: float, began: float) -> float:
    return round(max(0.0, moment - began) / 60, 3)
