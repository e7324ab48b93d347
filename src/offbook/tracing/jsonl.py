"""The JSON Lines sink: one line per rollout, step, evaluation and alert, for jq and notebooks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from offbook.base.wire import RolloutTrace
from offbook.contracts import (
    Alert,
    EvaluationFinished,
    GroupsFinished,
    RunStarted,
    StepFinished,
    TraceSink,
)

from .rollout_reader import conversations


class JsonlSink(TraceSink):
    """Appends to `rollouts.jsonl`, `steps.jsonl`, `evaluations.jsonl`, `alerts.jsonl` and `runs.jsonl` in a
    folder.

    Creates the folder. Does not write a line whose `id` is already in the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.name = f"jsonl:{self._folder.absolute()}"
        self._written: dict[str, set[str]] = {}

    def run_started(self, event: RunStarted) -> None:
        line = {"id": event.id, "run": event.run, "model": event.model, "step": event.step, "at": event.at}
        self._append("runs.jsonl", [line | {"settings": dict(event.settings)}])

    def groups_finished(self, event: GroupsFinished) -> None:
        head = {"run": event.run, "split": event.split, "step": event.step}
        self._append("rollouts.jsonl", [{**head, **rollout_line(rollout)} for rollout in event.rollouts])

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        head = {"id": event.id, "run": event.run, "model": event.model, "split": event.split, "step": event.step}
        self._append("evaluations.jsonl", [head | {"metrics": dict(event.metrics)}])

    def step_finished(self, event: StepFinished) -> None:
        line = {"id": event.id, "run": event.run, "model": event.model, "step": event.step}
        self._append("steps.jsonl", [line | {"metrics": dict(event.metrics)}])

    def alert(self, event: Alert) -> None:
        line = {"id": event.id, "run": event.run, "model": event.model, "step": event.step, "kind": event.kind}
        self._append("alerts.jsonl", [line | {"message": event.message, "value": event.value, "limit": event.limit}])

    def _append(self, name: str, lines: Sequence[Mapping[str, object]]) -> None:
        file = self._folder / name
        if name not in self._written:
            self._written[name] = set(_ids(file))
        known = self._written[name]
        fresh = [line for line in lines if line["id"] not in known]
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(line, default=repr) + "\n" for line in fresh)
        known |= {str(line["id"]) for line in fresh}


def rollout_line(rollout: RolloutTrace) -> Mapping[str, object]:
    """A rollout as a JSON object."""
    record = rollout.record.model_dump(mode="json", exclude={"histories", "calls", "weights", "unused"})
    histories = [history.model_dump(mode="json", include={"messages", "tools"}) for history in conversations(rollout)]
    first, *others = histories or [{"messages": [], "tools": None}]
    shown = [{"messages_and_choices": history["messages"], "tools": history["tools"]} for history in others]
    return record | first | {"group": rollout.record.place.group, "additional_histories": shown}


def _ids(file: Path) -> Iterator[str]:
    """The ids of the existing lines. Others are skipped, such as an incomplete one that a killed process left."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for line in lines:
            try:
                yield str(json.loads(line).get("id"))
            except (ValueError, AttributeError, RecursionError):
                continue
