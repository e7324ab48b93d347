"""The charts of a comparison, as PNG files (extra `plot`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from typing import Any, TypeAlias

from understudy.errors import MissingExtraError

from .results import CandidateResult, ComparisonReport

Axes: TypeAlias = Any
"""matplotlib's; its methods have no whole types."""
TRAINED, OTHER = "#d95f02", "#4c6a92"
"""Colours of steps of the trained model, and of other LLMs."""
LIGHT = 0.45
WIDE = 8
"""Highest ratio of costs that a linear axis shows well."""


def charts_of(comparison: ComparisonReport) -> dict[str, bytes]:
    """PNG by name; those for which something is known. Raises MissingExtraError without matplotlib."""
    try:
        figure_class: Any = import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    found: dict[str, bytes] = {}
    costed = [each for each in comparison.candidates if each.cost is not None and each.value is not None]
    if costed:
        figure = figure_class(figsize=(7, 4.2), layout="constrained", dpi=150)
        _accuracy_against_cost(figure.subplots(), costed, comparison.measure or "")
        found["accuracy_cost"] = _png(figure)
    timed = [each for each in comparison.candidates if each.latency is not None]
    if timed:
        figure = figure_class(figsize=(7, 1.1 + 0.55 * len(timed)), layout="constrained", dpi=150)
        _latency(figure.subplots(), timed)
        found["latency"] = _png(figure)
    counted = [each for each in timed if each.prompt_tokens is not None and each.completion_tokens is not None]
    if counted:
        figure = figure_class(figsize=(7, 1.1 + 0.55 * len(counted)), layout="constrained", dpi=150)
        _tokens(figure.subplots(), counted)
        found["tokens"] = _png(figure)
    return found


def _accuracy_against_cost(axes: Axes, candidates: Sequence[CandidateResult], measure: str) -> None:
    """One point per candidate, its interval as a bar; the cheaper the further left."""
    for each in candidates:
        assert each.value is not None and each.cost is not None
        below, above = each.value.mean - each.value.low, each.value.high - each.value.mean
        colour = _colour(each)
        axes.errorbar(
            1000 * each.cost, each.value.mean, yerr=[[below], [above]], fmt="o", color=colour, capsize=3, markersize=7
        )
    costs = [1000 * each.cost for each in candidates if each.cost is not None]
    if min(costs) > 0 and max(costs) / min(costs) > WIDE:
        axes.set_xscale("log")
        axes.set_xlim(min(costs) / 1.8, max(costs) * 1.8)
        axes.minorticks_off()
        axes.set_xticks(round_numbers(min(costs) / 1.8, max(costs) * 1.8))
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(0, max(costs) * 1.35 or 1.0)
    axes.margins(y=0.15)
    _label(axes, candidates)
    axes.set_xlabel("USD per 1,000 rollouts")
    axes.set_ylabel(f"{measure}, 95 % interval")
    axes.set_title("The better the higher, the cheaper the further left", fontsize=10)
    _plain_frame(axes)


def round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between the bounds."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**power for power in exponents for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]


def _label(axes: Axes, candidates: Sequence[CandidateResult]) -> None:
    """Names beside the points, to the left of those at the right end."""
    most = max(each.cost or 0.0 for each in candidates)
    alone = len(candidates) == 1
    for each in candidates:
        assert each.value is not None and each.cost is not None
        left = each.cost == most and not alone
        axes.annotate(
            each.name,
            (1000 * each.cost, each.value.mean),
            textcoords="offset points",
            xytext=(-9 if left else 9, 5),
            ha="right" if left else "left",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
            zorder=5,
        )


def _latency(axes: Axes, candidates: Sequence[CandidateResult]) -> None:
    """The 50th percentile as a full bar, the 95th as a light one behind it."""
    places = range(len(candidates))
    halves = [each.latency[0] for each in candidates if each.latency is not None]
    most = [each.latency[1] for each in candidates if each.latency is not None]
    colours = [_colour(each) for each in candidates]
    axes.barh(places, most, color=colours, alpha=LIGHT, height=0.6)
    axes.barh(places, halves, color=colours, height=0.6)
    for place, half, high in zip(places, halves, most, strict=True):
        axes.annotate(
            f"{half:.2g} / {high:.2g}",
            (high, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    _by_candidate(axes, candidates, "seconds of one call: p50 (full), p95 (light)")
    axes.set_xlim(0, max(most) * 1.2 or 1.0)


def _tokens(axes: Axes, candidates: Sequence[CandidateResult]) -> None:
    """Tokens that a rollout reads (light) and writes (full)."""
    places = range(len(candidates))
    written = [each.completion_tokens or 0.0 for each in candidates]
    read = [each.prompt_tokens or 0.0 for each in candidates]
    colours = [_colour(each) for each in candidates]
    axes.barh(places, written, color=colours, height=0.6)
    axes.barh(places, read, left=written, color=colours, alpha=LIGHT, height=0.6)
    for place, out, into in zip(places, written, read, strict=True):
        axes.annotate(
            f"{out:,.0f} / {into:,.0f}",
            (out + into, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    _by_candidate(axes, candidates, "tokens of one rollout: written (full), read (light)")
    axes.set_xlim(0, max(out + into for out, into in zip(written, read, strict=True)) * 1.25 or 1.0)


def _by_candidate(axes: Axes, candidates: Sequence[CandidateResult], label: str) -> None:
    axes.set_yticks(range(len(candidates)), [each.name for each in candidates])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    _plain_frame(axes)


def _plain_frame(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _colour(candidate: CandidateResult) -> str:
    return TRAINED if candidate.trained else OTHER


def _png(figure: Any) -> bytes:
    written = BytesIO()
    figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()
