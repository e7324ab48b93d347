"""What the quickstart prints at the end: the reward curve, and one conversation before and after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from offbook.base.errors import MissingExtraError
from offbook.base.types import Json, Message
from offbook.tracing.rollout_reader import conversations

from ..contracts import GroupsFinished, TraceSink

try:
    import plotext  # pyright: ignore[reportMissingTypeStubs]  # it has none
    from matplotlib.figure import Figure
except ImportError:  # packages of the extra `plot`; `require_plots` reports them
    plotext = Figure = None


SPEAKERS = {"user": "you", "assistant": "agent", "tool": "tool"}
"""Role of a message -> its name in a printed conversation."""


class Transcripts(TraceSink):
    """A trace sink that keeps the conversations of greedy evaluations in memory.

    `kept`: (scenario id, step) -> messages and success."""

    name = "transcripts"

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], tuple[list[Message], bool]] = {}

    def groups_finished(self, event: GroupsFinished) -> None:
        """Keep the longest conversation of each evaluated rollout."""
        if event.split != "val":  # training, or an evaluation above temperature 0
            return
        for rollout in event.rollouts:
            longest = next(iter(conversations(rollout)), None)
            key = str(rollout.record.place.scenario), event.step
            right = bool(rollout.record.metrics.get("success"))
            self.kept[key] = list(longest.messages) if longest is not None else [], right

    def learned(self) -> tuple[list[Message], list[Message]] | None:
        """The conversation on one scenario before and after training: wrong at the first step and right at the last. Of
        several, the longest. None if there is none."""
        if not self.kept:
            return None
        first, last = min(step for _, step in self.kept), max(step for _, step in self.kept)
        pairs = [
            (before, self.kept[scenario, last][0])
            for (scenario, step), (before, right) in self.kept.items()
            if step == first and not right and self.kept.get((scenario, last), ([], False))[1]
        ]
        return max(pairs, key=lambda pair: len(pair[1]), default=None)


def require_plots() -> None:
    """Raise MissingExtraError if the plotting packages are not installed."""
    if plotext is None:
        raise MissingExtraError("matplotlib or plotext", "plot")


def conversation(messages: Sequence[Message]) -> str:
    """A conversation as text, one line per message or tool call."""
    lines: list[str] = []
    for message in messages:
        role = str(message["role"])
        text = str(message.get("content") or "").strip()
        calls: Sequence[Json] = message.get("tool_calls") or []
        parts = [text] if text else []
        for call in calls:
            arguments = ", ".join(f"{name}={value!r}" for name, value in arguments_of(call).items())
            parts.append(f"calls {call['function']['name']}({arguments})")
        lines += [f"  {SPEAKERS.get(role, role):6} {line}" for line in parts]
    return "\n".join(lines)


def arguments_of(call: Json) -> dict[str, Any]:
    """The arguments of a tool call. Text that is no JSON object is returned under an empty name.

    >>> arguments_of({"function": {"name": "ping", "arguments": '{"count": 2}'}})
    {'count': 2}
    >>> arguments_of({"function": {"name": "ping", "arguments": "twice"}})
    {'': 'twice'}
    """
    text = call["function"]["arguments"]
    try:
        parsed = json.loads(text)
    except ValueError:
        return {"": text}
    return cast(dict[str, Any], parsed) if isinstance(parsed, dict) else {"": parsed}


def print_curve(console: Console, rewards: Sequence[float]) -> None:
    """Print the mean reward of each step as a text chart."""
    figure: Any = cast(Any, plotext).figure
    figure.clear()
    curve = figure.signal(list(range(1, len(rewards) + 1)), list(rewards))
    curve.lines()
    figure.draw(curve)
    figure.theme("colorless")
    figure.plot_size(min(console.width, 90), 16)
    figure.ruler("y").lim(0, 1)
    figure.title("mean reward of each step")
    console.print(Text.from_ansi(str(figure.build())))


def write_curve(rewards: Sequence[float], path: Path) -> None:
    """Write the mean reward of each step as a PNG chart."""
    make: Any = Figure
    figure = make(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, color="#2563eb")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title="The order desk, trained on this machine")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
