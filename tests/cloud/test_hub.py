"""Copies of checkpoints in a repository of the Hugging Face Hub: huggingface_hub against a stand-in of its HTTP API."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError, OffbookError, StoreError
from offbook.engine.checkpoint_files import FILES, NOTE
from offbook_cloud.mirror import copies, hub_place, uploads
from offbook_cloud.mirror.place import mirror_place
from offbook_cloud.mirror.pulls import pull
from offbook_cloud.mirror.uploads import MirrorUploads
from tests.cloud.hub_server import Hub, Refused, Repository, running_hub
from tests.cloud.test_mirror import AGENT, eventually, folder, registry, same, umask

__all__ = ["folder", "umask"]  # fixtures
URL = "hf://me/desk/one"
CHECKPOINTS = f"one/{AGENT}/checkpoints"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with the empty repository me/desk, which this process and its children use, with a token that may write."""
    with running_hub() as server:
        server.repositories["me/desk"] = Repository()
        variables = {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": "hf_write",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)  # read when it was imported
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        yield server


def steps(hub: Hub) -> list[str]:
    """The commits that brought a step."""
    return [message for message in hub.repositories["me/desk"].commits if message.endswith(NOTE)]


@pytest.mark.parametrize(
    "url", ["hf://", "hf://desk", "hf://me/", "hf://me/desk/../x", "hf://datasets/me/desk", "hf://me/a@b"]
)
def test_a_url_that_names_no_repository_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="a model repository is written hf://OWNER/REPO"):
        mirror_place(url)


