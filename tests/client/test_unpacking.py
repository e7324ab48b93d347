"""Archives that a server sends: regular files inside the folder, and nothing else."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from offbook.base.errors import ServerError
from offbook.client.connection.download import unpack


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


def test_a_file_that_comes_twice_is_not_overwritten(tmp_path: Path) -> None:
    sent = archive(tmp_path / "sent.tar", entry("good"), entry("good"))
    with pytest.raises(FileExistsError):
        unpack(sent, tmp_path / "inside", "http://box")


def test_files_in_folders_are_unpacked(tmp_path: Path) -> None:
    unpack(archive(tmp_path / "sent.tar", entry("a/b/c"), entry("d")), tmp_path / "inside", "http://box")
    assert (tmp_path / "inside" / "a" / "b" / "c").read_bytes() == (tmp_path / "inside" / "d").read_bytes() == bytes(3)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sent.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(ServerError, match="cannot be read"):
        unpack(tmp_path / "sent.tar", tmp_path / "inside", "http://box")
