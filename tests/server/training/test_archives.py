"""Archives of exports: equal files make equal bytes, few are kept, and what a crash cut short is made anew."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from offbook.server.errors import ApiError
from offbook.server.training.archives import KEPT, Archives
from tests.fakes.gateway import Gateway


def writer(text: str, written: list[Path] | None = None) -> Callable[[Path], Awaitable[str]]:
    async def write(folder: Path) -> str:
        (folder / "inner").mkdir(parents=True)
        (folder / "z.bin").write_text(text)
        (folder / "inner" / "a.json").write_text("{}")
        if written is not None:
            written.append(folder)
        return "a note"

    return write


async def test_equal_files_make_equal_archives_whenever_they_are_made(tmp_path: Path) -> None:
    first = await Archives(tmp_path / "one").make("m@1-peft-0", writer("x" * 20_000))
    archives = Archives(tmp_path / "two")
    second = await archives.make("m@1-peft-0", writer("x" * 20_000))
    path, state = archives.get("m@1-peft-0")
    assert first == second == state and state.note == "a note"
    content = path.read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (state.size, state.sha256)
    with tarfile.open(path) as tar:
        assert [(entry.name, entry.mtime, entry.uid) for entry in tar] == [("inner/a.json", 0, 0), ("z.bin", 0, 0)]


async def test_an_archive_is_made_once_for_all_who_ask(tmp_path: Path) -> None:
    archives, written = Archives(tmp_path), list[Path]()
    states = await asyncio.gather(*(archives.make("m@1-peft-0", writer("x", written)) for _ in range(5)))
    assert len(written) == 1 and len(set(states)) == 1


async def test_the_oldest_go_and_so_does_what_a_crash_left(tmp_path: Path) -> None:
    archives = Archives(tmp_path)
    (tmp_path / ".m@0-merged-0").mkdir()
    (tmp_path / ".m@0-merged-0" / "half").touch()
    for step in range(KEPT + 2):
        await archives.make(f"m@{step}-peft-0", writer("x"))
        os.utime(tmp_path / f"m@{step}-peft-0.json", (step, step))
    assert len(list(tmp_path.iterdir())) == 2 * KEPT
    with pytest.raises(ApiError, match="'m@1-peft-0'; request the export again"):
        archives.get("m@1-peft-0")
    archives.get("m@2-peft-0")


async def test_an_archive_that_was_cut_short_is_made_anew(tmp_path: Path) -> None:
    archives = Archives(tmp_path)
    state = await archives.make("m@1-peft-0", writer("x"))
    os.truncate(tmp_path / "m@1-peft-0.tar", 100)
    with pytest.raises(ApiError):
        archives.get("m@1-peft-0")
    assert await archives.make("m@1-peft-0", writer("x")) == state
    assert archives.get("m@1-peft-0")[0].stat().st_size == state.size


async def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    async def failing(folder: Path) -> str:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await Archives(tmp_path).make("m@1-peft-0", failing)
    assert list(tmp_path.iterdir()) == []


async def test_a_download_has_a_digest_and_goes_on_where_the_client_says(gateway: Gateway) -> None:
    state = await gateway.services.archives.make("m@1-peft-0", writer("x" * 20_000))
    whole = await gateway.http.get(f"/api/exports/{state.id}")
    assert (whole.status_code, whole.headers["etag"], len(whole.content)) == (200, f'"{state.sha256}"', state.size)

    async def rest(**headers: str) -> httpx.Response:
        return await gateway.http.get(f"/api/exports/{state.id}", headers={"range": "bytes=1000-"} | headers)

    same = await rest(**{"if-range": f'"{state.sha256}"'})
    assert (same.status_code, same.content) == (206, whole.content[1000:])
    assert same.headers["content-range"] == f"bytes 1000-{state.size - 1}/{state.size}"
    other = await rest(**{"if-range": '"0123"'})
    assert (other.status_code, other.content) == (200, whole.content)


@pytest.mark.parametrize("name", ["nothing", "..%2Frecords.db", ".hidden", "a%2Fb", "%00"])
async def test_a_name_that_is_no_archive_is_a_404(gateway: Gateway, name: str) -> None:
    await gateway.services.archives.make("m@1-peft-0", writer("x"))
    for method in ("GET", "DELETE"):
        assert (await gateway.http.request(method, f"/api/exports/{name}")).status_code == 404


async def test_an_archive_goes_when_its_client_has_it(gateway: Gateway) -> None:
    state = await gateway.services.archives.make("m@1-peft-0", writer("x"))
    assert (await gateway.http.delete(f"/api/exports/{state.id}")).status_code == 200
    assert list((gateway.services.options.dir / "exports").iterdir()) == []
    assert (await gateway.http.delete(f"/api/exports/{state.id}")).json()["error"]["code"] == "unknown_archive"
