"""Copies of checkpoints in a folder at file://: uploaded, torn, lost, pulled."""

from __future__ import annotations

import asyncio
import filecmp
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbook.base.errors import ConfigError, StoreError
from offbook.commands.main import run as main
from offbook.engine.checkpoint_files import FILES, NOTE, digest
from offbook.server.base_model import BaseModelPath
from offbook.server.directory_lock import sweep
from offbook.server.models.registry import ModelRegistry
from offbook.server.records.store import Store
from offbook_cloud import pulls, uploads
from offbook_cloud.place import BucketPlace
from offbook_cloud.uploads import MirrorUploads
from tests.paths import ROOT

WRITTEN = ROOT / "tests/server/written_directory/files"
AGENT = "desk/models/agent"
KILLED = """
import asyncio, sys, time
from pathlib import Path
from offbook_cloud.uploads import push
from offbook_cloud.place import BucketPlace
write, written = BucketPlace.upload, []
async def upload(self, path, source):
    written.append(path)
    if len(written) > int(sys.argv[3]):
        print("now", flush=True)
        time.sleep(60)
    await write(self, path, source)
BucketPlace.upload = upload
asyncio.run(push(Path(sys.argv[1]), sys.argv[2], "agent"))
"""
"""Pushes a model, and stops before a file. `sys.argv`: directory, URL, files to write."""


