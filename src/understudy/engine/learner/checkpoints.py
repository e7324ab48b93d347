# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch's own annotations are partial
"""Checkpoints on disk: written beside, synced, renamed into place; the folder named by its step is complete or absent.

`{n:04d}/`: adapter_config.json and adapter_model.safetensors (standard PEFT), optimizer.safetensors, optimizer.json,
rng.safetensors, understudy.json.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ...config import LoraOptions
from ...errors import EngineError
from ...types import Json, TrainResult
from .loss_scale import LossScale

NOTE = "understudy.json"
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_NOTE = "optimizer.json"
RNG = "rng.safetensors"
FILES = ("adapter_config.json", ADAPTER, OPTIMIZER, OPTIMIZER_NOTE, RNG, NOTE)
_SCRATCH = ".scratch-"


class Note(BaseModel):
    """`understudy.json`. `sizes`: bytes of every other file, to recognise a damaged checkpoint."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="constants")

    step: int = Field(ge=1)
    request_id: str | None = None
    model: str
    base_model: str
    lora: LoraOptions
    config: dict[str, Json]
    metrics: dict[str, float]
    result: TrainResult
    created_at: float
    sizes: dict[str, int] = Field(default_factory=dict[str, int])


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    note: Note


@dataclass(frozen=True)
class OptimizerState:
    """AdamW's tensors by `{parameter name}|{field}`, the optimizer updates in the model's life, a float16 base's scale."""

    tensors: dict[str, Tensor]
    updates: int
    scale: LossScale | None = None


def path_of(folder: Path, step: int) -> Path:
    """Where checkpoint `step` of the model with this checkpoints folder lies."""
    return folder / f"{step:04d}"


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, verified: every file there, whole, and readable. Raises EngineError saying what is wrong."""
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        raise EngineError(f"checkpoint {path} is damaged: it has no {' and no '.join(missing)}")
    try:
        note = _note(path)
        sizes = {name: (path / name).stat().st_size for name in note.sizes}
        for name in (ADAPTER, OPTIMIZER, RNG):
            with safe_open(path / name, "pt"):
                pass  # opening checks the header and that the tensors fill the file
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(f"checkpoint {path} is damaged: {error}") from error
    wrong = {name: size for name, size in sizes.items() if size != note.sizes[name]}
    if wrong:
        name, size = next(iter(wrong.items()))
        raise EngineError(f"checkpoint {path} is damaged: {name} has {size} bytes, {note.sizes[name]} were written")
    if note.step != int(path.name):
        raise EngineError(f"checkpoint {path} is damaged: {NOTE} says that it is step {note.step}")
    return Checkpoint(path, note)


def steps(folder: Path) -> list[int]:
    """The steps with a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((int(child.name) for child in folder.iterdir() if child.name.isdecimal()), reverse=True)


def newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint; damaged ones are named in a warning and passed over."""
    for step in steps(folder):
        try:
            return read(path_of(folder, step))
        except EngineError as error:
            warn(str(error))
    return None


def made_by(folder: Path, model: str, request_id: str) -> Checkpoint | None:
    """The complete checkpoint that a train request of this model made, if any."""
    for step in steps(folder):
        path = path_of(folder, step)
        try:
            note = _note(path)
            if note.request_id == request_id and note.model == model:
                return read(path)
        except (EngineError, OSError, ValueError):
            continue  # `newest` warns of it; a damaged checkpoint is no result
    return None


def remove_scratch(folder: Path) -> None:
    """Remove what a killed process left half written. Raises OSError."""
    if folder.is_dir():
        for child in folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(child)


class Draft:
    """A checkpoint being written in a scratch folder. `commit` puts it in place; leaving without it removes it."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.path = folder / f"{_SCRATCH}{step:04d}"
        self.target = path_of(folder, step)

    def __enter__(self) -> Draft:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            _sync(self.folder.parent)
        remove_scratch(self.folder)
        self.path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # gone when committed; else the next start removes what stays

    def write_optimizer(self, state: OptimizerState) -> None:
        """Raises OSError."""
        _write(self.path / OPTIMIZER, save(state.tensors))
        scale = {} if state.scale is None else {"loss_scale": asdict(state.scale)}
        _write(self.path / OPTIMIZER_NOTE, json.dumps({"updates": state.updates, **scale}).encode())

    def write_rng(self, states: Mapping[str, Tensor]) -> None:
        """Raises OSError."""
        _write(self.path / RNG, save(dict(states)))

    def sync(self) -> None:
        """Every file so far is on the disk. Raises OSError."""
        for child in self.path.iterdir():
            _sync(child)

    def commit(self, note: Note) -> Path:
        """Write understudy.json last, sync, rename into place, sync the parent. Raises OSError, EngineError."""
        sizes = {child.name: child.stat().st_size for child in self.path.iterdir()}
        _write(self.path / NOTE, note.model_copy(update={"sizes": sizes}).model_dump_json(indent=1).encode())
        self.sync()
        _sync(self.path)
        if self.target.exists():
            _put_aside(self.target)
        os.rename(self.path, self.target)
        _sync(self.folder)
        return self.target


def load_optimizer(path: Path) -> OptimizerState:
    """Raises OSError, ValueError, SafetensorError."""
    note = json.loads((path / OPTIMIZER_NOTE).read_text("utf-8"))
    scale = LossScale(**note["loss_scale"]) if "loss_scale" in note else None
    return OptimizerState(load_file(path / OPTIMIZER), int(note["updates"]), scale)


def load_rng(path: Path) -> dict[str, Tensor]:
    """Raises OSError, SafetensorError."""
    return load_file(path / RNG)


def rng_states() -> dict[str, Tensor]:
    """The state of torch's generators: `cpu`, and `cuda:{i}` where CUDA is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """The inverse of `rng_states`; states of devices that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for name, state in states.items():
            if name != "cpu" and int(name.partition(":")[2]) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, name)


def _note(path: Path) -> Note:
    return Note.model_validate(json.loads((path / NOTE).read_text("utf-8")))


def _put_aside(target: Path) -> None:
    """Make room where a damaged checkpoint lies; a complete one is never replaced."""
    try:
        read(target)
    except EngineError:
        place = 0
        while (aside := target.with_name(f"{target.name}.damaged-{place}")).exists():
            place += 1
        os.rename(target, aside)
        return
    raise EngineError(f"checkpoint {target} exists already and is complete; it is never overwritten")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
