"""The W&B sink: step metrics, tables of samples, checkpoints as artifact versions; one W&B run per run and restart."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.redaction import error_text
from offbook.base.types import Json
from offbook.base.wire import RolloutTrace
from offbook.contracts import (
    Alert,
    CheckpointSaved,
    EvaluationFinished,
    GroupsFinished,
    RunStarted,
    StepFinished,
    TraceSink,
)
from offbook.tracing.rollout_reader import question_and_answer

try:
    import wandb
    from wandb.errors import AuthenticationError
except ImportError as error:
    raise MissingExtraError("wandb", "wandb") from error

ANSWER_SECONDS: Final = 4.0
SAMPLES: Final = 50
"""Rows of a table."""
COLUMNS: Final = ("scenario", "index", "input", "output", "reward", "explanation", "error", "trajectory")
PROJECT: Final = "offbook"


class WandbSink(TraceSink):
    """Logs to W&B under the run's own id, so that a resumed or re-exported run continues the same W&B run.

    Reads WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR and WANDB_BASE_URL, as W&B does. `samples` is the
    number of table rows. `checkpoints=False` uploads no LoRA.
    """

    name = "wandb"

    def __init__(self, project: str | None = None, *, samples: int = SAMPLES, checkpoints: bool = True) -> None:
        self._project = project or os.environ.get("WANDB_PROJECT") or PROJECT
        self._samples = samples
        self.checkpoint_files = checkpoints
        self._open: Any = None
        self._id = ""

    def check(self) -> None:
        """Check the key, unless the run is offline. Raises ConfigError for a missing or wrong key, ConnectionError if nothing
        answers."""
        if _is_offline():
            return
        host = _host()
        if not os.environ.get("WANDB_API_KEY") and wandb.api.api_key is None:
            raise ConfigError(
                f"sink wandb: no key for {host}: set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
            )
        _require_answer()
        try:
            valid = wandb.login(verify=True, timeout=4)
        except (AuthenticationError, ValueError) as error:
            raise ConfigError(f"sink wandb: {host} refused WANDB_API_KEY: {error}") from error
        except Exception as error:  # W&B's network errors have no common class
            raise ConnectionError(f"{host}: {error}") from error
        if not valid:
            raise ConfigError(f"sink wandb: {host} refused WANDB_API_KEY")

    def run_started(self, event: RunStarted) -> None:
        config = {"offbook": {"run": event.run, "model": event.model, "started_at_step": event.step, **event.settings}}
        self._run(event.run).config.update(config, allow_val_change=True)

    def groups_finished(self, event: GroupsFinished) -> None:
        if event.split == "train":
            return
        table = wandb.Table(
            columns=[*COLUMNS, "metrics"], data=[row(rollout) for rollout in event.rollouts[: self._samples]]
        )
        self._log(event.run, event.step, {f"samples/{event.split}": table})

    def step_finished(self, event: StepFinished | EvaluationFinished) -> None:
        self._log(event.run, event.step, {f"{event.split}/{name}": value for name, value in event.metrics.items()})

    evaluation_finished = step_finished

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        if not self.checkpoint_files:
            return
        run = self._run(event.run)
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", event.model)
        artifact = wandb.Artifact(f"{name}-lora", type="model", metadata={"step": event.step, "run": event.run})
        artifact.add_dir(event.path, policy="mutable", skip_cache=True)
        run.log_artifact(artifact, aliases=[f"step-{event.step}", "latest"])

    def alert(self, event: Alert) -> None:
        run = self._run(event.run)
        run.alert(title=f"{event.kind} at step {event.step}", text=event.message, level="WARN")
        self._log(event.run, event.step, {f"alert/{event.kind}": event.value})

    def closed(self) -> None:
        run, self._open = self._open, None
        if run is not None:
            run.finish()

    def _run(self, run: str) -> Any:
        """The W&B run, which is created or resumed under an id derived from the run's id."""
        name = run_id(run)
        if self._open is None or self._id != name:
            self.closed()
            if not _is_offline():
                _require_answer()  # W&B's own attempt takes 90 seconds
            self._id = name
            self._open = wandb.init(
                project=self._project,
                id=name,
                name=run,
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True),
            )
            for prefix in ("train", "val", "val-sampled", "compare", "samples", "alert"):
                self._open.define_metric(f"{prefix}/*", step_metric="step")
            self._open.define_metric("step")
        return self._open

    def _log(self, run: str, step: int, values: Mapping[str, Json]) -> None:
        """Log values for a step. W&B ignores steps before its newest one, so nothing is logged twice."""
        self._run(run).log({**values, "step": step}, step=step)


def _is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun")


def _host() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def _require_answer() -> None:
    """Raise ConnectionError if the W&B server does not answer. W&B's login reports that as a wrong key."""
    try:
        httpx.get(_host(), timeout=ANSWER_SECONDS)
    except httpx.HTTPError as error:
        raise ConnectionError(f"{_host()}: {error_text(error)}") from error


def run_id(run: str) -> str:
    """A run's id in the characters that W&B allows, at most 128."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run)[:128]


def row(rollout: RolloutTrace) -> Sequence[Json]:
    """A rollout as a row of the samples table; the columns are COLUMNS and the metrics."""
    record = rollout.record
    opening, last = question_and_answer(rollout)
    question = next(
        (message.get("content") for message in reversed(opening) if message.get("role") in ("user", "prompt")), None
    )
    answer = (last or {}).get("content") or (last or {}).get("tool_calls")
    explained = next((line for line in reversed(record.logs) if line.startswith("RULER explanation: ")), None)
    error = f"{record.exception.type}: {record.exception.message}" if record.exception is not None else None
    texts = [None if value is None else str(value) for value in (question, answer, explained, error)]
    metrics = ", ".join(f"{name}={value:g}" for name, value in record.metrics.items())
    return [record.place.scenario, record.place.index, *texts[:2], record.reward, *texts[2:], record.id, metrics]
