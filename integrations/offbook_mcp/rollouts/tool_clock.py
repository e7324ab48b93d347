"""Times the tool runs of a rollout."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offbook.base.types import ToolRun
from offbook_mcp.tools.results import ToolResult

LONGEST_ERROR = 1_000
"""The most characters kept of a tool's error."""


@dataclass
class ToolTiming:
    """One tool call. `result` and `seconds` are set when it has ended."""

    result: ToolResult | None = None
    seconds: float = 0.0


@dataclass
class ToolClock:
    """The tool runs with the turn that requested them.

    A run's time includes waiting for other calls to a server that may write. `turn` is the turn of the model's newest
    message, which was sampled after the results of all earlier turns.
    """

    turn: int = 0
    _runs: list[tuple[int, ToolRun]] = field(default_factory=list[tuple[int, ToolRun]])

    @contextmanager
    def timed(self, tool_call_id: str, name: str) -> Generator[ToolTiming]:
        """Time the block, which sets `result`. An exception of the block is stored as the run's error."""
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
        """The runs in order of their start. Only those whose result the model has not read include the result."""
        runs = [run.model_copy(update={"result": None}) if turn < self.turn else run for turn, run in self._runs]
        return sorted(runs, key=lambda run: run.started_at)
