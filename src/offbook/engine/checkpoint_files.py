"""Checkpoint folders as the learner and the server both read them: their files, which are whole, and where damaged ones go.

`{n:04d}/`: adapter_config.json and adapter_model.safetensors (standard PEFT), optimizer.safetensors, optimizer.json,
rng.safetensors, offbook.json. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from offbook.base.config import LoraOptions
from offbook.base.errors import EngineError, OffbookError, StoreError
from offbook.base.json_files import read_json
from offbook.base.types import TrainResult

NOTE = "offbook.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_NOTE = "optimizer.json"
RNG = "rng.safetensors"
FILES = (ADAPTER_CONFIG, ADAPTER, OPTIMIZER, OPTIMIZER_NOTE, RNG, NOTE)


class CheckpointOrigin(BaseModel):
    """The step of another model that a checkpoint is a copy of."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    step: int


class CheckpointNote(BaseModel):
    """`offbook.json`. `sizes` and `digests`: bytes and SHA-256 of every other file; older checkpoints have no digests."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="constants")

    step: int = Field(ge=1)
    request_id: str | None = None
    model: str
    base_model: str
    lora: LoraOptions
    config: dict[str, object]
    metrics: dict[str, float]
    result: TrainResult
    created_at: float
    sizes: dict[str, int] = Field(default_factory=dict[str, int])
    digests: dict[str, str] = Field(default_factory=dict[str, str])
    forked_from: CheckpointOrigin | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint and its folder."""

    path: Path
    note: CheckpointNote

    @property
    def step(self) -> int:
        return self.note.step

    def result(self) -> TrainResult:
        """The result of the train request that wrote it, with the folder's present place."""
        return self.note.result.model_copy(update={"checkpoint": str(self.path)})


def path_of(folder: Path, step: int) -> Path:
    """Where checkpoint `step` of the model with this checkpoints folder lies."""
    return folder / f"{step:04d}"


def is_step(name: str) -> bool:
    """Whether this is the name of a checkpoint's folder, as `path_of` makes it.

    >>> is_step("0012"), is_step("00012"), is_step("12")
    (True, False, False)
    """
    return re.fullmatch(r"[0-9]{4}|[1-9][0-9]{4,15}", name) is not None


def steps(folder: Path) -> list[int]:
    """The steps with a folder, newest first. Raises StoreError if the folder cannot be read."""
    try:
        children = list(folder.iterdir())
        named = (int(child.name) for child in children if is_step(child.name) and child.is_dir())
        return sorted(named, reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise not_checked(folder, error) from error


def read(path: Path, *, contents: bool = True) -> Checkpoint:
    """The checkpoint at `path`, verified: every file is there, readable and of the size that was written. `contents`:
    verify the digests too, which reads every byte. Raises EngineError that says what is wrong, and StoreError if the files
    cannot be read, which is not damage."""
    try:
        missing = [name for name in FILES if not is_file(path / name)]
        if missing:
            raise EngineError(f"checkpoint {path} has no {' and no '.join(missing)}")
        note = read_note(path)
        fault = _fault(path, note, contents=contents)
    except (OSError, MemoryError) as error:
        raise not_checked(path, error) from error
    except (ValueError, SafetensorError) as error:
        raise EngineError(f"checkpoint {path} is damaged: {error}") from error
    if fault is not None:
        raise EngineError(f"checkpoint {path} is damaged: {fault}")
    return Checkpoint(path, note)


def read_note(path: Path) -> CheckpointNote:
    """The note of the checkpoint at `path`, whose other files are not looked at. Raises OSError, ValueError."""
    return CheckpointNote.model_validate(read_json(path / NOTE))


def is_file(path: Path) -> bool:
    """Whether there is a regular file. Raises OSError if that cannot be known, unlike `Path.is_file`."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def not_checked(path: Path, error: BaseException) -> StoreError:
    """The error for a part of the directory that could not be read, so that nothing is known of its content."""
    return StoreError(
        f"{path} could not be checked: {error}. It may be whole and was not changed: free disk space, memory and open "
        "files, end what locks it, or make it readable, and try again"
    )


def whole(folder: Path, faulty: Callable[[Path, OffbookError], None], *, trusted: int = 0) -> Iterator[Checkpoint]:
    """The whole checkpoints, newest first; the others go to `faulty`, with EngineError if damaged, StoreError if unreadable.

    Digests are verified down to the first whole one, which is what training goes on from. `trusted`: a step whose
    digests this process knows already.
    """
    contents = True
    for step in steps(folder):
        path = path_of(folder, step)
        try:
            checkpoint = read(path, contents=contents and step != trusted)
        except (EngineError, StoreError) as error:
            faulty(path, error)
            continue
        contents = False
        yield checkpoint


def put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `{n}.damaged-{i}`, so that its step is free; returns its new place. Raises OSError."""
    place = 0
    while (aside := path.with_name(f"{path.name}.damaged-{place}")).exists():
        place += 1
    path.rename(aside)
    return aside


def set_aside(folder: Path, after: int) -> list[Path]:
    """The damaged checkpoints in a model's checkpoint folder, of steps after `after`, in order."""
    named = ((path.name.partition(".damaged-")[0], path) for path in folder.glob("*.damaged-*"))
    return [path for step, path in sorted(named) if is_step(step) and int(step) > after]


def digest(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably. Of several writers at once, the last one's content stays. Raises OSError, after it
    removed the partial file."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with scratch.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, each one's name on the disk: a file that is synced in a folder whose own name is
    not may be gone after a loss of power. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def _fault(path: Path, note: CheckpointNote, *, contents: bool) -> str | None:
    """What is wrong with the files of a note; None when they are whole. Raises OSError, SafetensorError."""
    if note.step != int(path.name):
        return f"{NOTE} says that it is step {note.step}"
    for name in (*note.sizes, *note.digests):
        if Path(name).name != name or not is_file(path / name):
            return f"{NOTE} names {name!r}, which is no file of it"
    for name, size in note.sizes.items():
        if (now := (path / name).stat().st_size) != size:
            return f"{name} has {now} bytes, {size} were written"
    for name in (ADAPTER, OPTIMIZER, RNG):
        with (path / name).open("rb"), safe_open(path / name, "np"):  # safe_open hides why a file cannot be opened
            pass  # opening checks the header and that the tensors fill the file
    for name, written in note.digests.items() if contents else ():
        if digest(path / name) != written:
            return f"the bytes of {name} are not those that were written"
    return None
