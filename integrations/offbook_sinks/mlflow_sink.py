"""The MLflow sink: metrics of steps and evaluations, samples and checkpoints as artifacts of one MLflow run per run."""

import math
import os
from typing import Any

import httpx

from offbook import contracts
from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.redaction import error_text
from offbook.contracts import TraceSink, digest
from offbook.tracing.jsonl import rollout_line

from .spans import as_text

try:
    from mlflow import MlflowClient, MlflowException
    from mlflow.entities import Metric, Param
except ImportError as error:
    raise MissingExtraError("mlflow-skinny", "mlflow") from error


MAX_PARAM = 500
"""Letters of a parameter that every MLflow store accepts."""


class MlflowSink(TraceSink):
    """Logs to MLflow. Reads MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME (default `offbook`) and MLflow's other variables.

    A tag with the digest of the run's id identifies the MLflow run, so that it can be resumed. `checkpoints=False` uploads
    no LoRA. Raises ConfigError for an invalid tracking URI.
    """

    name = "mlflow"

    def __init__(self, experiment: str | None = None, *, checkpoints: bool = True) -> None:
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "offbook"
        self.checkpoint_files = checkpoints
        self._runs: dict[str, str] = {}
        self._url = os.environ.get("MLFLOW_TRACKING_URI", "")
        try:
            self._client: Any = MlflowClient()
        except MlflowException as error:
            raise ConfigError(f"sink mlflow: MLFLOW_TRACKING_URI {self._url!r}: {error!s:.300}") from error

    def check(self) -> None:
        try:
            if self._url.startswith("http"):
                httpx.get(self._url, timeout=4)  # MLflow's own client would retry for minutes
            self._client.search_experiments(max_results=1)
        except httpx.HTTPError as error:
            raise ConnectionError(f"{self._url}: {error_text(error)}") from error
        except MlflowException as error:
            raise ConfigError(f"sink mlflow: {self._url!r} refused MLFLOW_TRACKING_*: {error!s:.300}") from error

    def run_started(self, event: contracts.RunStarted) -> None:
        """The settings as parameters. MLflow lets nobody change one, so those of the first start stay."""
        own = self._run(event.run)
        known = self._client.get_run(own).data.params
        named = {"model": event.model, **event.settings}
        fresh = [Param(name, as_text(value)[:MAX_PARAM]) for name, value in named.items() if name not in known]
        self._client.log_batch(own, params=fresh)

    def alert(self, event: contracts.Alert) -> None:
        self._client.set_tag(self._run(event.run), f"alert.{event.kind}", f"step {event.step}: {event.message}")

    def groups_finished(self, event: contracts.GroupsFinished) -> None:
        if event.split != "train":
            rows, file = (
                [rollout_line(rollout) for rollout in event.rollouts],
                f"samples/{event.split}-{event.step:05d}.json",
            )
            self._client.log_dict(self._run(event.run), {"rollouts": rows}, file)

    def step_finished(self, event: contracts.StepFinished | contracts.EvaluationFinished) -> None:
        """Log all metrics of an event in one request, unless the first of them exists for this step."""
        run, metrics = self._run(event.run), event.metrics
        known = sorted((f"{event.split}/{name}", value) for name, value in metrics.items() if math.isfinite(value))
        if known and all(logged.step != event.step for logged in self._client.get_metric_history(run, known[0][0])):
            values = [Metric(name, value, int(event.at * 1000), event.step) for name, value in known]
            self._client.log_batch(run, metrics=values)

    evaluation_finished = step_finished

    def checkpoint_saved(self, event: contracts.CheckpointSaved) -> None:
        if self.checkpoint_files:
            self._client.log_artifacts(
                self._run(event.run), event.path, f"checkpoints/{event.model}/step-{event.step:05d}"
            )

    def closed(self) -> None:
        while self._runs:
            self._client.set_terminated(self._runs.popitem()[1])

    def _run(self, run: str) -> str:
        if run not in self._runs:
            existing = self._client.get_experiment_by_name(self._experiment)
            experiment = existing.experiment_id if existing else self._client.create_experiment(self._experiment)
            tag, query = {"offbook.run": digest(run)}, f"tags.`offbook.run` = '{digest(run)}'"
            known = self._client.search_runs([experiment], query, max_results=1)
            own = known[0] if known else self._client.create_run(experiment, run_name=run, tags=tag)
            self._runs[run] = own.info.run_id
            self._client.update_run(own.info.run_id, status="RUNNING")
        return self._runs[run]
