"""When the app's tools ran, from LangChain's events."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import BaseMessage, ToolMessage
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from understudy import Trajectory
from understudy.integration import ToolRun

LONGEST_ERROR = 1_000
"""Characters that are kept of a tool's error."""


@dataclass(frozen=True)
class BegunTool:
    """A tool that runs. `started`: of the monotonic clock."""

    tool_call_id: str
    name: str
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)

    def ended(self, error: str | None = None, result: str | None = None) -> ToolRun:
        """The whole run, which ends now."""
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
    """Times the tools that a model asked for by an id; threads may call it. A tool that the app calls by itself has none."""

    def __init__(self) -> None:
        self._running: dict[UUID, BegunTool] = {}
        self._ended: list[ToolRun] = []

    def start(self, run: UUID, name: object, tool_call_id: object) -> None:
        """A tool begins."""
        if isinstance(tool_call_id, str) and tool_call_id:
            self._running[run] = BegunTool(tool_call_id, str(name or "tool"))

    def end(self, run: UUID, output: object) -> None:
        """A tool has answered."""
        begun = self._running.pop(run, None)
        if begun is None:
            return
        text = result_text(output, begun.tool_call_id)
        failed = any(each.status == "error" for each in _tool_messages(output))
        error = (text or "the tool reported an error")[:LONGEST_ERROR] if failed else None
        self._ended.append(begun.ended(error, text))

    def fail(self, run: UUID, error: BaseException) -> None:
        """A tool has raised. An interrupt or a hand-off to another agent is no error."""
        begun = self._running.pop(run, None)
        if begun is not None:
            text = None if isinstance(error, GraphBubbleUp) else repr(error)[:LONGEST_ERROR]
            self._ended.append(begun.ended(text))

    def write(self, trajectory: Trajectory, seen: Collection[str]) -> None:
        """Add the runs to a trajectory, in order of start; results only of those whose ids no recorded call has `seen`."""
        runs = [run.model_copy(update={"result": None}) if run.tool_call_id in seen else run for run in self._ended]
        cut = [begun.ended("it had not ended when the rollout did") for begun in list(self._running.values())]
        trajectory.tool_runs = sorted([*trajectory.tool_runs, *runs, *cut], key=lambda run: run.started_at)


def tool_call_ids(conversations: Iterable[Iterable[BaseMessage]]) -> frozenset[str]:
    """The ids of the tool calls whose results are in these messages."""
    return frozenset(
        message.tool_call_id for messages in conversations for message in messages if isinstance(message, ToolMessage)
    )


def result_text(output: object, tool_call_id: str) -> str | None:
    """What a tool answered, as text; None for a hand-off without a message."""
    messages = _tool_messages(output)
    own = next((each for each in messages if each.tool_call_id == tool_call_id), messages[0] if messages else None)
    if own is not None:
        return str(own.text)
    return None if output is None or isinstance(output, Command) else str(output)


def _tool_messages(output: object) -> list[ToolMessage]:
    """The tool messages of an answer: itself, or those with which a Command or a list of both updates the state."""
    if isinstance(output, ToolMessage):
        return [output]
    if isinstance(output, list):
        return [message for each in cast(list[object], output) for message in _tool_messages(each)]
    update: Any = cast(Any, output).update if isinstance(output, Command) else None
    messages: object = cast(dict[str, object], update).get("messages") if isinstance(update, dict) else None
    return _tool_messages(cast(list[object], messages)) if isinstance(messages, list) else []
