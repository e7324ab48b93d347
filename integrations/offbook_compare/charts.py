"""The charts of a comparison as PNG files. Needs the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from typing import Any, TypeAlias

from offbook.base.errors import MissingExtraError

from .results import CandidateResult, ComparisonReport

Axes: TypeAlias = Any
"""matplotlib's Axes, whose methods are not fully typed."""
TRAINED, OTHER = "#d95f02", "#4c6a92"
"""Colours of steps of the trained model, and of other LLMs."""
LIGHT = 0.45
"""Opacity of light bars."""
WIDE = 8
"""Largest ratio of costs that a linear axis shows well."""


def charts_of(comparison: ComparisonReport) -> dict[str, bytes]:
    """Draw the charts for which there is data; returns PNG files by name. Raises MissingExtraError without matplotlib."""
    try:
        figure_class: Any = import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    charts: dict[str, bytes] = {}
    costed = [result for result in comparison.candidates if result.cost is not None and result.value is not None]
    if costed:
        figure = figure_class(figsize=(7, 4.2), layout="constrained", dpi=150)
        _accuracy_against_cost(figure.subplots(), costed, comparison.measure or "")
        charts["accuracy_cost"] = _png(figure)
    timed = [result for result in comparison.candidates if result.latency is not None]
    if timed:
        figure = figure_class(figsize=(7, 1.1 + 0.55 * len(timed)), layout="constrained", dpi=150)
        _latency(figure.subplots(), timed)
        charts["latency"] = _png(figure)
    counted = [result for result in timed if result.prompt_tokens is not None and result.completion_tokens is not None]
    if counted:
        figure = figure_class(figsize=(7, 1.1 + 0.55 * len(counted)), layout="constrained", dpi=150)
        _tokens(figure.subplots(), counted)
        charts["tokens"] = _png(figure)
    return charts


def _accuracy_against_cost(axes: Axes, candidates: Sequence[CandidateResult], measure: str) -> None:
    """One point per candidate with its interval as an error bar; cheaper candidates are further left."""
    for result in candidates:
        assert result.value is not None and result.cost is not None
        below, above = result.value.mean - result.value.low, result.value.high - result.value.mean
        colour = _colour(result)
        axes.errorbar(
            1000 * result.cost,
            result.value.mean,
            yerr=[[below], [above]],
            fmt="o",
            color=colour,
            capsize=3,
            markersize=7,
        )
    costs = [1000 * result.cost for result in candidates if result.cost is not None]
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
    """The numbers 1, 2 and 5 times a power of ten between the bounds."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**power for power in exponents for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]


def _label(axes: Axes, candidates: Sequence[CandidateResult]) -> None:
    """Write the names beside the points, on the left of the most expensive."""
    most = max(result.cost or 0.0 for result in candidates)
    alone = len(candidates) == 1
    for result in candidates:
        assert result.value is not None and result.cost is not None
        left = result.cost == most and not alone
        axes.annotate(
            result.name,
            (1000 * result.cost, result.value.mean),
            textcoords="offset points",
            xytext=(-9 if left else 9, 5),
            ha="right" if left else "left",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
            zorder=5,
        )


def _latency(axes: Axes, candidates: Sequence[CandidateResult]) -> None:
    """The 50th percentile as a solid bar, the 95th as a light bar behind it."""
    places = range(len(candidates))
    halves = [result.latency[0] for result in candidates if result.latency is not None]
    most = [result.latency[1] for result in candidates if result.latency is not None]
    colours = [_colour(result) for result in candidates]
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
    """Prompt tokens (light) and completion tokens (solid) per rollout."""
    places = range(len(candidates))
    written = [result.completion_tokens or 0.0 for result in candidates]
    read = [result.prompt_tokens or 0.0 for result in candidates]
    colours = [_colour(result) for result in candidates]
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
    axes.set_yticks(range(len(candidates)), [result.name for result in candidates])
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
