"""The TensorBoard sink: scalars of steps and evaluations, samples as text. Writes to TENSORBOARD_LOGDIR or `./runs`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from understudy.contracts import EvaluationFinished, GroupsFinished, StepFinished, TraceSink, digest
from understudy.errors import MissingExtraError

from .reading import question_and_answer

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

    def groups_finished(self, event: GroupsFinished) -> None:
        if event.split == "train":
            return
        for rollout in event.rollouts[:SAMPLES]:
            opening, last = question_and_answer(rollout)
            lines = [
                f"**{message.get('role')}**: {message.get('content')}"
                for message in (*opening, *([last] if last else []))
            ]
            tag = f"{event.split}/{rollout.record.place.scenario}"
            self._writer(event.run).add_text(tag, "\n\n".join(lines), event.step)

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        self._scalars(event.run, event.split, event.step, event.at, event.metrics)

    def step_finished(self, event: StepFinished) -> None:
        self._scalars(event.run, "train", event.step, event.at, event.metrics)

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
