"""A newest step whose bytes changed while their number stayed: server and learner pass over it alike, and training goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.server.servers import RunningServer


@pytest.mark.slow("kills of real servers")
def test_after_flipped_bytes_a_restarted_server_serves_and_trains_the_step_before(tmp_path: Path) -> None:
    folder = tmp_path / "dir"
    with RunningServer(folder) as server:
        for step in (1, 2):
            ids = server.rollouts(2, f"step-{step}")
            assert server.train(f"request-{step}", [ids])[-1]["result"]["step"] == step
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
    checkpoints = folder / "default" / "models" / "default" / "checkpoints"
    weights = checkpoints / "0002" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-8:] = bytes(byte ^ 255 for byte in content[-8:])
    weights.write_bytes(content)

    with RunningServer(folder) as server:
        assert server.http.get("/api/models/default").json()["step"] == 1
        told = server.output()
        assert "0002 is damaged: the bytes of adapter_model.safetensors are not those that were written" in told
        assert str(checkpoints / "0002.damaged-0") in told
        answer = server.chat(trajectory="before").json()
        assert answer["choices"][0]["offbook"]["step"] == 1
        ids = server.rollouts(2, "again")
        events = server.train("request-3", [ids])
        assert events[-1]["result"]["step"] == 2 and events[-1]["result"]["applied"], events
        assert server.chat(trajectory="after").json()["choices"][0]["offbook"]["step"] == 2
        assert sorted(path.name for path in checkpoints.iterdir()) == ["0001", "0002", "0002.damaged-0"]
