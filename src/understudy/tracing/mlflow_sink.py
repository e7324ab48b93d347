"""The MLflow sink: step metrics, evaluations and checkpoints. Reads MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from understudy.contracts import CheckpointSaved, EvaluationFinished, RunStarted, StepFinished, TraceSink
from understudy.errors import MissingExtraError


class MlflowSink(TraceSink):
    """One MLflow run per run, found again by the tag `understudy.run`; a metric of a step that it has is not logged again."""

    name = "mlflow"

    def __init__(self, *, checkpoints: bool = True) -> None:
        try:
            self._client: Any = import_module("mlflow").MlflowClient()
            self._default: Any = import_module("mlflow.tracking.fluent")._get_experiment_id()
        except ModuleNotFoundError as error:
            raise MissingExtraError("mlflow", "mlflow") from error
        self.checkpoint_files = checkpoints
        self._ids: dict[str, str] = {}

    def run_started(self, event: RunStarted) -> None:
        run = self._run(event.run)
        for name, value in event.settings.items():
            self._client.set_tag(run, f"understudy.{name}", str(value)[:5000])

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        self._log(event.run, event.split, event.step, event.at, event.metrics)

    def step_finished(self, event: StepFinished) -> None:
        self._log(event.run, "train", event.step, event.at, event.metrics)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        if self.checkpoint_files:
            self._client.log_artifacts(self._run(event.run), event.path, f"checkpoints/{event.model}/{event.step:04d}")

    def _log(self, run: str, split: str, step: int, at: float, metrics: Mapping[str, float]) -> None:
        own = self._run(run)
        known = self._client.get_run(own).data.metrics
        for name, value in metrics.items():
            key = f"{split}/{name}"
            old = {each.step for each in self._client.get_metric_history(own, key)} if key in known else set[int]()
            if math.isfinite(value) and step not in old:
                self._client.log_metric(own, key, value, timestamp=int(at * 1000), step=step)

    def _run(self, run: str) -> str:
        if run not in self._ids:
            quoted = run.replace("'", "")
            found = self._client.search_runs([self._default], f"tags.`understudy.run` = '{quoted}'", max_results=1)
            made = (
                found[0]
                if found
                else self._client.create_run(self._default, tags={"understudy.run": quoted}, run_name=run)
            )
            self._ids[run] = made.info.run_id
        return self._ids[run]
