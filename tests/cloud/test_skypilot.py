"""A machine of a cloud: the task, the price, and the whole way with a `sky` of folders and the real server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbook import TrainableModel, TrainConfig, Trajectory, TrajectoryGroup
from offbook.base.errors import BackendError, ConfigError
from offbook.client.connection.download import download_export
from offbook.commands.main import run
from offbook_cloud import SkyPilotBackend, sky_command, skypilot
from offbook_cloud.sky_command import ServerTask, parsed, price_line, wanted_resources
from tests.paths import ROOT

FAKES = ROOT / "tests" / "fakes" / "cloud_machine"


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the fake's machines; its jobs are ended after the test."""
    port = skypilot.free_port()
    for module in (sky_command, skypilot):
        monkeypatch.setattr(module, "SERVER_PORT", port)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FAKE_SKY", str(tmp_path / "sky"))
    monkeypatch.setenv("FAKE_SKY_BIN", str(Path(sys.executable).parent))
    monkeypatch.setenv("PATH", f"{FAKES}:{os.environ['PATH']}")
    yield tmp_path / "sky"
    for job in (tmp_path / "sky").glob("*/job"):
        end(int(job.read_text()))


def end(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_the_task_listens_on_loopback_and_ends_itself() -> None:
    task = ServerTask(
        "Qwen/Qwen2.5-7B-Instruct", wanted_resources("L4", None, False), serve=["--name", "a b"]
    ).as_json()
    assert task["resources"] == {
        "accelerators": "L4:1", "autostop": {"idle_minutes": 5, "down": False, "wait_for": "jobs"},
    }  # fmt: skip
    assert task["run"].splitlines()[-1] == (
        "exec offbook serve --dir ~/offbook --model Qwen/Qwen2.5-7B-Instruct --host 127.0.0.1 --port 8000 --idle-exit 30 "
        "--name 'a b'"
    )
    kept = ServerTask("tiny", wanted_resources("H100:2", None, True), mirror="s3://bucket/desk").as_json()
    assert kept["resources"]["autostop"]["down"] is True
    assert kept["resources"]["use_spot"] is True
    assert kept["run"].endswith("--idle-exit 30 --mirror s3://bucket/desk\n")


def test_the_example_is_the_task_that_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sky_command, "source_from", lambda origin, extras: (f"./offbook-source[{extras}]", {"~/offbook-source": "."})
    )
    example = yaml.safe_load((ROOT / "examples" / "cloud" / "server.yaml").read_text("utf-8"))
    resources = {"accelerators": "L4:1", "use_spot": True}
    task = ServerTask("Qwen/Qwen2.5-7B-Instruct", resources, mirror="s3://BUCKET/desk").as_json()
    assert example == task | {"secrets": {"OFFBOOK_API_KEY": None}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "L4", "resources": {}}, "give either gpu="),
        ({}, "give either gpu="),
        ({"gpu": "L4", "use_spot": True}, "loses its disk: pass mirror="),
        ({"gpu": "L4", "cluster_name": "My GPU"}, "cluster_name: use only a to z"),
        ({"gpu": "L4", "idle_minutes": 0}, "minutes above 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_launched(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(SkyPilotBackend.initialize_cluster(base_model="tiny", **options))


def test_a_missing_sky_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"uv tool install 'skypilot\[aws\]"):
        sky_command.sky("status")
    assert price_line({"accelerators": "L4:1"}).startswith("L4:1: price unknown (the command `sky` is not installed")


