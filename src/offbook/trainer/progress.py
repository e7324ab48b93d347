"""Terminal output while training runs: a live table in a terminal, one plain line per step elsewhere."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from offbook.base.terminal import Terminal, fitting

BARS = "▁▂▃▄▅▆▇█"
SHOWN_STEPS = 12
_MIN_DRAWN = 3
"""Fewer rewards are no line worth drawing."""
_GIVE_WAY = ("iteration", "tokens", "beside", "training", "rollouts")
"""Columns that are left out in a narrow terminal, the first one first."""


@dataclass(frozen=True)
class StepRow:
    """One row of the table. `iteration`: its number in this run, from 1. `taught`: share of the rollouts that had something to teach. `note`: why a step did not train, failures and alerts. Only with overlap: `beside_seconds`,
    the seconds of training during which rollouts of later steps ran, and `staleness`, its mean and maximum in steps."""

    step: int
    reward: float | None
    success: float | None
    rollout_seconds: float
    train_seconds: float
    tokens: float | None
    kl: float | None
    note: str = ""
    iteration: int = 0
    beside_seconds: float | None = None
    staleness: tuple[float, float] | None = None
    taught: float | None = None


class TrainerProgress(Protocol):
    """The output of a Trainer, a context manager: implement it to show progress elsewhere."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def doing(self, what: str) -> None:
        """Show the current activity."""
        ...

    def finished(self, row: StepRow) -> None:
        """Show a finished iteration."""
        ...

    def say(self, line: str) -> None:
        """Print a line."""
        ...


class Doing:
    """Tracks the current activities, which may run concurrently, and shows them as one line."""

    def __init__(self, progress: TrainerProgress) -> None:
        self._progress = progress
        self.now: list[str] = []

    @contextmanager
    def __call__(self, what: str) -> Generator[None]:
        self.now.append(what)
        self._tell()
        try:
            yield
        finally:
            self.now.remove(what)
            self._tell()

    def _tell(self) -> None:
        if self.now:
            self._progress.doing(", ".join(self.now))


class PlainProgress:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._begun: set[str] = set()
        self._stepped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def doing(self, what: str) -> None:
        """Print the activity, until the lines of iterations show that the run goes on."""
        if not self._stepped and what not in self._begun:
            self._begun.add(what)
            self.say(f"{what} ...")

    def finished(self, row: StepRow) -> None:
        """Print the iteration as one line."""
        self._stepped = True
        cells = [f"step {row.step}/{self._steps}", f"iteration {row.iteration}"]
        cells += [f"reward {number(row.reward)}", f"success {percent(row.success)}"]
        beside = "" if row.beside_seconds is None else f" ({row.beside_seconds:.1f} s of it beside rollouts)"
        cells += [f"rollouts {row.rollout_seconds:.1f} s", f"training {row.train_seconds:.1f} s{beside}"]
        cells += [f"staleness {staleness(row.staleness)}"] if row.staleness is not None else []
        cells += [f"taught {percent(row.taught)}", f"tokens {count(row.tokens)}", f"KL {number(row.kl, 4)}"]
        cells += [row.note] if row.note else []
        self.say("  ".join(cells))

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveProgress:
    """A table of the last steps, a sparkline of the reward, and the current activity."""

    def __init__(self, console: Console, steps: int) -> None:
        self._steps = steps
        self._rows: list[StepRow] = []
        self._rewards: list[float] = []
        self._spinner = Spinner("dots", "starting")
        self._ended = False
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._live.stop()

    def doing(self, what: str) -> None:
        """Show the current activity beside the spinner."""
        self._spinner.update(text=what)

    def finished(self, row: StepRow) -> None:
        """Add a row to the table. Its note stands above: a table of 80 columns has no room for a sentence."""
        self._rows.append(row)
        if row.note:
            self.say(f"step {row.step}: {row.note}")
        if row.reward is not None:
            self._rewards.append(row.reward)

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> Group:
        rows = self._rows[-SHOWN_STEPS:]
        table = step_table(rows, self._rewards, self._steps, self._live.console) if rows else None
        parts: list[Table | Spinner] = [table] if table is not None else []
        return Group(*parts, *([] if self._ended else [self._spinner]))


def make_progress(steps: int, console: Console | None = None) -> TrainerProgress:
    """The live table if the console is a terminal, else plain lines. `steps`: the target step."""
    shown = console or Terminal()
    return LiveProgress(shown, steps) if shown.is_terminal else PlainProgress(shown, steps)


def step_table(rows: Sequence[StepRow], rewards: Sequence[float], steps: int, console: Console) -> Table:
    """A table of the steps, with a sparkline of the whole run's rewards in its title. A column that no step has is left out.
    `beside`: seconds of training during which rollouts ran; `stale`: age of the rollouts, in steps; both only with overlap."""
    cells = [
        {
            "step": f"{row.step}/{steps}",
            "iteration": str(row.iteration),
            "reward": number(row.reward),
            "success": percent(row.success),
            "rollouts": f"{row.rollout_seconds:.1f} s",
            "training": f"{row.train_seconds:.1f} s",
            "beside": "-" if row.beside_seconds is None else f"{row.beside_seconds:.1f} s",
            "stale": "-" if row.staleness is None else staleness(row.staleness),
            "taught": percent(row.taught),
            "tokens": count(row.tokens),
            "KL": number(row.kl, 4),
        }
        for row in rows
    ]
    known = [name for name in cells[0] if any(line[name] != "-" for line in cells)]

    def of(columns: Sequence[str]) -> Table:
        title = f"reward {sparkline(rewards)}".strip()
        table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for line in cells:
            table.add_row(*(line[name] for name in columns))
        return table

    return fitting(of, known, _GIVE_WAY, console)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as bars from the lowest to the highest; "" for fewer than three. More than `width` values are averaged in pieces of equal
    length."""
    if len(values) < _MIN_DRAWN:
        return ""
    pieces = min(width, len(values))
    edges = [round(piece * len(values) / pieces) for piece in range(pieces + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] if span else BARS[0] for mean in means)


def number(value: float | None, digits: int = 3) -> str:
    """A number with fixed digits, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a whole percentage, or a dash."""
    return "-" if value is None else f"{value:.0%}"


def staleness(value: tuple[float, float] | None) -> str:
    """Mean and maximum, in steps, or a dash."""
    return "-" if value is None else f"{value[0]:.2f}, max {value[1]:.0f}"


def count(value: float | None) -> str:
    """A count with thousands marked, or a dash."""
    return "-" if value is None else f"{value:,.0f}"
