"""Writes and reads the learner's part of checkpoints. A checkpoint is written to a scratch folder, synced and renamed,
so the folder named by its step is complete or absent. `engine.checkpoint_files` defines its files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save  # pyright: ignore[reportUnknownVariableType]  # safetensors is only partly typed
from torch import Tensor

from offbook.base.errors import EngineError, OffbookError, StoreError

from .. import checkpoint_files
from ..checkpoint_files import NOTE, OPTIMIZER, OPTIMIZER_NOTE, RNG, Checkpoint, CheckpointNote, sync
from .update.step import LossScale

_SCRATCH = ".scratch-"


@dataclass(frozen=True)
class OptimizerState:
    """AdamW's tensors named `{parameter name}|{field}`, the model's total of optimizer updates, and the loss scale of a
    float16 base."""

    tensors: dict[str, Tensor]
    updates: int
    scale: LossScale | None = None


def state_tensors(optimizer: torch.optim.AdamW, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's state as CPU tensors named `{parameter name}|{field}`."""
    return {
        f"{name}|{key}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_state(
    optimizer: torch.optim.AdamW, parameters: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """The inverse of `state_tensors`. Raises OffbookError when a tensor belongs to no parameter."""
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("|")
        parameter = parameters.get(name)
        if parameter is None or (key != "step" and tensor.shape != parameter.shape):
            raise OffbookError(
                f"the saved optimizer state {full_name!r} {tuple(tensor.shape)} fits no adapter parameter"
            )
        optimizer.state[parameter][key] = tensor if key == "step" else tensor.to(parameter.device)


def newest(folder: Path, warn: Callable[[str], None], *, trusted: int = 0) -> Checkpoint | None:
    """The newest complete checkpoint, or None. Damaged ones are skipped with a warning. `trusted`: a step whose digests
    this process has already checked. Raises StoreError if a newer one cannot be read."""

    def skip(_: Path, error: OffbookError) -> None:
        if isinstance(error, StoreError):
            raise error
        warn(str(error))

    return next(checkpoint_files.whole(folder, skip, trusted=trusted), None)


def of_request(folder: Path, model: str, request_id: str) -> Checkpoint | None:
    """The complete checkpoint that this train request of the model wrote, or None. Raises StoreError if one cannot be
    read, because the request must not be applied twice."""
    for step in checkpoint_files.steps(folder):
        path = checkpoint_files.path_of(folder, step)
        try:
            note = checkpoint_files.read_note(path)
            if note.request_id == request_id and note.model == model:
                return checkpoint_files.read(path)
        except (EngineError, FileNotFoundError, ValueError):
            continue  # `newest` warns about it
        except OSError as error:
            raise checkpoint_files.not_checked(path, error) from error
    return None


def remove_scratch(folder: Path) -> None:
    """Remove the incomplete checkpoints of a killed process. Raises OSError."""
    if folder.is_dir():
        for child in folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(child)


class Draft:
    """A checkpoint that is being written to the scratch folder `path`. `commit` renames it to `target`; leaving the
    block without a commit removes it."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.path = folder / f"{_SCRATCH}{step:04d}"
        self.target = checkpoint_files.path_of(folder, step)

    def __enter__(self) -> Draft:
        checkpoint_files.make_folder(self.folder)
        remove_scratch(self.folder)
        self.path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # absent after a commit; the next start removes leftovers

    def write_optimizer(self, state: OptimizerState) -> None:
        """Write the optimizer's state. Raises OSError."""
        _write(self.path / OPTIMIZER, save(state.tensors))
        scale = {} if state.scale is None else {"loss_scale": asdict(state.scale)}
        _write(self.path / OPTIMIZER_NOTE, json.dumps({"updates": state.updates, **scale}).encode())

    def write_rng(self, states: Mapping[str, Tensor]) -> None:
        """Write the generators' states. Raises OSError."""
        _write(self.path / RNG, save(dict(states)))

    def sync(self) -> None:
        """Sync all files written so far to disk. Raises OSError."""
        for child in self.path.iterdir():
            sync(child)

    def commit(self, note: CheckpointNote) -> Path:
        """Write offbook.json last, sync, rename into place, sync the parent. Raises OSError, EngineError."""
        files = list(self.path.iterdir())
        sizes = {child.name: child.stat().st_size for child in files}
        digests = {child.name: checkpoint_files.digest(child) for child in files}
        whole = note.model_copy(update={"sizes": sizes, "digests": digests})
        _write(self.path / NOTE, whole.model_dump_json(indent=1).encode())
        self.sync()
        sync(self.path)
        if self.target.exists():
            _make_room(self.target)
        os.rename(self.path, self.target)
        sync(self.folder)
        return self.target


def load_optimizer(path: Path) -> OptimizerState:
    """Read the optimizer's state of the checkpoint in `path`. Raises OSError, ValueError, SafetensorError."""
    note = json.loads((path / OPTIMIZER_NOTE).read_text("utf-8"))
    scale = LossScale(**note["loss_scale"]) if "loss_scale" in note else None
    return OptimizerState(load_file(path / OPTIMIZER), int(note["updates"]), scale)


def load_rng(path: Path) -> dict[str, Tensor]:
    """Read the generators' states of the checkpoint in `path`. Raises OSError, SafetensorError."""
    return load_file(path / RNG)


def rng_states() -> dict[str, Tensor]:
    """The states of torch's generators, uint8 tensors: `cpu`, and `cuda:{i}` if CUDA is initialised."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """The inverse of `rng_states`. States of devices that this machine does not have are ignored."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for name, state in states.items():
            if name != "cpu" and int(name.partition(":")[2]) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, name)


def _make_room(target: Path) -> None:
    """Move a damaged checkpoint aside. Raises EngineError for a complete one, which is never replaced, and StoreError for
    one that cannot be read."""
    try:
        checkpoint_files.read(target)
    except EngineError:
        checkpoint_files.put_aside(target)
        return
    raise EngineError(f"checkpoint {target} exists already and is complete; it is never overwritten")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
