"""What a run prints while it trains: one plain line per event."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console

from offbook.base.alerts import taught_share

from .report import Iteration


class TrainerProgress(Protocol):
    """The output of a Trainer: implement it to show progress elsewhere."""

    def doing(self, what: str) -> None:
        """Show the current activity."""
        ...

    def finished(self, iteration: Iteration, number: int, note: str) -> None:
        """Show iteration `number` of this run, from 1. `note`: why a step did not train, failures and alerts."""
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
        self._show()
        try:
            yield
        finally:
            self.now.remove(what)
            self._show()

    def _show(self) -> None:
        if self.now:
            self._progress.doing(", ".join(self.now))


class PlainProgress:
    """One line per event, for terminals, logs and pipes. `steps`: the target step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._begun: set[str] = set()
        self._stepped = False

    def doing(self, what: str) -> None:
        """Print the activity, until the lines of iterations show that the run goes on."""
        if not self._stepped and what not in self._begun:
            self._begun.add(what)
            self.say(f"{what} ...")

    def finished(self, iteration: Iteration, number: int, note: str) -> None:
        """Print the iteration as one line."""
        self._stepped = True
        metrics = iteration.metrics
        tokens, taught = metrics.get("tokens/trained"), taught_share(metrics)
        cells = [f"step {iteration.step}/{self._steps}", f"iteration {number}", f"reward {iteration.reward:.3f}"]
        cells += [f"success {_percent(iteration.success)}", f"rollouts {iteration.rollout_seconds:.1f} s"]
        cells.append(f"training {iteration.train_seconds:.1f} s")
        if "staleness/mean" in metrics:
            cells.append(f"staleness {metrics['staleness/mean']:.2f}, max {metrics['staleness/max']:.0f}")
        kl = metrics.get("kl/sampler_learner")
        cells += [f"taught {_percent(taught)}", f"tokens {'-' if tokens is None else f'{tokens:,.0f}'}"]
        cells += [f"KL {'-' if kl is None else f'{kl:.4f}'}", *([note] if note else [])]
        self.say("  ".join(cells))

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