def test_the_price_is_the_cheapest_offer_and_a_question_is_asked_before_a_launch(
    clouds: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert price_line({"accelerators": {"L4": 1}}) == "L4:1: from 0.71 USD an hour (gcp g2-standard-4, us-east4)"
    assert run(["cloud", "up", "--model", "tiny", "--gpu", "L4"]) == 1
    assert "L4:1: from 0.71 USD an hour" in capsys.readouterr().out
    assert not any(json.loads(line)[0] == "launch" for line in (clouds / "calls").read_text().splitlines())
    assert run(["cloud", "status"]) == 0
    assert run(["cloud", "ssh", "nothere"]) == 2
    with pytest.raises(BackendError, match="wrote no JSON"):
        parsed("[oops\n")


def test_down_ends_the_machine_and_forgets_its_key(clouds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clouds / "gpu").mkdir(parents=True)
    job = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (clouds / "gpu" / "job").write_text(str(job.pid))
    assert skypilot.cluster_key("gpu") == skypilot.cluster_key("gpu")
    assert skypilot.key_file("gpu").stat().st_mode & 0o777 == 0o600
    assert run(["cloud", "status"]) == 0
    assert capsys.readouterr().out == "gpu  UP  1x L4\n"
    assert run(["cloud", "down", "gpu", "--yes"]) == 0
    assert job.wait(10) == -signal.SIGTERM
    assert skypilot.known_clusters() == []
    assert sky_command.status_of("gpu") is None


async def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def step(model: TrainableModel) -> int:
    """Train one step on rollouts of different prompts, so that no two gradients cancel."""

    async def rollout(reward: float) -> Trajectory:
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": f"say {reward}"}], reward=reward)
        client = model.openai_client()
        answer = await client.chat.completions.create(model=model.name, messages=trajectory.messages(), max_tokens=8)
        trajectory.messages_and_choices.append(answer.choices[0])
        return trajectory

    group = TrajectoryGroup([await rollout(reward) for reward in (0.0, 0.3, 0.5, 1.0)])
    return (await model.train([group], TrainConfig(learning_rate=1e-3))).step


@pytest.mark.slow("more real servers")
def test_up_train_tunnel_killed_and_back_lora_down_preempted_and_resumed_down(clouds: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "base_model": "tiny", "gpu": "L4", "use_spot": True, "mirror": (tmp_path / "mirror").as_uri(),
        "serve": ["--threads", "1", "--device", "cpu"],
    }  # fmt: skip

    async def whole_way() -> None:
        (tmp_path / "mirror").mkdir()
        backend = await SkyPilotBackend.initialize_cluster("gpu", **options)
        model = TrainableModel("agent", base_model="tiny", backend=backend)
        assert await step(model) == 1

        tunnel = backend._tunnel
        assert tunnel is not None
        first = tunnel._ssh
        assert first is not None
        first.kill()
        await wait_for(lambda: tunnel._ssh is not first)
        assert await step(model) == 2  # its calls wait until the tunnel is back

        again = await SkyPilotBackend.initialize_cluster("gpu", **options)  # another process of this user
        assert await download_export(await again.connect(), "agent", 2, "peft", tmp_path / "lora") == tmp_path / "lora"
        again.close()
        assert (tmp_path / "lora" / "adapter_model.safetensors").exists()

        await wait_for(
            (tmp_path / "mirror" / "default" / "models" / "agent" / "checkpoints" / "0002" / "offbook.json").exists
        )
        end(int((clouds / "gpu" / "job").read_text()))
        (clouds / "gpu").rename(clouds / "gone")  # the cloud takes the machine back, with its disk
        assert tunnel._ssh is not None
        tunnel._ssh.kill()
        await wait_for(lambda: not backend._up.is_set())
        assert await step(model) == 3  # a new machine, from the mirror
        await backend.down()
        assert skypilot.known_clusters() == []

    asyncio.run(whole_way())
    commands = [json.loads(line)[0] for line in (clouds / "calls").read_text().splitlines()]
    assert [word for word in commands if word in ("launch", "down", "exec")] == ["launch", "launch", "down"]


@pytest.mark.slow("more real servers")
def test_an_idle_server_ends_and_its_machine_runs_it_again(clouds: Path) -> None:
    options: dict[str, Any] = {
        "base_model": "tiny",
        "gpu": "L4",
        "idle_minutes": 0.05,
        "serve": ["--device", "cpu", "--inference-only"],
    }

    async def twice() -> None:
        for _ in range(2):
            backend = await SkyPilotBackend.initialize_cluster("gpu", relaunch=False, **options)
            await wait_for(lambda: not sky_command.job_runs("gpu"))
            backend.close()

    asyncio.run(twice())
    assert "Nothing to do for 0.05 minutes (--idle-exit)" in (clouds / "gpu" / "log").read_text()
    commands = [json.loads(line)[0] for line in (clouds / "calls").read_text().splitlines()]
    assert [word for word in commands if word in ("launch", "exec")] == ["launch", "exec"]


@pytest.mark.slow("real SkyPilot")
def test_the_real_skypilot_accepts_the_task(tmp_path: Path) -> None:
    python = os.environ.get("OFFBOOK_TEST_SKYPILOT")
    if python is None and os.environ.get("OFFBOOK_TEST_FETCH"):
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
        python = str(tmp_path / "venv" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "skypilot[aws]==0.14.1"], check=True)
    if python is None:  # too large for every run
        pytest.skip(
            "enable with: OFFBOOK_TEST_FETCH=1, or OFFBOOK_TEST_SKYPILOT=PYTHON of an environment with skypilot"
        )
    task = ServerTask("tiny", wanted_resources("L4", None, True), mirror="s3://bucket/desk").as_json()
    (tmp_path / "task.yaml").write_text(json.dumps(task), encoding="utf-8")
    check = (
        "import json, sys, sky\ntask = sky.Task.from_yaml(sys.argv[1])\nchosen, = task.resources\n"
        "stop = chosen.autostop_config\n"
        "print(json.dumps([sky.__version__, chosen.accelerators, chosen.use_spot, stop.idle_minutes, stop.down, stop.wait_for.value]))"
    )
    done = subprocess.run(
        [str(python), "-c", check, str(tmp_path / "task.yaml")], env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["0.14.1", {"L4": 1}, True, 5, True, "jobs"]