@pytest.fixture(autouse=True)
def umask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `pull` sets this process's."""
    monkeypatch.setattr("offbook.server.directory_lock.os.umask", lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a model of two steps, whose notes have digests, one of none, and records."""
    copy = Path(shutil.copytree(WRITTEN, tmp_path / "dir"))
    for note in (copy / AGENT / "checkpoints").glob(f"*/{NOTE}"):
        digests = {name: digest(note.with_name(name)) for name in FILES if name != NOTE}
        note.write_text(json.dumps(json.loads(note.read_text()) | {"digests": digests}))
    return copy


@pytest.fixture
def place(tmp_path: Path) -> BucketPlace:
    return BucketPlace(f"file://{tmp_path}/mirror")


def there(place: BucketPlace, step: int) -> Path:
    return Path(place.url.removeprefix("file://")) / AGENT / "checkpoints" / f"{step:04d}"


def registry(folder: Path) -> ModelRegistry:
    return ModelRegistry.read(folder, BaseModelPath("tiny", folder, "tiny"))


def same(one: Path, other: Path) -> bool:
    return filecmp.cmpfiles(one, other, FILES, shallow=False)[0] == list(FILES)


async def eventually(met: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not met():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("bucket/x", "unknown scheme ''"),
        ("s3://", "it names no bucket"),
        ("az:///x", "it names no container"),
        ("file://mirror", "absolute path"),
        ("file:///", "absolute path"),
        ("s3://key:secret@bucket/x", r"--mirror s3://\.\.\.: a URL with credentials"),
    ],
)
def test_a_url_that_is_no_place_is_refused_by_name(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        BucketPlace(url)


async def test_the_newest_step_is_uploaded_first_and_each_note_last(
    folder: Path, place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    for name in ("upload", "create"):
        write: Callable[..., Awaitable[object]] = getattr(BucketPlace, name)

        async def recorded(
            self: BucketPlace, path: str, content: object, write: Callable[..., Awaitable[object]] = write
        ):
            written.append(path.removeprefix(f"{AGENT}/"))
            return await write(self, path, content)

        monkeypatch.setattr(BucketPlace, name, recorded)
    assert await uploads.push(folder, place.url, "agent") == [2, 1]
    steps = [
        f"checkpoints/{step}/{name}"
        for step in ("0002", "0001")
        for name in (*(file for file in FILES if file != NOTE), NOTE)
    ]
    assert written == ["model.json", "state.json", *steps]
    assert await uploads.push(folder, place.url, "agent") == []


async def test_a_lost_directory_comes_back_at_the_same_step_with_equal_bytes(
    folder: Path, place: BucketPlace, tmp_path: Path
) -> None:
    (folder / AGENT / "state.json").write_text('{"value": {"batch": 7}}')
    await uploads.push(folder, place.url, "agent")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    [path] = await pulls.pull(fresh, place)
    assert path == fresh / AGENT / "checkpoints" / "0002" and same(path, folder / AGENT / "checkpoints" / "0002")
    model = registry(fresh).model("agent")
    assert (model.facts, model.step) == (registry(folder).model("agent").facts, 2)
    assert (fresh / AGENT / "state.json").read_text() == '{"value": {"batch": 7}}'
    await (await Store.open(fresh / "records.db")).close()  # which refuses checkpoints without records
    assert sweep(fresh) == 0 and await pulls.pull(fresh, place) == []


async def test_a_directory_whose_records_alone_are_lost_gets_none_by_a_pull(folder: Path, place: BucketPlace) -> None:
    await uploads.push(folder, place.url, "agent")
    shutil.rmtree(folder / AGENT / "checkpoints" / "0002")
    (folder / "records.db").unlink(missing_ok=True)
    assert len(await pulls.pull(folder, place)) == 1
    with pytest.raises(StoreError, match="the file is missing, but there are checkpoints"):
        await Store.open(folder / "records.db")


async def test_an_upload_killed_before_its_note_is_not_taken_and_is_completed_later(
    folder: Path, place: BucketPlace, tmp_path: Path
) -> None:
    newest = folder / AGENT / "checkpoints" / "0002"
    shutil.move(newest, tmp_path / "later")
    await uploads.push(folder, place.url, "agent")
    shutil.move(tmp_path / "later", newest)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), place.url, "4"], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == "now\n"
        child.kill()
    assert there(place, 2).is_dir() and not (there(place, 2) / NOTE).exists()
    (tmp_path / "fresh").mkdir()
    [path] = await pulls.pull(tmp_path / "fresh", place)
    assert path.name == "0001"
    assert await uploads.push(folder, place.url, "agent") == [2]
    [path] = await pulls.pull(tmp_path / "fresh", place)
    assert path.name == "0002" and same(path, newest)


async def test_a_damaged_copy_is_passed_over_for_the_one_before(
    folder: Path, place: BucketPlace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await uploads.push(folder, place.url, "agent")
    adapter = there(place, 2) / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1] + b"?")
    (tmp_path / "fresh").mkdir()
    [path] = await pulls.pull(tmp_path / "fresh", place)
    assert path.name == "0001" and "Step 2 of agent" in caplog.text and "are not those that were written" in caplog.text
    assert [each.name for each in path.parent.iterdir()] == ["0001"]
    assert await uploads.push(folder, place.url, "agent") == [2]  # or the step 2 of a training that went on from 1


def _note(model: Path, **fields: object) -> None:
    note = model / "checkpoints/0002" / NOTE
    note.write_text(json.dumps(json.loads(note.read_text()) | fields))


def _facts(model: Path, **fields: object) -> None:
    facts = model / "model.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | fields))


def _write(path: Path, content: bytes, size: int = 0) -> None:
    """A file of at least `size` bytes, of which the disk holds none."""
    path.write_bytes(content)
    os.truncate(path, max(size, len(content)))


HOSTILE: dict[str, tuple[int, Callable[[Path], object]]] = {
    "a state of other bytes": (2, lambda model: _write(model / "state.json", b"\xff\xfe")),
    "a state that is no JSON": (2, lambda model: _write(model / "state.json", b"[" * 100_000)),
    "a state of 20 GiB": (2, lambda model: _write(model / "state.json", b"{}", 20 * 2**30)),
    "facts of other bytes": (2, lambda model: _write(model / "model.json", b"\xff")),
    "facts of 20 GiB": (2, lambda model: _write(model / "model.json", b"{}", 20 * 2**30)),
    "facts of another model": (2, lambda model: _facts(model, name="other")),
    "facts of another project": (2, lambda model: _facts(model, project="other")),
    "a step with a name of its own": (2, lambda at: shutil.copytree(at / "checkpoints/0002", at / "checkpoints/00003")),
    "a step of 200 digits": (2, lambda at: shutil.copytree(at / "checkpoints/0002", at / f"checkpoints/{'9' * 200}")),
    "a note that is no JSON": (1, lambda model: _write(model / "checkpoints/0002" / NOTE, b"[" * 100_000)),
    "a note of 20 GiB": (1, lambda model: _write(model / "checkpoints/0002" / NOTE, b"{}", 20 * 2**30)),
    "a note with a digest of a file outside": (1, lambda model: _note(model, digests={"../../../../passwd": "a"})),
    "a note with the size of a file outside": (1, lambda model: _note(model, sizes={"/etc/passwd": 1})),
    "a file of 20 GiB": (1, lambda model: _write(model / "checkpoints/0002/rng.safetensors", b"", 20 * 2**30)),
    "a file beside it": (2, lambda model: _write(model / "checkpoints/0002/%2e%2e%2fevil.sh", b"x")),
}
"""What stands at a place -> the step that is taken, and how it is made."""


@pytest.mark.parametrize("attack", HOSTILE)
async def test_a_hostile_place_gives_a_whole_step_and_writes_nothing_else(
    folder: Path, place: BucketPlace, tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))  # 20 GiB fit on no such disk
    await uploads.push(folder, place.url, "agent")
    step, make = HOSTILE[attack]
    make(tmp_path / "mirror" / AGENT)
    new = tmp_path / "new"
    [pulled] = await pulls.pull_model(new, place.url, "agent")
    assert pulled == new / AGENT / f"checkpoints/{step:04d}" and same(
        pulled, folder / AGENT / f"checkpoints/{step:04d}"
    )
    [model] = registry(new).models()
    assert (model.facts.project, model.facts.name, model.step) == ("desk", "agent", step)
    written = {path.name for path in new.rglob("*") if path.is_file()}
    assert written <= {*FILES, "model.json", "state.json", "records.db", "server.lock"}, written


async def test_a_damaged_newest_step_of_the_directory_is_replaced(folder: Path, place: BucketPlace) -> None:
    await uploads.push(folder, place.url, "agent")
    newest = folder / AGENT / "checkpoints" / "0002"
    (newest / "rng.safetensors").write_bytes(b"")
    assert await pulls.pull(folder, place) == [newest]
    assert same(newest, there(place, 2)) and newest.with_name("0002.damaged-0").is_dir()


async def test_two_trainings_are_never_mixed(folder: Path, place: BucketPlace) -> None:
    await uploads.push(folder, place.url, "agent")
    note = there(place, 2) / NOTE
    note.write_bytes(note.read_bytes() + b"\n")
    for mixed in (pulls.pull(folder, place), uploads.push(folder, place.url, "agent")):
        with pytest.raises(ConfigError, match="two trainings"):
            await mixed
    facts = there(place, 2).parent.with_name("model.json")
    facts.write_text(facts.read_text().replace('"tiny"', '"tiny-mcp"'))
    with pytest.raises(ConfigError, match="has the base tiny-mcp"):
        await pulls.pull(folder, place)


async def test_a_full_disk_is_said_and_leaves_nothing(
    folder: Path, place: BucketPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await uploads.push(folder, place.url, "agent")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(StoreError, match=r"agent \(.* MiB\) could not be pulled: No space left on device"):
        await pulls.pull(fresh, place)
    assert list(fresh.iterdir()) == []


async def test_a_place_that_fails_is_logged_once_and_caught_up_with(
    folder: Path, place: BucketPlace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(uploads, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(uploads, "LONGEST_PAUSE", 0.02)
    tries: list[str] = []
    write = BucketPlace.upload

    async def refused(self: BucketPlace, path: str, source: Path) -> None:
        tries.append(path)
        raise StoreError("mirror: denied")

    monkeypatch.setattr(BucketPlace, "upload", refused)
    models = registry(folder)
    mirror = MirrorUploads(place, folder, models)
    assert mirror.steps_behind(models.model("agent")) is None
    mirror.start()
    await eventually(lambda: len(tries) > 3)
    assert mirror.steps_behind(models.model("agent")) == 2
    monkeypatch.setattr(BucketPlace, "upload", write)
    await eventually(lambda: mirror.steps_behind(models.model("agent")) == 0)
    await mirror.finish(20)
    assert (there(place, 1) / NOTE).exists()
    assert caplog.text.count("mirror: denied. Training goes on") == 1
    assert caplog.text.count("is up to date again") == 1


async def test_a_commit_is_uploaded_and_a_stop_uploads_what_is_left(folder: Path, place: BucketPlace) -> None:
    models = registry(folder)
    model = models.model("agent")
    second = model.checkpoints.pop(2)
    mirror = MirrorUploads(place, folder, models)
    mirror.start()
    await eventually(lambda: mirror.steps_behind(model) == 0)
    assert not there(place, 2).exists()
    model.checkpoints[2] = second
    assert mirror.steps_behind(model) == 1
    mirror.changed()
    await eventually(lambda: mirror.steps_behind(model) == 0)
    shutil.rmtree(there(place, 1).parent)
    again = MirrorUploads(place, folder, models)
    again.start()
    await again.finish(20)
    assert (there(place, 1) / NOTE).exists() and (there(place, 2) / NOTE).exists()


async def test_a_stop_does_not_wait_for_a_place_that_hangs(
    folder: Path, place: BucketPlace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung: list[str] = []

    async def hang(self: BucketPlace, path: str, source: Path) -> None:
        if "/checkpoints/" in path:
            hung.append(path)
            await asyncio.Event().wait()

    monkeypatch.setattr(BucketPlace, "upload", hang)
    mirror = MirrorUploads(place, folder, registry(folder))
    mirror.start()
    await eventually(lambda: hung)
    assert "/0002/" in hung[0]  # the newest step is the first
    async with asyncio.timeout(20):
        await mirror.finish(0.05)
    assert "lacks steps of agent [1, 2]" in caplog.text


def test_the_commands_push_and_pull(
    folder: Path, place: BucketPlace, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["agent", "--mirror", place.url, "--dir"]
    assert main(["push", *words, str(folder)]) == 0
    assert capsys.readouterr().out == "step 2\nstep 1\n"
    assert main(["pull", *words, str(tmp_path / "fresh")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'fresh' / AGENT / 'checkpoints' / '0002'}\n"
    assert main(["pull", *words, str(tmp_path / "fresh")]) == 0
    assert "is not older than the mirror's" in capsys.readouterr().err
    assert main(["pull", "agnet", *words[1:], str(tmp_path / "fresh")]) == 2
    assert "no complete checkpoint of a model 'agnet'" in capsys.readouterr().err


async def test_a_key_that_the_provider_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = b"<Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist</Message></Error>"

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(refusal) + refusal
        )
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "wrong")
        with pytest.raises(
            StoreError, match="mirror s3://bucket/a: could not list it: InvalidAccessKeyId: The key does not"
        ):
            await BucketPlace("s3://bucket/a").sizes()
