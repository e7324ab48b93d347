"""Hands rollouts and steps to every sink; a sink that fails is named once per kind of failure and left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from understudy.contracts import TraceSink
from understudy.types import TrajectoryGroup


class FanOut:
    """A TraceSink over many. A failure warns once per sink and exception type and never stops training."""

    def __init__(self, sinks: Sequence[TraceSink]) -> None:
        self._sinks = tuple(sinks)
        self._warned: set[tuple[int, str]] = set()

    def groups_finished(self, groups: list[TrajectoryGroup], step: int, split: str) -> None:
        for sink in self._sinks:
            self._guard(sink, lambda sink=sink: sink.groups_finished(groups, step, split))

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            self._guard(sink, lambda sink=sink: sink.step_finished(step, metrics))

    def close(self) -> None:
        for sink in self._sinks:
            self._guard(sink, sink.close)

    def _guard(self, sink: TraceSink, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except Exception as error:  # noqa: BLE001  # a sink is foreign code; the contract says that it never stops training
            kind = (id(sink), type(error).__name__)
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(
                    f"trace sink {type(sink).__name__} failed and goes on without this: {error!r}", stacklevel=4
                )
