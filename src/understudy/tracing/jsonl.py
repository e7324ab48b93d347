"""The JSONL sink: one line per rollout and per step, for jq and notebooks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.types import Trajectory, TrajectoryGroup


class JsonlSink:
    """Appends to `rollouts.jsonl` and `steps.jsonl` in a folder, which it makes."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def groups_finished(self, groups: list[TrajectoryGroup], step: int, split: str) -> None:
        lines = [
            {"step": step, "split": split, "group": index, **rollout_line(trajectory)}
            for index, group in enumerate(groups)
            for trajectory in group
        ]
        self._append("rollouts.jsonl", lines)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("steps.jsonl", [{"step": step, "metrics": dict(metrics)}])

    def close(self) -> None:
        """Nothing is held open."""

    def _append(self, name: str, lines: Sequence[Mapping[str, object]]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, default=repr) + "\n" for line in lines)


def rollout_line(trajectory: Trajectory) -> Mapping[str, object]:
    """A trajectory as one JSON object."""
    return trajectory.model_dump(mode="json", exclude={"messages_and_choices", "additional_histories"}) | {
        "messages": trajectory.messages()
    }
