"""`offbook checkpoints` and `offbook export`: of a server elsewhere, whose export is downloaded, and of a directory
on which no server runs."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.base.errors import (
    ConfigError,
    ServerError,
    UnreachableError,
)
from offbook.commands.checkpoints import export_model, list_checkpoints
from offbook.tiny import path as tiny_policy
from tests.fakes.cutting_proxy import cutting_proxy

NAME = "exported"


@dataclass(frozen=True)
class Served:
    """A model at step 1 on a running server; `lora`: its export there."""

    url: str
    folder: Path
    lora: dict[str, bytes]


async def rollout(model: offbook.TrainableModel, reward: float) -> offbook.Trajectory:
    messages: list[Any] = [{"role": "user", "content": f"say hello to {reward}"}]
    answer = await model.openai_client().chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    return offbook.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=reward)


@pytest.fixture(scope="module")
def served(local_backend: offbook.LocalBackend, tmp_path_factory: pytest.TempPathFactory) -> Served:
    async def trained(folder: Path) -> str:
        model = offbook.TrainableModel(NAME, project="tests", base_model="tiny", backend=local_backend)
        group = offbook.TrajectoryGroup(rollout(model, reward) for reward in (0.0, 1.0))
        assert (await model.train(await offbook.gather_trajectory_groups([group]))).step == 1
        await offbook.TrainableModel("untrained", base_model="tiny", backend=local_backend).register()
        await model.export(folder)
        return (await model.api()).url

    folder = tmp_path_factory.mktemp("on-the-server") / "lora"
    return Served(asyncio.run(trained(folder)), local_backend.dir, files(folder))


@pytest.fixture(autouse=True)
def key(served: Served, local_backend: offbook.LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's key, where a user has it."""
    monkeypatch.setenv("OFFBOOK_API_KEY", asyncio.run(local_backend.connect()).key or "")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "offbook", *words],
        cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def download(served_at: str, output: Path, format: str = "peft") -> str:
    return export_model(NAME, output, format, None, served_at, None)


# ---- a server elsewhere


def test_the_readmes_command_downloads_an_export(served: Served, tmp_path: Path) -> None:
    done = command("export", NAME, "--url", served.url, "--format", "peft", "--output", "lora/", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'lora'}\n"), done.stderr
    assert files(tmp_path / "lora") == served.lora
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]
    assert list((served.folder / "exports").iterdir()) == []


