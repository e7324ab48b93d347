"""Progress bars on a terminal. They show nothing elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from offbook.base.console import Terminal
from offbook.base.types import TrainResult, Trajectory
from offbook.base.wire import TrainEvent

logger = logging.getLogger("offbook")


NO_SIGNAL = {
    "equal_rewards": (
        "all rewards of each group were equal",
        "Look at a group. If its answers are all alike, raise the temperature or word the choices differently; otherwise take "
        "scenarios of another difficulty, a larger group_size, or partial rewards",
    ),
    "none_good": (
        "no rollout had the reward that is imitated",
        "Lower min_reward, take easier scenarios, or begin with a loss that learns from all rewards",
    ),
    "all_or_none_good": (
        "in each group all rollouts had the reward that is imitated, or none had",
        "If all are good, raise min_reward or stop; if a group has none, take easier scenarios",
    ),
    "truncated": (
        "all rollouts with an advantage ended at a limit of tokens",
        "Raise max_completion_tokens, look at what fills the answers, or train without mask_truncated_completions",
    ),
    "no_advantage": (
        "no call that could be trained was of a rollout above or below its group's mean",
        "Look for calls that are never trained: at temperature 0, left out by train_on=, or not made at all",
    ),
    "same_as_teacher": (
        "the teacher gave the sampled tokens the policy's own probabilities",
        "Take another teacher: a later step, a larger model, or a hint that the policy is not shown",
    ),
    "zero_gradient": (
        "the gradient was exactly zero",
        "Let the policy choose: a temperature above 0 without top_k=1 or a small top_p, and fewer forced answers",
    ),
}
"""Kind of no signal -> (what was observed, what to change)."""


class Bar:
    """A progress bar with a count and a note. `description=None`, or stderr not being a terminal, shows nothing."""

    def __init__(self, description: str | None, total: int | None = None) -> None:
        console = Terminal(stderr=True)
        self._shown = description is not None and console.is_terminal and not console.is_jupyter
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=console, disable=not self._shown)
        self._description = description or ""
        self._task: TaskID = self._progress.add_task(self._description, total=total, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int | None, note: str = "", phase: str = "") -> None:
        """Show `done` of `total` with a note."""
        description = f"{self._description} {phase}".strip()
        self._progress.update(self._task, completed=done, total=total, note=note, description=description)


class TrainBar(Bar):
    """Progress of a train request. Warnings, and why no step was applied, are logged, also without a terminal, unless the
    caller says them (`logs=False`)."""

    def __init__(self, description: str | None, *, logs: bool) -> None:
        super().__init__(description)
        self._logs = logs

    def show(self, event: TrainEvent) -> None:
        """Show one event of the stream."""
        if event.kind != "warning":
            self.update(event.done, event.total or None, event.message, event.phase)
        elif self._logs:
            logger.warning("%s", event.message)

    def ended(self, result: TrainResult) -> None:
        """Log why no step was applied, if none was."""
        if self._logs and result.no_signal is not None:
            _, advice = NO_SIGNAL[result.no_signal]
            logger.warning(
                "no step of %r was applied, it stays at step %d: %s. %s", result.model, result.step, result.why, advice
            )


class RolloutBar(Bar):
    """Progress of rollouts, with the mean of the reward and of the first `max_metrics` metrics (None: 4)."""

    def __init__(self, description: str | None, total: int | None, max_metrics: int | None) -> None:
        super().__init__(description, total)
        self._total = total
        self._max_metrics = max_metrics
        self._done = self._failed = 0
        self._sums: dict[str, tuple[float, int]] = {}

    def expect(self, more: int) -> None:
        """Add rollouts that became known after the start to the total."""
        self._total = (self._total or 0) + more

    def succeeded(self, trajectories: Sequence[Trajectory]) -> None:
        """Count a rollout that ended with these trajectories."""
        for trajectory in trajectories:
            numbers = {name: float(value) for name, value in trajectory.metrics.items()}
            if trajectory.reward is not None:
                numbers = {"reward": float(trajectory.reward), **numbers}
            for name, value in numbers.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        self._done += 1
        self._show()

    def failed(self) -> None:
        """Count a failed rollout."""
        self._failed += 1
        self._done += 1
        self._show()

    def _show(self) -> None:
        names = ["reward", *[name for name in self._sums if name != "reward"]]
        kept = [name for name in names if name in self._sums][
            : 1 + (4 if self._max_metrics is None else self._max_metrics)
        ]
        note = " ".join(f"{name}={self._sums[name][0] / self._sums[name][1]:.3g}" for name in kept)
        self.update(self._done, self._total, f"{note} failed={self._failed}" if self._failed else note)
