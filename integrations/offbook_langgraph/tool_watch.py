"""Times the app's tool runs from LangChain's events."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import BaseMessage, ToolMessage
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from offbook import Trajectory
from offbook.base.types import ToolRun

LONGEST_ERROR = 1_000
"""The most characters kept of a tool's error."""


@dataclass(frozen=True)
class StartedTool:
    """A running tool. `started_at` is wall-clock time, `started` the monotonic clock, both in seconds."""

    tool_call_id: str
    name: str
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)

    def ended(self, error: str | None = None, result: str | None = None) -> ToolRun:
        """Build the finished run, with the end time now."""
        ended_at = self.started_at + time.monotonic() - self.started
        return ToolRun(
            tool_call_id=self.tool_call_id,
            name=self.name,
            started_at=self.started_at,
            ended_at=ended_at,
            error=error,
            result=result,
        )


class ToolWatch:
    """Times the tools that run for a model's tool call. Thread-safe. Tools that the app calls by itself have no tool call id
    and are not recorded."""

    def __init__(self) -> None:
        self._running: dict[UUID, StartedTool] = {}
        self._ended: list[ToolRun] = []

    def start(self, run: UUID, name: object, tool_call_id: object) -> None:
        """Note the start of a tool run."""
        if isinstance(tool_call_id, str) and tool_call_id:
            self._running[run] = StartedTool(tool_call_id, str(name or "tool"))

    def end(self, run: UUID, output: object) -> None:
        """Note the result of a tool run. A tool message with status "error" counts as an error."""
        started = self._running.pop(run, None)
        if started is None:
            return
        text = result_text(output, started.tool_call_id)
        failed = any(message.status == "error" for message in _tool_messages(output))
        error = (text or "the tool reported an error")[:LONGEST_ERROR] if failed else None
        self._ended.append(started.ended(error, text))

    def fail(self, run: UUID, error: BaseException) -> None:
        """Note that a tool raised. An interrupt or a hand-off to another agent is not an error."""
        started = self._running.pop(run, None)
        if started is not None:
            text = None if isinstance(error, GraphBubbleUp) else repr(error)[:LONGEST_ERROR]
            self._ended.append(started.ended(text))

    def write(self, trajectory: Trajectory, seen: Collection[str]) -> None:
        """Add the runs to a trajectory, in order of their start.

        `seen` has the tool call ids whose results are in a recorded call; their runs are stored without the result.
        """
        runs = [run.model_copy(update={"result": None}) if run.tool_call_id in seen else run for run in self._ended]
        unfinished = [run.ended("it had not ended when the rollout did") for run in list(self._running.values())]
        trajectory.tool_runs = sorted([*trajectory.tool_runs, *runs, *unfinished], key=lambda run: run.started_at)


def tool_call_ids(conversations: Iterable[Iterable[BaseMessage]]) -> frozenset[str]:
    """The tool call ids of the tool results in these messages."""
    return frozenset(
        message.tool_call_id for messages in conversations for message in messages if isinstance(message, ToolMessage)
    )


def result_text(output: object, tool_call_id: str) -> str | None:
    """A tool's result as text; None for a hand-off without a message."""
    messages = _tool_messages(output)
    own = next(
        (message for message in messages if message.tool_call_id == tool_call_id), messages[0] if messages else None
    )
    if own is not None:
        return str(own.text)
    return None if output is None or isinstance(output, Command) else str(output)


def _tool_messages(output: object) -> list[ToolMessage]:
    """The tool messages of a tool's output: a message itself, those of a Command's state update, or those of a list."""
    if isinstance(output, ToolMessage):
        return [output]
    if isinstance(output, list):
        return [message for item in cast(list[object], output) for message in _tool_messages(item)]
    update: Any = cast(Any, output).update if isinstance(output, Command) else None
    messages: object = cast(dict[str, object], update).get("messages") if isinstance(update, dict) else None
    return _tool_messages(cast(list[object], messages)) if isinstance(messages, list) else []