async def test_a_step_is_one_commit_and_a_lost_directory_comes_back_with_equal_bytes(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    assert await copies.push(folder, URL, "agent") == [2, 1]
    assert await copies.push(folder, URL, "agent") == []
    assert steps(hub) == [f"offbook: {AGENT}/checkpoints/{step:04d}/{NOTE}" for step in (2, 1)]
    repository = hub.repositories["me/desk"]
    assert {path for path in repository.files if "0002" in path} == {f"{CHECKPOINTS}/0002/{name}" for name in FILES}
    assert f"{CHECKPOINTS}/0002/adapter_model.safetensors" in repository.lfs
    (tmp_path / "fresh").mkdir()
    [path] = await pull(tmp_path / "fresh", mirror_place(URL))
    assert path.name == "0002" and same(path, folder / AGENT / "checkpoints" / "0002")
    assert registry(tmp_path / "fresh").model("agent").facts == registry(folder).model("agent").facts
    assert {file.name for file in path.iterdir()} == set(FILES)
    assert await mirror_place("hf://me/desk/other").sizes() == {}


async def test_a_step_that_is_not_committed_is_not_there_and_is_uploaded_later(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    newest = folder / AGENT / "checkpoints" / "0002"
    shutil.move(newest, tmp_path / "later")
    await copies.push(folder, URL, "agent")
    shutil.move(tmp_path / "later", newest)

    def refuse(repository: Repository) -> None:
        raise Refused(500, "Internal Error - We're working hard to fix this as soon as possible!")

    hub.before_commit = refuse
    with pytest.raises(StoreError, match=r"could not write .*0002/offbook\.json: 500: Internal Error"):
        await copies.push(folder, URL, "agent")
    assert len(hub.storage) > len(hub.repositories["me/desk"].lfs)  # its large files arrived
    hub.before_commit = lambda repository: None
    (tmp_path / "fresh").mkdir()
    [path] = await pull(tmp_path / "fresh", mirror_place(URL))
    assert path.name == "0001"
    assert await copies.push(folder, URL, "agent") == [2]
    [path] = await pull(tmp_path / "fresh", mirror_place(URL))
    assert path.name == "0002" and same(path, newest)


async def test_a_damaged_copy_is_passed_over_for_the_one_before(hub: Hub, folder: Path, tmp_path: Path) -> None:
    await copies.push(folder, URL, "agent")
    files = hub.repositories["me/desk"].files
    adapter = f"{CHECKPOINTS}/0002/adapter_model.safetensors"
    hub.repositories["me/desk"].write("damage", {adapter: files[adapter][:-1] + b"?"})
    hub.storage.clear()
    for path in hub.repositories["me/desk"].lfs:
        hub.storage[hashlib.sha256(files[path]).hexdigest()] = files[path]
    (tmp_path / "fresh").mkdir()
    [path] = await pull(tmp_path / "fresh", mirror_place(URL))
    assert path.name == "0001"
    assert f"{CHECKPOINTS}/0002/{NOTE}" not in files and f"{CHECKPOINTS}/0002/{NOTE}.damaged" in files


async def test_a_commit_of_somebody_else_is_built_on_and_a_step_of_another_training_stays(
    hub: Hub, folder: Path
) -> None:
    await copies.push(folder, URL, "agent")
    repository = hub.repositories["me/desk"]
    marker = f"{CHECKPOINTS}/0002/{NOTE}"
    content = repository.files.pop(marker)
    others = [{"README.md": b"x"}]

    def meanwhile(repository: Repository) -> None:
        if others:
            repository.write("meanwhile", others.pop())

    hub.before_commit = meanwhile
    assert await copies.push(folder, URL, "agent") == [2]
    assert (repository.files["README.md"], repository.files[marker]) == (b"x", content)
    del repository.files[marker]
    others.append({marker: content + b"\n"})
    with pytest.raises(StoreError, match="two trainings"):
        await copies.push(folder, URL, "agent")
    assert repository.files[marker] == content + b"\n"


@pytest.mark.parametrize(
    ("token", "repository", "why"),
    [
        (None, "me/desk", "there is no token: set HF_TOKEN, or log in with `hf auth login`"),
        ("hf_write", "me/dsk", "there is no repository me/dsk, or the token may not see it: create it with `hf repos"),
        ("hf_old", "me/desk", "the Hub does not accept the token: Invalid credentials in Authorization header"),
        (
            "hf_read",
            "me/desk",
            "the token may not write to me/desk, or not read it: Forbidden: you must use a write token",
        ),
    ],
)
async def test_what_the_hub_refuses_is_one_sentence(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, repository: str, why: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token or "")
    with pytest.raises(OffbookError) as raised:
        await copies.push(folder, f"hf://{repository}", "agent")
    assert why in str(raised.value) and "\n" not in str(raised.value)


async def test_no_step_waits_and_the_lag_is_counted_while_the_hub_hangs_or_refuses(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(uploads, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(hub_place, "ANSWER_SECONDS", 0.5)
    models = registry(folder)
    mirror = MirrorUploads(mirror_place(URL), folder, models)
    hub.answers.clear()
    mirror.start()
    mirror.changed()
    assert mirror.steps_behind(models.model("agent")) is None
    await eventually(lambda: "could not list it: no answer in" in caplog.text)
    monkeypatch.setattr(hub_place, "ANSWER_SECONDS", 60)
    hub.too_many = True
    hub.answers.set()
    await eventually(lambda: mirror.steps_behind(models.model("agent")) == 2)
    hub.too_many = False
    await eventually(lambda: mirror.steps_behind(models.model("agent")) == 0)
    await mirror.finish(20)
    assert len(steps(hub)) == 2 and caplog.text.count("Training goes on") == 1


def test_the_commands_use_the_endpoint_and_the_token_of_the_environment(hub: Hub, folder: Path, tmp_path: Path) -> None:
    def offbook(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "offbook", *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    assert offbook("push", "agent", "--mirror", URL, "--dir", str(folder)) == "step 2\nstep 1\n"
    fresh = tmp_path / "fresh"
    pulled = fresh / AGENT / "checkpoints" / "0002"
    assert offbook("pull", "agent", "--mirror", URL, "--dir", str(fresh)) == f"{pulled}\n"
    assert same(pulled, folder / AGENT / "checkpoints" / "0002")
