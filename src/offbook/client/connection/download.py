"""Downloads an export from a remote server, checks its SHA-256 and unpacks it; the folder appears complete or not at all.

An interrupted download leaves `.{folder}.{digest}.part` beside the folder. The next attempt continues from that file.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import httpx

from offbook.base.clock import Backoff
from offbook.base.errors import ConfigError, OffbookError, ServerError
from offbook.base.wire import ArchiveRequest, ArchiveState, ExportFormat

from .http import (
    RETRY_SECONDS,
    Api,
    archive_path,
    server_error,
    unreachable,
)
from .progress import Bar

logger = logging.getLogger("offbook")

MIB = 2**20
GIB = 2**30
MAX_FILES = 10_000
"""Files of an export."""
BAD_NAMES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EILSEQ)
"""Errors of names that an archive chose."""


async def download_export(
    api: Api,
    model: str,
    step: int,
    format: ExportFormat,
    output: Path,
    show: Callable[[str], object] = logger.info,
) -> Path:
    """Write a step's export to the new or empty folder `output` and return its absolute path. `show` gets its note.

    Raises ConfigError when the folder cannot be written or the disk has too little room, ServerError when the server
    rejects the request or sends a damaged or unsafe archive.
    """
    target = Path(os.path.abspath(output))
    try:
        _check_free(target)
        archive = await api.archive(model, step, ArchiveRequest(format=format))
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{archive.sha256[:16]}.part")
        _check_room(target, part, archive.size)
        await _fetch(api, archive, part)
        await _check_digest(api, archive, part)
        await asyncio.to_thread(_place, part, target, api.url)
    except OSError as error:
        if isinstance(error, OffbookError):
            raise
        raise ConfigError(
            f"--output: {target} cannot be written: {error.strerror or error}. The same command continues the download"
        ) from error
    await _forget(api, archive)
    show(archive.note)
    return target


def unpack(archive: Path, folder: Path, sender: str) -> None:
    """Write the files of an uncompressed tar to a new folder. They take no more bytes than the archive.

    Raises ServerError for a damaged archive, for an entry that is not a regular file, whose path leaves the folder or
    occurs twice, and for a sparse one; OSError. `sender` is the server's URL, for the message.
    """
    folder.mkdir()
    try:
        with tarfile.open(archive, "r:") as tar:
            for number, entry in enumerate(tar, 1):
                if number > MAX_FILES or not _is_plain(entry):
                    raise ServerError(
                        f"{sender} sent an archive with {entry.name!r:.200}, which is not a regular file inside the folder"
                        if number <= MAX_FILES
                        else f"{sender} sent an archive of more than {MAX_FILES} files"
                    )
                _write(tar, entry, folder / entry.name)
    except (tarfile.TarError, ValueError) as error:  # ValueError: numbers and names in extended headers
        raise ServerError(f"{sender} sent an archive that cannot be read: {error!s:.200}") from error
    except OSError as error:
        if error.errno not in BAD_NAMES:
            raise
        raise ServerError(
            f"{sender} sent an archive whose names cannot be written: {error.strerror}: {error.filename!r:.200}"
        ) from error


def _is_plain(entry: tarfile.TarInfo) -> bool:
    """Whether it is a regular file inside the folder, and not sparse: a sparse one unpacks to any size."""
    path = PurePosixPath(entry.name)
    inside = path.parts and not path.is_absolute() and not {"..", "."} & set(path.parts)
    regular = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse() and entry.size >= 0
    return bool(regular and inside) and not set("\\:\0") & set(entry.name)


def _write(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(entry)
    assert content is not None, "a regular file"
    with content, path.open("xb") as file:
        shutil.copyfileobj(content, file, MIB)
        file.flush()
        os.fsync(file.fileno())


def _check_free(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        kind = "a folder that is not empty" if target.is_dir() else "not a folder"
        raise ConfigError(f"--output: {target} exists and is {kind}; name a new folder")


def _check_room(target: Path, part: Path, size: int) -> None:
    """Raise ConfigError unless there is room for the archive and its unpacked files at the same time."""
    needed = 2 * size - _size(part)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ConfigError(
            f"--output: {target.parent} has {free / GIB:.2f} GiB free, and {needed / GIB:.2f} GiB are needed: twice the export, "
            "which is downloaded and then unpacked"
        )


async def _fetch(api: Api, archive: ArchiveState, part: Path) -> None:
    """Append to `part` until it has the archive's size, in bytes.

    A broken connection is reopened. Raises UnreachableError when RETRY_SECONDS pass without a new byte.
    """
    backoff = Backoff(RETRY_SECONDS)
    if _size(part) > archive.size:
        part.unlink()
    with Bar("download") as bar:
        while (have := _size(part)) < archive.size:
            bar.update(have // MIB, archive.size // MIB, "MiB")
            try:
                await _append(api, archive, part, have, bar)
                if _size(part) <= have:
                    raise httpx.RemoteProtocolError(f"an answer without bytes, {have} of {archive.size} have come")
            except httpx.TransportError as error:
                api.alive()
                if _size(part) > have:
                    backoff.progress()
                if not await backoff.wait():
                    raise unreachable(api.url, error) from error


async def _append(api: Api, archive: ArchiveState, part: Path, have: int, bar: Bar) -> None:
    """Request the missing bytes once. Raises httpx.TransportError when the connection breaks, ServerError, OSError."""
    headers = {"range": f"bytes={have}-", "if-range": f'"{archive.sha256}"', "accept-encoding": "identity"}
    async with api.http.stream("GET", archive_path(archive.id), headers=headers) as answer:
        if not answer.is_success:
            await answer.aread()
            raise server_error(api.url, answer)
        if answer.status_code != 206:
            have = 0  # the server ignored the range and sends the whole archive
        with part.open("ab" if have else "wb") as file:
            async for (
                piece
            ) in answer.aiter_raw():  # no chunk size: bytes still buffered would be lost on a broken connection
                file.write(piece[: archive.size - have])  # a stream without end fills no disk
                have += len(piece)
                if have >= archive.size:
                    return
                bar.update(have // MIB, archive.size // MIB, "MiB")


async def _check_digest(api: Api, archive: ArchiveState, part: Path) -> None:
    with part.open("rb") as file:
        digest = await asyncio.to_thread(lambda: hashlib.file_digest(file, "sha256").hexdigest())
    if digest == archive.sha256:
        return
    part.unlink()
    await _forget(api, archive)
    raise ServerError(
        f"the download from {api.url} is damaged: its SHA-256 is {digest}, not {archive.sha256} as announced. It was "
        "removed; run the command again"
    )


def _place(part: Path, target: Path, sender: str) -> None:
    scratch = target.with_name(f".{target.name}.unpacked-{os.getpid()}")
    try:
        unpack(part, scratch, sender)
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # renamed already, or incomplete
    part.unlink()


async def _forget(api: Api, archive: ArchiveState) -> None:
    """Delete the archive on the server. A failure is only logged: the server expires archives by itself."""
    try:
        await api.delete_archive(archive.id)
    except ServerError as error:
        logger.debug("archive %s was not removed: %s", archive.id, error)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
