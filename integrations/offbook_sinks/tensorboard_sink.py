"""The TensorBoard sink: scalars of steps and evaluations; samples, settings and alerts as text. Writes to TENSORBOARD_LOGDIR or `./runs`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from offbook.base.errors import MissingExtraError
from offbook.base.wire import RolloutTrace
from offbook.contracts import (
    Alert,
    EvaluationFinished,
    GroupsFinished,
    RunStarted,
    StepFinished,
    TraceSink,
    digest,
)
from offbook.tracing.rollout_reader import question_and_answer

SAMPLES = 20


class TensorboardSink(TraceSink):
    """Writes one folder per run. For a value that is written twice, TensorBoard shows one."""

    name = "tensorboard"

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = Path(folder or os.environ.get("TENSORBOARD_LOGDIR") or "runs")
        try:
            self._make: Any = import_module("tensorboardX").SummaryWriter
        except ModuleNotFoundError as error:
            raise MissingExtraError("tensorboardX", "tensorboard") from error
        self._writers: dict[str, Any] = {}

    def run_started(self, event: RunStarted) -> None:
        settings = json.dumps(dict(event.settings), indent=2, default=repr)
        text = "\n".join(f"    {line}" for line in settings.splitlines())  # a block of code in Markdown
        self._writer(event.run).add_text(f"settings/{event.model}", text, event.step)

    def groups_finished(self, event: GroupsFinished) -> None:
        if event.split == "train":
            return
        by_scenario: dict[str, list[RolloutTrace]] = {}
        for rollout in event.rollouts[:SAMPLES]:
            by_scenario.setdefault(str(rollout.record.place.scenario), []).append(rollout)
        for scenario, rollouts in by_scenario.items():  # a tag has one text for each step
            text = "\n\n---\n\n".join(map(_sample, rollouts))
            self._writer(event.run).add_text(f"{event.split}/{scenario}", text, event.step)

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        self._scalars(event.run, event.split, event.step, event.at, event.metrics)

    def step_finished(self, event: StepFinished) -> None:
        self._scalars(event.run, "train", event.step, event.at, event.metrics)

    def alert(self, event: Alert) -> None:
        self._writer(event.run).add_text(f"alert/{event.kind}", event.message, event.step)

    def closed(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _scalars(self, run: str, split: str, step: int, walltime: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer(run).add_scalar(f"{split}/{name}", value, step, walltime=walltime)

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in run)[:60]
            self._writers[run] = self._make(str(self._folder / f"{name}-{digest(run)[:6]}"))
        return self._writers[run]


def _sample(rollout: RolloutTrace) -> str:
    record = rollout.record
    opening, last = question_and_answer(rollout)
    failed = record.exception
    head = f"reward {record.reward:g}" if record.reward is not None else "no reward"
    lines = [head if failed is None else f"failed: {failed.type}: {failed.message}"]
    for message in (*opening, *([last] if last else [])):
        text = message.get("content") or json.dumps(message.get("tool_calls"), default=repr)
        lines.append(f"**{message.get('role')}**: {text}")
    return "\n\n".join(lines)