def test_a_merged_model_is_downloaded_as_the_server_writes_it(served: Served, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    download(served.url, here, "merged")
    export_model(NAME, there, "merged", None, None, served.folder)
    assert files(here) == files(there) and "model.safetensors" in files(here)


def test_a_download_that_breaks_off_again_and_again_goes_on_where_it_was(served: Served, tmp_path: Path) -> None:
    with cutting_proxy(served.url, cuts=3) as proxy:
        download(proxy.url, tmp_path / "lora")
    assert len(proxy.starts) == 4 and proxy.starts == sorted(set(proxy.starts))
    assert files(tmp_path / "lora") == served.lora


def test_a_download_that_was_given_up_goes_on_with_the_next_command(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, cutting_proxy(served.url, cuts=1000, after=1) as proxy:
        patched.setattr("offbook.client.connection.download.RETRY_SECONDS", 0.5)
        with pytest.raises(UnreachableError):
            download(proxy.url, tmp_path / "lora")
    with monkeypatch.context() as patched, cutting_proxy(served.url, cuts=1) as proxy:
        patched.setattr("offbook.client.connection.download.asyncio.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            download(proxy.url, tmp_path / "lora")
    (part,) = tmp_path.iterdir()
    size = part.stat().st_size
    with cutting_proxy(served.url, cuts=0) as proxy:
        download(proxy.url, tmp_path / "lora")
    assert size > 0 and proxy.starts == [size]
    assert files(tmp_path / "lora") == served.lora and [path.name for path in tmp_path.iterdir()] == ["lora"]


SLEEP = asyncio.sleep


async def interrupted(seconds: float) -> None:
    """Ctrl-C for the command, not for the event loops of other tests' servers, which share asyncio."""
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    await SLEEP(seconds)


def test_a_damaged_download_is_refused_and_removed(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, cutting_proxy(served.url, cuts=1) as proxy:
        patched.setattr("offbook.client.connection.download.asyncio.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            download(proxy.url, tmp_path / "lora")
    (part,) = tmp_path.iterdir()
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(ServerError, match="is damaged: its SHA-256 is"):
        download(served.url, tmp_path / "lora")
    assert list(tmp_path.iterdir()) == []
    download(served.url, tmp_path / "lora")
    assert files(tmp_path / "lora") == served.lora


def test_an_output_that_is_in_use_is_refused_before_anything_is_downloaded(served: Served, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    done = command("export", NAME, "--url", served.url, "--output", "full", cwd=tmp_path)
    assert done.returncode == 2
    assert f"--output: {tmp_path / 'full'} exists and is a folder that is not empty" in done.stderr
    with pytest.raises(ConfigError, match="mine exists and is not a folder"):
        download(served.url, tmp_path / "full" / "mine")
    (tmp_path / "empty").mkdir()
    download(served.url, tmp_path / "empty")
    assert files(tmp_path / "empty") == served.lora


def test_a_disk_without_room_is_said_while_it_fills(served: Served, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"lora cannot be written: File too large\. The same command continues"):
            download(served.url, tmp_path / "lora")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "lora").exists()
    download(served.url, tmp_path / "lora")
    assert files(tmp_path / "lora") == served.lora


def test_what_the_server_refuses_is_its_own_sentence(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="has no step 7"):
        export_model(NAME, tmp_path / "lora", "peft", 7, served.url, None)
    with pytest.raises(ConfigError, match="'untrained' is at step 0"):
        export_model("untrained", tmp_path / "lora", "peft", None, served.url, None)
    assert list(tmp_path.iterdir()) == []


# ---- a directory on which no server runs


@pytest.fixture
def directory(served: Served, tmp_path: Path) -> Path:
    """A copy of the server's models: nothing runs on it."""
    for name in (f"tests/models/{NAME}", "default/models/untrained"):
        shutil.copytree(served.folder / name, tmp_path / "dir" / name)
    return tmp_path / "dir"


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_without_a_server_the_folder_is_read_and_no_torch_loaded(
    served: Served, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('torch was loaded')")
    path = f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    words = ["--dir", str(directory)]
    listed = command("checkpoints", NAME, *words, cwd=tmp_path, PYTHONPATH=path)
    assert listed.stdout == f"    1  {directory}/tests/models/{NAME}/checkpoints/0001\n", listed.stderr
    done = command("export", NAME, "--output", "lora", *words, cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'lora'}\n"), done.stderr
    assert files(tmp_path / "lora") == served.lora
    assert sorted(path.name for path in directory.iterdir()) == ["default", "tests"]  # no server was here


@pytest.mark.slow("merged models")
def test_without_a_server_a_merged_model_is_that_of_a_server(served: Served, directory: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert export_model(NAME, here, "merged", 1, None, directory) == str(here)
    export_model(NAME, there, "merged", 1, None, served.folder)
    assert files(here) == files(there)
    ready = tmp_path / "ready"
    export_model(NAME, ready, "gguf-ready", None, None, directory)
    assert (ready / "tokenizer.json").read_bytes() == (tiny_policy() / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir", "here", "ready", "there"]


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_checkpoints_at_step_0_says_so_with_a_server_and_without(
    served: Served, directory: Path, tmp_path: Path
) -> None:
    for words in (["--url", served.url], ["--dir", str(directory)]):
        done = command("checkpoints", "untrained", *words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == "model 'untrained' is at step 0: nothing has been trained yet, so it has no checkpoints\n"


def test_a_damaged_checkpoint_is_passed_over_and_named_and_left_where_it_is(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = directory / f"tests/models/{NAME}/checkpoints/0001"
    damaged = whole.with_name("0002")
    shutil.copytree(whole, damaged)
    assert [state.step for state in list_checkpoints(NAME, None, directory)] == [1]
    assert "Skipping checkpoint 0002" in caplog.text
    assert damaged.is_dir()


@pytest.mark.parametrize(
    ("name", "step", "output", "kind", "message"),
    [
        ("nobody", None, "lora", ConfigError, r"there is no model 'nobody' in .*dir \(it holds: exported, untrained\)"),
        ("untrained", None, "lora", ConfigError, "'untrained' is at step 0: nothing has been trained yet"),
        (NAME, 7, "lora", ConfigError, "has no step 7; it has 1"),
        (NAME, None, "dir", ServerError, "dir exists already; name a new folder"),
        (NAME, None, "file/lora", ConfigError, "cannot be written: Not a directory"),
        ("a b", None, "lora", ConfigError, "model: 'a b' must be letters"),
    ],
)
def test_what_cannot_be_exported_without_a_server_is_one_sentence(
    directory: Path, tmp_path: Path, name: str, step: int | None, output: str, kind: type[Exception], message: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(kind, match=message):
        export_model(name, tmp_path / output, "peft", step, None, directory)


def test_a_missing_base_is_named_where_a_merge_needs_it(directory: Path, tmp_path: Path) -> None:
    facts = directory / f"tests/models/{NAME}/model.json"
    facts.write_text(facts.read_text().replace('"tiny"', '"/gone/model"'))
    with pytest.raises(ConfigError, match="/gone/model"):
        export_model(NAME, tmp_path / "merged", "merged", None, None, directory)
    export_model(NAME, tmp_path / "lora", "peft", None, None, directory)
    assert b'"/gone/model"' in files(tmp_path / "lora")["adapter_config.json"]
