"""Lays out the timeline of a step: rollouts, training and swap as bars on one axis of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from markupsafe import Markup, escape

from offbook.server.records.overview import CallTimes, RolloutRow
from offbook.server.views.run_index import TrainUpdate

from .page_urls import trajectory_url

Kind = Literal["waiting", "sampling", "tool", "own", "training", "swap"]
_PHASES = ("plan", "old_logprobs", "base_logprobs", "update", "save")
"""The phases of training, in order. Their times are the metrics `seconds/<phase>`."""
WIDTH = 1000.0
"""Width of the drawing, in SVG units."""
MAX_ROWS = 400
"""Most rollouts that are drawn."""
_KIND_NAMES: dict[Kind, str] = {
    "waiting": "waiting to begin",
    "sampling": "sampling",
    "tool": "tool",
    "own": "its own code",
    "training": "training",
    "swap": "swap",
}


class Span(NamedTuple):
    """An interval, in seconds since the step began."""

    kind: Kind
    start: float
    end: float
    text: str = ""

    @property
    def seconds(self) -> float:
        """Its length."""
        return max(0.0, self.end - self.start)


@dataclass(frozen=True)
class Lane:
    """The intervals of a rollout, of training, or of a swap. `url` is the page of a rollout."""

    name: str
    url: str | None
    spans: tuple[Span, ...]

    def seconds(self, kind: Kind) -> float:
        """The total length of its intervals of one kind."""
        return sum(span.seconds for span in self.spans if span.kind == kind)

    @property
    def end(self) -> float:
        """Its end, in seconds since the step began."""
        return max((span.end for span in self.spans), default=0.0)


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step: its rollouts in order of start, and `after` them training and swaps."""

    lanes: tuple[Lane, ...]
    after: tuple[Lane, ...]

    @property
    def seconds(self) -> float:
        """Its length."""
        return max([lane.end for lane in (*self.lanes, *self.after)] + [0.001])

    @property
    def left_out(self) -> int:
        """Number of rollouts that are not drawn."""
        return max(0, len(self.lanes) - MAX_ROWS)

    def slowest(self, count: int) -> list[Lane]:
        """The last rollouts to end, latest first."""
        return sorted(self.lanes, key=lambda lane: -lane.end)[:count]

    @property
    def rollouts_end(self) -> float:
        """The end of the last rollout, in seconds since the step began."""
        return max((lane.end for lane in self.lanes), default=0.0)

    def drawing(self) -> tuple[Markup, float]:
        """Its bars as SVG, and their height. Not a template, which would take longer than the rest of the page.

        Training and swap are drawn above the rollouts, so that many rollouts do not move them out of sight."""
        seconds = self.seconds
        shown = self.lanes[:MAX_ROWS]
        row = 14.0 if len(shown) <= 48 else 8.0 if len(shown) <= 128 else 4.0
        shapes: list[str] = []
        y = 22.0
        for lane in self.after:
            shapes += [*_bars(lane, y, 16.0, seconds), _name_of(lane, y + 12.5, seconds)]
            y += 20
        y += 6 if self.after else 0
        for lane in shown:
            shapes += _bars(lane, y, row - max(1.0, row / 7), seconds)
            y += row
        return Markup("\n".join([*_ticks(seconds, y + 4), *shapes])), y + 4


def timeline(
    rollouts: Sequence[RolloutRow], calls: Sequence[CallTimes], updates: Sequence[TrainUpdate]
) -> Timeline | None:
    """The timeline of a step's rollouts and of the updates that learned from them; None without rollouts."""
    if not rollouts:
        return None
    began = min(rollout.started_at for rollout in rollouts)
    by_owner: dict[str, list[CallTimes]] = {}
    for call in calls:
        by_owner.setdefault(call.trajectory, []).append(call)
    lanes = tuple(
        Lane(_title(rollout), trajectory_url(rollout.id), _rollout_spans(rollout, by_owner.get(rollout.id, []), began))
        for rollout in sorted(rollouts, key=lambda rollout: (rollout.started_at, rollout.ended_at))
    )
    return Timeline(lanes, tuple(lane for update in updates for lane in _update_lanes(update, began)))


def _title(rollout: RolloutRow) -> str:
    index = f" rollout {rollout.index}" if rollout.index is not None else ""
    return f"{rollout.scenario or rollout.id}{index}"


