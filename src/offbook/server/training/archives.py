"""Exports of checkpoints: as folders in the formats of `ExportFormat`, and as tar archives that clients download.

An archive is `{dir}/exports/{id}.tar`, with size and digest in `{id}.json`. Equal files give equal archives. So an interrupted
download can be resumed, even if the archive was deleted and made again.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import ValidationError

from offbook.base.types import new_id
from offbook.base.wire import ArchiveState, ExportFormat, ExportResult, name_at

from ...engine.checkpoint_files import NOTE, Checkpoint, digest
from ...engine.protocol import Merged
from ..errors import ApiError
from ..models.checkpoints import export_adapter, write_text

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""An export is for other programs and accounts, unlike the server's directory, whose umask the files are written with."""
Merge = Callable[[Checkpoint, Path, bool], Awaitable[Merged]]
"""Function that writes base and LoRA as one model to a new folder; with True, for llama.cpp's converter. Raises ApiError
409 for weights that float16 cannot hold, EngineError."""


async def write_export(
    checkpoint: Checkpoint, format: ExportFormat, output: Path, *, reference: str, merge: Merge
) -> ExportResult:
    """Write a checkpoint to the new folder `output`, atomically.

    `reference`: the `base_model_name_or_path` of a `peft` export. Raises what `merge` raises, and OSError.
    """
    scratch = output.with_name(f".{output.name}.{new_id('export')}")
    merged: Merged | None = None
    try:
        if format == "peft":
            await asyncio.to_thread(export_adapter, checkpoint, scratch, reference)
        else:
            merged = await merge(checkpoint, scratch, format == "gguf-ready")
        for path in (scratch, *scratch.rglob("*")):
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        scratch.rename(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already renamed, or incomplete
    facts = (merged.note, merged.adapter_kept) if merged is not None else ("", None)
    return ExportResult(path=str(output), format=format, step=checkpoint.step, note=facts[0], adapter_kept=facts[1])


def new_folder(output: str) -> Path:
    """Check the folder that a request names. Raises ApiError 400 for a relative path and 409 for an existing one."""
    path = Path(output)
    if output.startswith("~/"):
        path = path.expanduser()
    if not path.is_absolute() or "\0" in output:
        raise ApiError(400, f"output must be an absolute path on the server's machine, got {output!r}", "output")
    try:
        exists = path.exists()
    except OSError as error:
        raise ApiError(
            400, f"output {output!r} cannot be a folder: {error.strerror}", "output", "invalid_value"
        ) from error
    if exists:
        raise ApiError(409, f"output {path} exists already; name a new folder", "output", "output_exists")
    return path


KEPT = 3
"""Archives kept at most; a new one replaces the oldest. Clients delete an archive after downloading it."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,199}")


def archive_id(checkpoint: Checkpoint, format: ExportFormat) -> str:
    """The id of a checkpoint's archive.

    It contains a digest, since a step can be trained again after its checkpoint is gone.
    """
    version = digest(checkpoint.path / NOTE)[:12]
    return f"{name_at(checkpoint.note.model, checkpoint.step)}-{format}-{version}"


class Archives:
    """The archives in a folder. They are created one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = asyncio.Lock()

    async def make(self, name: str, write: Callable[[Path], Awaitable[str]]) -> ArchiveState:
        """Return the archive `name`; create it if necessary from the files that `write` writes to a new folder; it returns the note.

        Raises OSError, and what `write` raises.
        """
        async with self._turn:
            state = self._read(name)
            if state is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._clear()
                scratch = self._folder / f".{name}"
                try:
                    note = await write(scratch)
                    state = await asyncio.to_thread(self._pack, name, scratch, note)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)  # now in the archive, or incomplete
            return state

    def get(self, name: str) -> tuple[Path, ArchiveState]:
        """An archive and its state. Raises ApiError 404."""
        state = self._read(name) if _ID.fullmatch(name) else None
        if state is None:
            raise ApiError(404, f"There is no archive {name!r}; request the export again", "id", "unknown_archive")
        return self._tar(name), state

    def remove(self, name: str) -> None:
        """Delete an archive. Running downloads continue. Raises ApiError 404."""
        self.get(name)
        self._remove(name)

    def _read(self, name: str) -> ArchiveState | None:
        try:
            state = ArchiveState.model_validate_json((self._folder / f"{name}.json").read_text("utf-8"))
            return state if self._tar(name).stat().st_size == state.size else None
        except (FileNotFoundError, ValidationError):
            return None

    def _pack(self, name: str, folder: Path, note: str) -> ArchiveState:
        target = self._tar(name)
        try:
            with target.open("wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
                for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                    _add(tar, path, str(path.relative_to(folder)))
            state = ArchiveState(id=name, size=target.stat().st_size, sha256=digest(target), note=note)
            write_text(self._folder / f"{name}.json", state.model_dump_json())
        except OSError:
            target.unlink(missing_ok=True)
            raise
        return state

    def _clear(self) -> None:
        """Delete the oldest archives to make room for one more, and the leftovers of a crash."""
        for leftover in self._folder.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        states = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in states[KEPT - 1 :]:
            self._remove(path.stem)

    def _remove(self, name: str) -> None:
        for path in (self._folder / f"{name}.json", self._tar(name)):
            path.unlink(missing_ok=True)

    def _tar(self, name: str) -> Path:
        return self._folder / f"{name}.tar"


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a regular file without owner and time, so that equal files give equal archives."""
    entry = tarfile.TarInfo(name)
    entry.size = path.stat().st_size
    with path.open("rb") as file:
        tar.addfile(entry, file)
