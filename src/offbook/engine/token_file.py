"""The token file of a step: what the learner knew of every sampled token that it trained, for the pages of the server.

`{model}/tokens/{n:04d}.safetensors` stands beside `{model}/checkpoints/{n:04d}/`; that of a step that was computed and
not applied ends in `.not-applied.safetensors`. Arrays are [N] over the targets of the step, in the order of its calls;
everything per call is JSON in the header. No torch.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save  # pyright: ignore[reportUnknownVariableType]  # safetensors is only partly typed

from offbook.base.errors import EngineError

from .checkpoint_files import write_bytes

FORMAT = 1
NOT_APPLIED = ".not-applied"
_SUFFIX = ".safetensors"
_HEAD = "offbook"

TRAINED, CLIPPED = 1, 2
"""Bits of `flags`: the token entered the loss; the clip of the ratio cut or stopped its gradient in some update."""


class TrainedCall(BaseModel):
    """A trained call: its targets are `offset` to `offset + tokens` of the step.

    `advantage` is the advantage times `weight`, as the loss takes it. `leaf` is the segment of the tree with its last token.
    `constrained`: why the recorded logprobs were not used."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="constants")

    trajectory: str
    call_id: str
    index: int
    step: int  # that sampled it
    prompt: int  # tokens
    offset: int
    tokens: int
    advantage: float
    weight: float
    constrained: str | None
    leaf: int


class TokenHead(BaseModel):
    """What the header says: enough to find a trajectory without reading its arrays."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="constants")

    format: int
    model: str
    step: int
    applied: bool
    request_id: str
    loss: str
    updates: int
    created_at: float
    calls: tuple[TrainedCall, ...]

    def calls_of(self, trajectory: str) -> tuple[TrainedCall, ...]:
        """The trained calls of a trajectory, in the order of the step."""
        return tuple(call for call in self.calls if call.trajectory == trajectory)


@dataclass(frozen=True)
class TokenFile:
    """The arrays of a step, [N] over its targets, and its tree by segments, [S].

    `recorded` is the sampler's logprob (NaN: none), `logprobs` and `entropy` the learner's at the start of the step,
    `last_logprobs` those that its last update saw, `coefficients` d loss / d logprob of that update. A segment is a run
    of `segment_length` tokens below the end of `segment_parent` (-1: a root)."""

    head: TokenHead
    token_ids: NDArray[np.int32]
    recorded: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float16]
    coefficients: NDArray[np.float32]
    flags: NDArray[np.uint8]
    segment_length: NDArray[np.int32]
    segment_parent: NDArray[np.int32]
    last_logprobs: NDArray[np.float32] | None = None  # None: one update, which is at the start of the step

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Advantage times weight of each target, [N]."""
        calls = self.head.calls
        return np.repeat(np.array([call.advantage for call in calls], np.float64), [call.tokens for call in calls])

    @property
    def ratios(self) -> NDArray[np.float64]:
        """The learner's probability at the start of the step over the recorded one, [N]; NaN without a recorded one."""
        return np.exp(self.logprobs.astype(np.float64) - self.recorded.astype(np.float64))

    @property
    def update_ratios(self) -> NDArray[np.float64]:
        """The probability that the last update saw over that at the start of the step: what the clip bounds, [N]."""
        if self.last_logprobs is None:
            return np.ones(len(self.logprobs))
        return np.exp(self.last_logprobs.astype(np.float64) - self.logprobs.astype(np.float64))

    def path(self, leaf: int) -> tuple[int, ...]:
        """The segments from a root to `leaf`."""
        above: list[int] = []
        while leaf >= 0:
            above.append(leaf)
            leaf = int(self.segment_parent[leaf])
        return tuple(reversed(above))


_ARRAYS = ("token_ids", "recorded", "logprobs", "entropy", "coefficients", "flags", "segment_length", "segment_parent")


def folder_of(checkpoints: Path) -> Path:
    """Where the token files of the model with this checkpoints folder lie."""
    return checkpoints.parent / "tokens"


def path_of(folder: Path, step: int, *, applied: bool = True) -> Path:
    """The token file of the step from `step - 1` to `step`."""
    return folder / f"{step:04d}{'' if applied else NOT_APPLIED}{_SUFFIX}"


def write(folder: Path, tokens: TokenFile) -> Path:
    """Write a token file atomically, and sync it to disk. Raises OSError, after it removed the partial file."""
    path = path_of(folder, tokens.head.step, applied=tokens.head.applied)
    arrays = {name: np.ascontiguousarray(getattr(tokens, name)) for name in _ARRAYS}
    if tokens.last_logprobs is not None:
        arrays["last_logprobs"] = np.ascontiguousarray(tokens.last_logprobs)
    content = save(arrays, {_HEAD: tokens.head.model_dump_json()})
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)
    return path


def sweep(folder: Path, keep: int) -> None:
    """Remove all but the `keep` files that were written last. Raises OSError."""
    for path in files(folder)[keep:]:
        path.unlink(missing_ok=True)


def files(folder: Path) -> list[Path]:
    """The token files of a model, that which was written last first. Anything but a regular file is left out: to open a
    FIFO may block forever."""
    dated: list[tuple[int, Path]] = []
    for path in folder.glob(f"[0-9]*{_SUFFIX}"):
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue  # swept meanwhile
        if stat.S_ISREG(facts.st_mode):
            dated.append((facts.st_mtime_ns, path))
    return [path for _, path in sorted(dated, reverse=True)]


def read_head(path: Path) -> TokenHead:
    """The header of a token file. Raises OSError, EngineError."""
    try:
        with safe_open(path, "np") as file:  # pyright: ignore[reportUnknownVariableType]  # safetensors is only partly typed
            metadata = cast(dict[str, str], file.metadata() or {})  # pyright: ignore[reportUnknownMemberType]
        return _head(metadata[_HEAD])
    except (SafetensorError, ValidationError, KeyError, ValueError) as error:
        raise EngineError(f"token file {path} cannot be read: {error}") from error


def read(path: Path) -> TokenFile:
    """A whole token file. Raises OSError, EngineError."""
    head = read_head(path)
    try:
        arrays = load(path.read_bytes())
        tokens = TokenFile(head, **{name: arrays[name] for name in _ARRAYS}, last_logprobs=arrays.get("last_logprobs"))
    except (SafetensorError, KeyError, ValueError) as error:
        raise EngineError(f"token file {path} cannot be read: {error}") from error
    count = sum(call.tokens for call in head.calls)
    per_target = [tokens.token_ids, tokens.recorded, tokens.logprobs, tokens.entropy, tokens.coefficients, tokens.flags]
    if any(len(array) != count for array in (*per_target, tokens.last_logprobs) if array is not None):
        raise EngineError(f"token file {path} is damaged: its calls have {count} tokens and its arrays another number")
    return tokens


def _head(text: str) -> TokenHead:
    values = json.loads(text)
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')!r}, this version reads {FORMAT}")
    return TokenHead.model_validate(values)
