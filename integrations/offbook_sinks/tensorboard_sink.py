"""The TensorBoard sink: scalars of steps and evaluations; settings and alerts as text. Writes to TENSORBOARD_LOGDIR or `./runs`."""

from __future__ import annotations

import json
import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from offbook.base.errors import MissingExtraError
from offbook.contracts import (
    Alert,
    EvaluationFinished,
    RunStarted,
    StepFinished,
    TraceSink,
    digest,
)


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

    def step_finished(self, event: StepFinished | EvaluationFinished) -> None:
        for name, value in event.metrics.items():
            if math.isfinite(value):
                self._writer(event.run).add_scalar(f"{event.split}/{name}", value, event.step, walltime=event.at)

    evaluation_finished = step_finished

    def alert(self, event: Alert) -> None:
        self._writer(event.run).add_text(f"alert/{event.kind}", event.message, event.step)

    def closed(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in run)[:60]
            self._writers[run] = self._make(str(self._folder / f"{name}-{digest(run)[:6]}"))
        return self._writers[run]
