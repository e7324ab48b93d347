"""The MLflow sink over a database of MLflow's own, read back by MLflow's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import ConfigError
from offbook.testing.sinks import RUN, check_sink
from offbook.tracing.sink_registry import resolve_sinks

mlflow = pytest.importorskip("mlflow", reason="pip install -r requirements/test.txt")
pytest.importorskip("alembic", reason="pip install -r requirements/test.txt")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database that the tests share: making its tables takes longer than all of them."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def client(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)  # artifacts go to ./mlruns
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return mlflow.MlflowClient()


def run_of(client: Any) -> Any:
    experiment = client.get_experiment_by_name("offbook")
    [run] = client.search_runs([experiment.experiment_id])
    return run


def shown(client: Any) -> list[str]:
    run = run_of(client)
    own = run.info.run_id
    values = [
        f"{key} {each.step} {each.value}" for key in run.data.metrics for each in client.get_metric_history(own, key)
    ]
    files = [each.path for folder in (None, "samples") for each in client.list_artifacts(own, folder)]
    return values + files


def test_the_mlflow_sink_conforms_and_shows_metrics_samples_and_checkpoints(client: Any, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    check_sink(lambda: resolve_sinks(["mlflow"])[0], lambda: shown(client), str(lora))
    run = run_of(client)
    assert (run.info.run_name, run.info.status) == (RUN, "FINISHED")
    assert run.data.params == {"model": "agent", "group_size": "4"}
    assert run.data.tags["alert.kl"] == "step 2: the policy is far from its base"
    metrics = run.data.metrics
    assert (metrics["train/reward"], metrics["val/success"]) == (1.25, 0.25)
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train/entropy")] == [1, 2]
    [file] = [each.path for each in client.list_artifacts(run.info.run_id, "checkpoints/agent/step-00002")]
    assert file == "checkpoints/agent/step-00002/adapter_config.json"
    sample = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/samples/val-00002.json")
    assert sample["rollouts"][1]["messages"][1]["content"] == "Where is box 1?"


def test_a_tracking_server_that_is_away_or_none_is_said_at_the_start(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    [sink] = resolve_sinks(["mlflow"])
    sink.check()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9: ConnectError"):
        resolve_sinks(["mlflow"])[0].check()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://here")
    with pytest.raises(ConfigError, match="sink mlflow: MLFLOW_TRACKING_URI 'nothing://here'"):
        resolve_sinks(["mlflow"])
