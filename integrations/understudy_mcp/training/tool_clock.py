"""When the tools of a rollout ran."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from understudy.integration import ToolRun

from ..tools.results import ToolResult

LONGEST_ERROR = 1_000
"""Characters that are kept of a tool's error."""


@dataclass
class ToolTiming:
    """One call under way; `result` and `seconds` once it has ended."""

    result: ToolResult | None = None
    seconds: float = 0.0


@dataclass
class ToolClock:
    """The runs of tools by the turn that asked for them. A run's time includes the wait for its turn at a server that may
    write. `turn`: of the newest message of the model, which was sent the results of all turns before it."""

    turn: int = 0
    _runs: list[tuple[int, ToolRun]] = field(default_factory=list[tuple[int, ToolRun]])

    @contextmanager
    def timed(self, tool_call_id: str, name: str) -> Generator[ToolTiming]:
        """Time the block, in which `result` is set. What it raises is kept as the run's error."""
        timing, turn = ToolTiming(), self.turn
        started_at, began = time.time(), time.monotonic()
        raised: str | None = None
        try:
            yield timing
        except BaseException as error:
            raised = repr(error)[:LONGEST_ERROR]
            raise
        finally:
            timing.seconds = time.monotonic() - began
            text = timing.result.text if timing.result is not None else None
            reported = text[:LONGEST_ERROR] if timing.result is not None and timing.result.is_error and text else None
            run = ToolRun(
                tool_call_id=tool_call_id,
                name=name,
                started_at=started_at,
                ended_at=started_at + timing.seconds,
                error=raised or reported,
                result=text,
            )
            self._runs.append((turn, run))

    def runs(self) -> list[ToolRun]:
        """In order of start; results only of those that the model was not sent."""
        told = [run.model_copy(update={"result": None}) if turn < self.turn else run for turn, run in self._runs]
        return sorted(told, key=lambda run: run.started_at)