def _rollout_spans(rollout: RolloutRow, calls: Sequence[CallTimes], began: float) -> tuple[Span, ...]:
    """Split a rollout's time by kind: waiting to start, sampling, tools, and its own code in the rest.

    If a call and a tool overlap, the time counts as sampling. `began` is the step's start in unix seconds.
    """
    start, end = rollout.started_at - began, max(rollout.ended_at, rollout.started_at) - began
    busy = [Span("sampling", call.started_at - began, call.ended_at - began, f"{call.tokens} tokens") for call in calls]
    busy += [Span("tool", tool.started_at - began, tool.ended_at - began, tool.name) for tool in rollout.tools]
    spans = [Span("waiting", 0.0, start)] if start > 0 else []
    edges = sorted({start, end, *(min(max(edge, start), end) for span in busy for edge in (span.start, span.end))})
    for left, right in pairwise(edges):
        middle = (left + right) / 2
        inside = [span for span in busy if span.start <= middle <= span.end]
        chosen = next((span for span in inside if span.kind == "sampling"), inside[0] if inside else None)
        kind: Kind = chosen.kind if chosen is not None else "own"
        text = chosen.text if chosen is not None else ""
        if spans and spans[-1].kind == kind and spans[-1].text == text and kind != "waiting":
            spans[-1] = Span(kind, spans[-1].start, right, text)
        else:
            spans.append(Span(kind, left, right, text))
    return tuple(spans)


def _update_lanes(update: TrainUpdate, began: float) -> list[Lane]:
    """The lanes of training, by phase, and of the swap.

    They start when the request was accepted: its time in the queue is not recorded.
    """
    now = update.created_at - began
    spans: list[Span] = []
    for phase in _PHASES:
        took = update.metrics.get(f"seconds/{phase}", 0.0)
        if took > 0:
            spans.append(Span("training", now, now + took, phase.replace("_", " ")))
            now += took
    rest = update.metrics.get("seconds/total", 0.0) - sum(span.seconds for span in spans)
    if rest > 0:
        spans.append(Span("training", now, now + rest, "other"))
        now += rest
    lanes = [Lane("Training", None, tuple(spans))] if spans else []
    swap = update.metrics.get("sampler/swap_seconds")
    if swap is not None:
        lanes.append(Lane("Swap", None, (Span("swap", now, now + swap, "the sampler loads the new step"),)))
    return lanes


def _bars(lane: Lane, y: float, height: float, seconds: float) -> list[str]:
    """A lane's bars as escaped SVG. Not with `Markup.format`, which is too slow for thousands of bars."""
    scale = WIDTH / seconds
    url = f' data-url="{escape(lane.url)}"' if lane.url is not None else ""
    bars: list[str] = []
    for span in lane.spans:
        top, size = (y + height / 2 - 0.5, 1.0) if span.kind == "waiting" else (y, height)
        fill = ' fill="url(#hatch)"' if span.kind == "tool" else ""
        text = f"{lane.name}: {_KIND_NAMES[span.kind]}{f' ({span.text})' if span.text else ''}, {span.seconds:.2f} s"
        bars.append(
            f'<rect class="b-{span.kind}" x="{round(span.start * scale, 1)}" y="{round(top, 1)}" '
            f'width="{round(max(0.6, span.seconds * scale), 1)}" height="{round(size, 1)}"{fill}{url}>'
            f"<title>{escape(text)}</title></rect>"
        )
    return bars


def _name_of(lane: Lane, y: float, seconds: float) -> str:
    """The name of a lane before its first bar, or after its last one if there is no room before."""
    first, last = lane.spans[0].start / seconds * WIDTH, lane.end / seconds * WIDTH
    x, anchor = (first - 6, "end") if first > 80 else (last + 6, "start")
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(lane.name)}</text>'


def _ticks(seconds: float, height: float) -> list[str]:
    """At most nine marks on the axis, at round seconds. Near the right edge the text ends at the mark, to stay inside."""
    sizes = (base * 10.0**power for power in range(-3, 6) for base in (1.0, 2.0, 5.0))
    step = next((size for size in sizes if seconds / size <= 8), seconds)
    marks: list[str] = []
    for tick in range(int(seconds / step) + 1):
        x = tick * step / seconds * WIDTH
        offset, anchor = (2, "start") if x < WIDTH - 40 else (-2, "end")
        marks.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height}"/>'
            f'<text class="soft" x="{x + offset:.1f}" y="12" text-anchor="{anchor}">{tick * step:g} s</text>'
        )
    return marks
