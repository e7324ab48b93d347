"""Checkpoints of a server elsewhere are downloaded for sinks that show them: while the run goes on, and by an export."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook import RemoteBackend, TrainableModel, Trainer
from offbook.base.errors import ServerError
from offbook.contracts import CheckpointSaved, TraceSink
from offbook.tracing import fanout
from offbook.tracing.export import export_run
from offbook.tracing.sink_registry import resolve_sinks
from tests.server.servers import RunningServer
from tests.sinks_wing.test_wandb import folder, records  # noqa: F401  # a fixture
from tests.tracing.test_runs import SCENARIOS, Rollouts, options


class Folders(TraceSink):
    """Keeps what a checkpoint's folder holds at the time of the call."""

    name, checkpoint_files = "folders", True

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, bytes]] = {}
        self.paths: list[str] = []

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self.paths.append(event.path)
        self.kept[event.id] = {file.name: file.read_bytes() for file in Path(event.path).iterdir()}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server in a directory of its own, whose folders are taken for another machine's."""
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "client"))
    monkeypatch.setattr(fanout, "is_here", lambda path: False)
    with RunningServer(tmp_path / "server") as running:
        yield running


@pytest.mark.slow("W&B's own process, twice")
def test_a_remote_servers_checkpoint_is_an_artifact_live_and_by_an_export(
    elsewhere: RunningServer,
    folder: Path,  # noqa: F811
) -> None:
    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(elsewhere.url))
    kept = Folders()
    report = Trainer(model, Rollouts(), SCENARIOS, **options(sinks=[kept, "wandb"])).train(1)
    weights = Path(report.checkpoint or "", "adapter_model.safetensors").read_bytes()
    assert len(weights) > 10_000
    [shown] = kept.kept.values()
    assert shown["adapter_model.safetensors"] == weights and "adapter_config.json" in shown
    assert not Path(kept.paths[0]).exists(), "a download is kept for the time of the call"
    [artifact] = artifacts(folder)
    assert (artifact.name, sorted(artifact.aliases)) == ("agent-lora", ["latest", "step-1"])
    uploaded = {entry.path: Path(entry.local_path).read_bytes() for entry in artifact.manifest.contents}
    assert uploaded["adapter_model.safetensors"] == weights
    api = asyncio.run(model.api())
    again = Folders()
    export_run(api, report.run, [again, *resolve_sinks(["wandb"])], say=lambda line: None)
    assert again.kept == kept.kept
    assert len(artifacts(folder)) == 2  # offline each process writes a file of its own, under one id


def artifacts(folder: Path) -> list[Any]:  # noqa: F811
    """The models that W&B's offline files have."""
    found = [record for _, record in records(folder)]
    logged = [each.artifact for each in found if each.HasField("artifact")]
    logged += [each.request.log_artifact.artifact for each in found if each.HasField("request")]
    return [each for each in logged if each.type == "model"]


def test_a_checkpoint_here_is_shown_where_it_is_and_a_model_that_no_server_knows_is_said(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    sink = Folders()
    fanout.show_checkpoint(sink, CheckpointSaved("run", "agent", 1, str(tmp_path), {}), [])
    assert sink.paths == [str(tmp_path)]
    with pytest.raises(ServerError, match="does not know the model 'agent', whose step 1 is to be shown"):
        fanout.show_checkpoint(sink, CheckpointSaved("run", "agent", 1, "/elsewhere", {}), [])
