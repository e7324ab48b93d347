"""The narrow protocols that plugins and users implement, each with its failure policy."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol, runtime_checkable

from .types import TrajectoryGroup


@runtime_checkable
class TraceSink(Protocol):
    """Where finished rollouts and steps are shown. A failure is warned about once per kind and never stops training."""

    def groups_finished(self, groups: list[TrajectoryGroup], step: int, split: str) -> None: ...

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Judge(Protocol):
    """Scores a group. One that fails is asked once more, then the group is dropped, counted; returning None drops it too."""

    def __call__(self, group: TrajectoryGroup) -> Awaitable[TrajectoryGroup | None]: ...
