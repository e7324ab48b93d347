"""A server whose mirror is an S3 bucket: moto's server over HTTP."""

from __future__ import annotations

import asyncio
import filecmp
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from moto.server import ThreadedMotoServer

from offbook.commands.main import run as main
from offbook.engine.checkpoint_files import FILES, digest
from offbook_cloud.place import BucketPlace
from tests.cloud.test_mirror import AGENT, KILLED, WRITTEN
from tests.server.servers import RunningServer, until

BUCKET = "s3://checkpoints/one"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server with the bucket `checkpoints`, which this process and its children use."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    monkeypatch.setattr("offbook.server.directory_lock.os.umask", lambda _: None)  # the command `pull` sets it
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }.items():
        monkeypatch.setenv(name, value)
    httpx.put(f"{url}/checkpoints", trust_env=False).raise_for_status()
    yield url
    server.stop()


def digests(folder: Path, step: int) -> dict[str, str]:
    path = folder / "default" / "models" / "default" / "checkpoints" / f"{step:04d}"
    return {name: digest(path / name) for name in FILES}


@pytest.mark.slow("real servers")
def test_a_server_whose_directory_is_lost_goes_on_at_the_same_step_with_equal_bytes(tmp_path: Path, s3: str) -> None:
    folder = tmp_path / "dir"
    with RunningServer(folder, "--mirror", BUCKET) as server:
        for step in (1, 2):
            ids = server.rollouts(2, f"step-{step}")
            result = server.train(f"request-{step}", [ids])[-1]["result"]
            assert result["step"] == step
        until(lambda: server.http.get("/api/models/default").json()["steps_held"] == 0, "step 2 is on the mirror")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.output()
    written = digests(folder, 2)
    shutil.rmtree(folder)

    with RunningServer(folder, "--mirror", BUCKET) as server:
        assert server.http.get("/api/models/default").json()["step"] == 2
        assert digests(folder, 2) == written
        ids = server.rollouts(2, "again")
        assert server.train("request-3", [ids])[-1]["result"]["step"] == 3
        until(lambda: server.http.get("/api/models/default").json()["steps_held"] == 0, "step 3 is on the mirror")
        server.kill()
    shutil.rmtree(folder)
    assert main(["pull", "default", "--mirror", BUCKET, "--dir", str(folder)]) == 0
    assert (folder / "default" / "models" / "default" / "checkpoints" / "0003").is_dir()


@pytest.mark.slow("real servers")
def test_an_upload_to_a_bucket_killed_before_its_note_is_not_taken(tmp_path: Path, s3: str) -> None:
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "dir"))
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), BUCKET, "4"], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == "now\n"
        child.kill()
    assert asyncio.run(BucketPlace(BUCKET).sizes()).keys() > {f"{AGENT}/checkpoints/0002/adapter_config.json"}
    assert main(["pull", "agent", "--mirror", BUCKET, "--dir", str(tmp_path / "fresh")]) == 2  # no complete checkpoint
    assert main(["push", "agent", "--mirror", BUCKET, "--dir", str(folder)]) == 0
    assert main(["pull", "agent", "--mirror", BUCKET, "--dir", str(tmp_path / "fresh")]) == 0
    newest = Path(AGENT) / "checkpoints" / "0002"
    assert filecmp.cmpfiles(folder / newest, tmp_path / "fresh" / newest, FILES, shallow=False)[0] == list(FILES)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_bucket_that_is_not_there_stops_a_server_at_its_start(tmp_path: Path, s3: str) -> None:
    words = ["serve", "--mirror", "s3://absent/one", "--dir", str(tmp_path / "dir"), "--port", "0"]
    ended = subprocess.run([sys.executable, "-m", "offbook", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "mirror s3://absent/one: could not list" in ended.stderr and "NoSuchBucket" in ended.stderr
    assert "without --mirror it starts" in ended.stderr
