"""Archives that a server sends: regular files inside the folder, and nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.base.errors import ConfigError, ServerError, UnreachableError
from offbook.client.connection import download
from offbook.client.connection.download import download_export, unpack
from offbook.client.connection.http import Api
from tests.fakes.scripted_api import Asked, Reply, scripted_api


def archive(path: Path, *entries: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(bytes(entry.size)))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, 3 if kind == tarfile.REGTYPE else 0
    return made


@pytest.mark.parametrize(
    "bad",
    [
        entry("../escaped"),
        entry("a/../../escaped"),
        entry("/escaped"),
        entry("..\\escaped"),
        entry("c:escaped"),
        entry("link", tarfile.SYMTYPE, "/etc/passwd"),
        entry("link", tarfile.LNKTYPE, "good"),
        entry("device", tarfile.CHRTYPE),
        entry("pipe", tarfile.FIFOTYPE),
        entry("folder", tarfile.DIRTYPE),
    ],
    ids=lambda bad: f"{bad.name} of type {bad.type}",
)
def test_what_is_no_file_inside_the_folder_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    sent = archive(tmp_path / "sent.tar", entry("good"), bad)
    with pytest.raises(ServerError, match="http://box sent an archive with"):
        unpack(sent, tmp_path / "inside", "http://box")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["good", "inside", "sent.tar"]


def headed(name: str, **headers: str) -> tarfile.TarInfo:
    """An entry with an extended header."""
    made = entry(name)
    made.pax_headers = {key.replace("_", "."): value for key, value in headers.items()}
    return made


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (entry("good"), "names cannot be written: File exists"),
        (entry("good/below"), "names cannot be written: (Not a directory|File exists)"),
        (entry("a" * 300), "names cannot be written: File name too long"),
        (headed("bomb", GNU_sparse_size="900000000"), "not a regular file"),
        (headed("number", GNU_sparse_size="x"), "cannot be read"),
    ],
    ids=["twice", "below a file", "a long name", "a sparse file", "a damaged number"],
)
def test_names_and_sizes_that_no_export_has_are_refused(tmp_path: Path, bad: tarfile.TarInfo, told: str) -> None:
    sent = archive(tmp_path / "sent.tar", entry("good"), bad)
    with pytest.raises(ServerError, match=told):
        unpack(sent, tmp_path / "inside", "http://box")
    assert sum(path.stat().st_size for path in (tmp_path / "inside").rglob("*")) <= sent.stat().st_size


def test_an_archive_of_very_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_FILES", 3)
    sent = archive(tmp_path / "sent.tar", *(entry(f"file-{number}") for number in range(4)))
    with pytest.raises(ServerError, match="more than 3 files"):
        unpack(sent, tmp_path / "inside", "http://box")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 255)), max_size=4), st.integers(0, 10_240), st.booleans()
)
def test_a_damaged_archive_is_unpacked_or_refused(changes: list[tuple[int, int]], end: int, cut: bool) -> None:
    """Bytes change anywhere; the checksum of a changed header is made to fit, so that its fields are read."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = ("adapter_config.json", "a/b", "c" * 120)
        content = bytearray(archive(folder / "sent.tar", *(headed(name, mtime="1.5") for name in names)).read_bytes())
        for place, value in changes:
            content[place] = value
            header = place // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
            content[header + 148 : header + 156] = b" " * 8
            content[header + 148 : header + 156] = b"%06o\0 " % sum(content[header : header + tarfile.BLOCKSIZE])
        (folder / "sent.tar").write_bytes(content[:end] if cut else content)
        with contextlib.suppress(ServerError):
            unpack(folder / "sent.tar", folder / "inside", "http://box")
        assert {path.name for path in folder.iterdir()} == {"sent.tar", "inside"}
        assert not any(path.is_symlink() for path in folder.rglob("*"))


DIGEST = hashlib.sha256(b"x" * 100).hexdigest()


@pytest.mark.parametrize(
    ("state", "sent", "told"),
    [
        ({"id": "../../models/x"}, "", "values that this version does not know"),
        ({"sha256": "/../../escaped"}, "", "values that this version does not know"),
        ({"size": -1}, "", "values that this version does not know"),
        ({"size": 2**62}, "", "are needed: twice the export"),
        ({}, "", "an answer without bytes, 0 of 100 have come"),
        ({}, "y" * 1_000_000, "is damaged: its SHA-256"),
        ({}, "x" * 1_000_000, "cannot be read"),
    ],
    ids=[
        "an id with a path",
        "a digest with a path",
        "no size",
        "more than the disk",
        "nothing",
        "other bytes",
        "too many bytes",
    ],
)
async def test_a_download_writes_no_more_than_was_announced_and_only_beside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], sent: str, told: str
) -> None:
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.1)

    def script(asked: Asked) -> Reply:
        if asked.method == "POST":
            return Reply(json={"id": "ab", "size": 100, "sha256": DIGEST} | state)
        for part in tmp_path.rglob("*.part"):
            assert part.stat().st_size <= 100
        return Reply(206, text=sent)

    with scripted_api(script) as api, pytest.raises((ServerError, ConfigError, UnreachableError), match=told):
        await download_export(Api(api.url), "agent", 1, "peft", tmp_path / "a" / "lora")
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.name.endswith(".part") and path.stat().st_size <= 100 for path in left)


def test_files_in_folders_are_unpacked(tmp_path: Path) -> None:
    unpack(archive(tmp_path / "sent.tar", entry("a/b/c"), entry("d")), tmp_path / "inside", "http://box")
    assert (tmp_path / "inside" / "a" / "b" / "c").read_bytes() == (tmp_path / "inside" / "d").read_bytes() == bytes(3)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sent.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(ServerError, match="cannot be read"):
        unpack(tmp_path / "sent.tar", tmp_path / "inside", "http://box")
