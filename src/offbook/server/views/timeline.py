"""Lays out the timeline of a step: rollouts, training and swap as bars on one axis of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from markupsafe import Markup, escape

from offbook.server.records.overview import CallTimes, RolloutRow

from .run_index import TrainUpdate

Kind = Literal["waiting", "sampling", "tool", "own", "training", "swap"]
PHASES = ("plan", "old_logprobs", "base_logprobs", "update", "save")
"""The phases of training, in order. Their times are the metrics `seconds/<phase>`."""
WIDTH = 1000.0
"""Width of the drawing, in SVG units."""
_MOST_ROWS = 400  # rollouts that are drawn


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


class Box(NamedTuple):
    """A bar of the drawing, in SVG units."""

    kind: Kind
    x: float
    y: float
    width: float
    height: float
    text: str
    url: str | None


@dataclass(frozen=True)
class Tick:
    """A mark on the axis of seconds."""

    x: float
    text: str

    @property
    def anchor(self) -> Literal["start", "end"]:
        """The text's anchor. Near the right edge the text ends at the mark, to stay inside the drawing."""
        return "start" if self.x < WIDTH - 40 else "end"


@dataclass(frozen=True)
class LaneLabel:
    """The name of a lane, placed before its first bar, or after its last bar if there is no room before."""

    x: float
    y: float
    anchor: Literal["start", "end"]
    text: str


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step, and its drawing.

    `lanes` are the rollouts in order of start, `after` training and swaps. `left_out` is the number of rollouts that are not
    drawn.
    """

    lanes: tuple[Lane, ...]
    after: tuple[Lane, ...]
    seconds: float
    boxes: tuple[Box, ...]
    ticks: tuple[Tick, ...]
    labels: tuple[LaneLabel, ...]
    height: float
    left_out: int

    def svg(self) -> Markup:
        """The bars as SVG. Not a template, which would take longer than the rest of the page."""
        return Markup("\n".join(_rect(box) for box in self.boxes))

    def slowest(self, count: int) -> list[Lane]:
        """The last rollouts to end, latest first."""
        return sorted(self.lanes, key=lambda lane: -lane.end)[:count]

    @property
    def rollouts_end(self) -> float:
        """The end of the last rollout, in seconds since the step began."""
        return max((lane.end for lane in self.lanes), default=0.0)

    def share(self, kind: Kind) -> float | None:
        """The share of one kind in the rollouts' total time, which counts from the step's begin to each rollout's end."""
        total = sum(lane.end for lane in self.lanes)
        return sum(lane.seconds(kind) for lane in self.lanes) / total if total else None


def timeline(
    rollouts: Sequence[RolloutRow], calls: Sequence[CallTimes], updates: Sequence[TrainUpdate], urls: Sequence[str]
) -> Timeline | None:
    """The timeline of a step's rollouts and of the updates that learned from them; None without rollouts.

    `urls` are the pages of the rollouts, in the same order.
    """
    if not rollouts:
        return None
    began = min(rollout.started_at for rollout in rollouts)
    by_owner: dict[str, list[CallTimes]] = {}
    for call in calls:
        by_owner.setdefault(call.trajectory, []).append(call)
    pairs = sorted(zip(rollouts, urls, strict=True), key=lambda pair: (pair[0].started_at, pair[0].ended_at))
    lanes = tuple(
        Lane(_name(rollout), url, rollout_spans(rollout, by_owner.get(rollout.id, []), began)) for rollout, url in pairs
    )
    after = tuple(lane for update in updates for lane in _update_lanes(update, began))
    seconds = max([lane.end for lane in (*lanes, *after)] + [0.001])
    return _drawn(lanes, after, seconds)


def rollout_spans(rollout: RolloutRow, calls: Sequence[CallTimes], began: float) -> tuple[Span, ...]:
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
    for phase in PHASES:
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


def _drawn(lanes: tuple[Lane, ...], after: tuple[Lane, ...], seconds: float) -> Timeline:
    """Draw training and swap above the rollouts, so that many rollouts do not move them out of sight."""
    shown = lanes[:_MOST_ROWS]
    row = 14.0 if len(shown) <= 48 else 8.0 if len(shown) <= 128 else 4.0
    boxes: list[Box] = []
    labels: list[LaneLabel] = []
    y = 22.0
    for lane in after:
        boxes += _boxes(lane, y, 16.0, seconds)
        labels.append(_label(lane, y + 12.5, seconds))
        y += 20
    y += 6 if after else 0
    for lane in shown:
        boxes += _boxes(lane, y, row - max(1.0, row / 7), seconds)
        y += row
    return Timeline(lanes, after, seconds, tuple(boxes), _ticks(seconds), tuple(labels), y + 4, len(lanes) - len(shown))


def _rect(box: Box) -> str:
    """A bar as escaped SVG. Not with `Markup.format`, which is too slow for thousands of bars."""
    thin = box.kind == "waiting"
    y, height = (box.y + box.height / 2 - 0.5, 1.0) if thin else (box.y, box.height)
    fill = ' fill="url(#hatch)"' if box.kind == "tool" else ""
    url = f' data-url="{escape(box.url)}"' if box.url is not None else ""
    return (
        f'<rect class="b-{box.kind}" x="{box.x}" y="{round(y, 1)}" width="{box.width}" height="{round(height, 1)}"'
        f"{fill}{url}><title>{escape(box.text)}</title></rect>"
    )


def _label(lane: Lane, y: float, seconds: float) -> LaneLabel:
    first = min(span.start for span in lane.spans) / seconds * WIDTH
    if first > 80:
        return LaneLabel(round(first - 6, 1), y, "end", lane.name)
    return LaneLabel(round(lane.end / seconds * WIDTH + 6, 1), y, "start", lane.name)


def _boxes(lane: Lane, y: float, height: float, seconds: float) -> list[Box]:
    scale = WIDTH / seconds
    return [
        Box(
            span.kind,
            round(span.start * scale, 1),
            y,
            round(max(0.6, span.seconds * scale), 1),
            height,
            f"{lane.name}: {_KIND_NAMES[span.kind]}{f' ({span.text})' if span.text else ''}, {span.seconds:.2f} s",
            lane.url,
        )
        for span in lane.spans
    ]


_KIND_NAMES: dict[Kind, str] = {
    "waiting": "waiting to begin",
    "sampling": "sampling",
    "tool": "tool",
    "own": "its own code",
    "training": "training",
    "swap": "swap",
}


def _ticks(seconds: float) -> tuple[Tick, ...]:
    step = next(
        (
            base * 10.0**power
            for power in range(-3, 6)
            for base in (1.0, 2.0, 5.0)
            if seconds / (base * 10.0**power) <= 8
        ),
        seconds,
    )
    return tuple(
        Tick(round(tick * step / seconds * WIDTH, 1), f"{tick * step:g} s") for tick in range(int(seconds / step) + 1)
    )


def _name(rollout: RolloutRow) -> str:
    index = f" rollout {rollout.index}" if rollout.index is not None else ""
    return f"{rollout.scenario or rollout.id}{index}"
