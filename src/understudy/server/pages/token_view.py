"""The sampled tokens of a rollout as the page shows them: their text, their colours, and the numbers behind them.

A sampled token that was trained takes its numbers from the token file; any other has what the sampler recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ...engine.token_file import CLIPPED, TRAINED, TokenFile, TrainedCall
from ...types import Call, CallOutput, Json
from ...wire import TrajectoryRecord
from .numbers import signed
from .shared_tokens import SharedRun, shared_runs
from .token_pieces import TokenPiece, TokenPieces

Colour = Literal["advantage", "ratio", "logprob", "entropy", "none"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
Floats = NDArray[np.float64]

ADVANTAGE_EDGES = (0.1, 0.75, 1.5)
RATIO_EDGES = (0.03, 0.1, 0.2)  # of |ln ratio|
LOGPROB_EDGES = (-math.log(0.9), -math.log(0.5), -math.log(0.1))  # of -logprob
ENTROPY_EDGES = (0.2, 0.7, 1.5)


@dataclass(frozen=True)
class Cell:
    """One token: its text, and the class of its tint and cue."""

    text: str
    css: str


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of one choice of a call. `trained`: its line in the token file; `why` says why it has none."""

    call_id: str
    index: int
    cells: tuple[Cell, ...]
    columns: dict[str, Json]
    trained: TrainedCall | None
    why: str
    tokens: int


@dataclass(frozen=True)
class TokenView:
    """All sampled tokens of a rollout. `advantages`: those of its trained calls, each once; `files`: whether any token
    file tells of it."""

    answers: dict[tuple[str, int], SampledTokens]
    colour: Colour
    advantages: tuple[float, ...]
    files: bool
    moved: bool

    @property
    def trained_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers.values() if answer.trained is not None)

    @property
    def sampled_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers.values())


def token_view(
    calls: Sequence[Call],
    record: TrajectoryRecord | None,
    files: Mapping[str, TokenFile],
    pieces: Mapping[str, TokenPieces | None],
    wanted: str | None,
) -> TokenView:
    """`files` and `pieces`: by model. `wanted` is a colour, or None for the one that shows something."""
    lines = {
        (call.call_id, call.index): (file, call)
        for file in files.values()
        for call in (file.head.calls_of(record.id) if record is not None else ())
    }
    advantages = tuple(dict.fromkeys(line.advantage for _, line in lines.values()))
    colour = wanted if wanted in COLOURS else _telling(lines, advantages)
    shared = {model: shared_runs(file, record.id) for model, file in files.items()} if record is not None else {}
    answers: dict[tuple[str, int], SampledTokens] = {}
    for call in calls:
        for output in call.outputs:
            key = (call.id, output.index)
            runs = shared.get(call.model, {}).get(key, ())
            answers[key] = _answer(call, output, record, lines.get(key), pieces.get(call.model), colour, runs)
    moved = any(file.last_logprobs is not None for file in files.values())
    return TokenView(answers, colour, advantages, bool(lines), moved)


def _telling(lines: Mapping[tuple[str, int], tuple[TokenFile, TrainedCall]], advantages: Sequence[float]) -> Colour:
    """One advantage for all tokens is one flat tint: then the ratio is opened, or the logprob where no ratio has a tint."""
    if len(advantages) > 1:
        return "advantage"
    tinted = any(set(_tints(_learned(file, call), "ratio")) - {"", "ctx"} for file, call in lines.values())
    return "ratio" if tinted else "logprob"


def _answer(
    call: Call,
    output: CallOutput,
    record: TrajectoryRecord | None,
    line: tuple[TokenFile, TrainedCall] | None,
    pieces: TokenPieces | None,
    colour: Colour,
    runs: Sequence[SharedRun],
) -> SampledTokens:
    ids = output.token_ids
    texts = pieces.pieces(ids) if pieces is not None else [TokenPiece(f"{token} ") for token in ids]
    columns = _recorded(output) if line is None else _learned(*line)
    tints = _tints(columns, colour)
    clipped = columns.get("clipped") or [False] * len(ids)
    cells = tuple(
        Cell(piece.text, " ".join(filter(None, ("t", tint, _marks(piece), "clip" if cut else ""))))
        for piece, tint, cut in zip(texts, tints, clipped, strict=True)
    )
    characters = {i: piece.part_of for i, piece in enumerate(texts) if piece.part_of}
    shown: dict[str, Json] = {
        "ids": list(ids),
        **{name: _plain(values) for name, values in columns.items()},
        "shared": [[run.start, run.end, run.text] for run in runs],
        "characters": characters,
    }
    why = "" if line is not None else not_trained(call, output, record)
    return SampledTokens(call.id, output.index, cells, shown, line[1] if line is not None else None, why, len(ids))


def _recorded(output: CallOutput) -> dict[str, Json]:
    return {"recorded": np.array(output.logprobs, np.float32).astype(np.float64)}


def _learned(file: TokenFile, call: TrainedCall) -> dict[str, Json]:
    here = slice(call.offset, call.offset + call.tokens)
    kept = (file.flags[here] & TRAINED) > 0
    logprobs = np.where(kept, file.logprobs[here].astype(np.float64), np.nan)
    ratios = np.where(kept, file.ratios[here], np.nan)
    return {
        "advantage": call.advantage,
        "weight": call.weight,
        "constrained": call.constrained,
        "recorded": file.recorded[here].astype(np.float64),
        "logprob": logprobs,
        "ratio": np.full(call.tokens, np.nan) if call.constrained else ratios,
        "entropy": np.where(kept, file.entropy[here].astype(np.float64), np.nan),
        "coefficient": file.coefficients[here].astype(np.float64),
        "moved": file.update_ratios[here] if file.last_logprobs is not None else None,
        "kept": kept.tolist(),
        "clipped": ((file.flags[here] & CLIPPED) > 0).tolist(),
    }


def _tints(columns: Mapping[str, Json], colour: Colour) -> list[str]:
    recorded: Floats = columns["recorded"]
    size = len(recorded)
    if colour == "none":
        return [""] * size
    if colour == "logprob":
        own = columns.get("logprob")
        values = recorded if own is None else np.where(np.isfinite(own), own, recorded)
        return _rising(-values, LOGPROB_EDGES)
    if "logprob" not in columns:
        return ["ctx"] * size
    if colour == "entropy":
        return _rising(columns["entropy"], ENTROPY_EDGES)
    if colour == "ratio":
        moved = columns["moved"]  # what the clip bounds; with one update all 1, and the sampler's ratio says more
        return _diverging(np.log(columns["ratio"] if moved is None else moved), RATIO_EDGES)
    advantages = np.where(np.array(columns["kept"]), float(columns["advantage"]), np.nan)
    return _diverging(advantages, ADVANTAGE_EDGES)


def _diverging(values: Floats, edges: tuple[float, float, float]) -> list[str]:
    """`p1` to `p3` above, `n1` to `n3` below, "" near zero; `ctx` where there is no number."""
    return [
        "ctx"
        if math.isnan(value)
        else ""
        if abs(value) < edges[0]
        else f"{'p' if value > 0 else 'n'}{_bin(abs(value), edges)}"
        for value in values.tolist()
    ]


def _rising(values: Floats, edges: tuple[float, float, float]) -> list[str]:
    """`s1` to `s3` by size; `ctx` where there is no number."""
    return [
        "ctx" if math.isnan(value) else "" if value < edges[0] else f"s{_bin(value, edges)}"
        for value in values.tolist()
    ]


def diverging(value: float | None) -> str:
    """The class of an advantage."""
    return "" if value is None else _diverging(np.array([value]), ADVANTAGE_EDGES)[0]


def _bin(value: float, edges: tuple[float, float, float]) -> int:
    return 1 + (value >= edges[1]) + (value >= edges[2])


def _marks(piece: TokenPiece) -> str:
    if piece.special:
        return "special"
    if piece.text and not piece.text.strip("\n"):
        return "nl"
    return "bytes" if piece.part_of else ""


def _plain(column: Json) -> Json:
    """As JSON, null for what is no number. Float32 values keep every digit."""
    if not isinstance(column, np.ndarray):
        return column
    values = cast(NDArray[np.float64], column)
    return [None if not math.isfinite(value) else float(f"{value:.9g}") for value in values.tolist()]


def not_trained(call: Call, output: CallOutput, record: TrajectoryRecord | None) -> str:
    """Why a choice is no target, as far as its record says; "" where it could be one."""
    if call.late:
        return "late: recorded after the rollout had ended"
    if not call.status.usable or not output.status.usable:
        return f"{call.status if not call.status.usable else output.status}: never trained"
    if record is not None and record.weights.get(call.id, 1.0) == 0:
        return "left out: train_on= gives this call weight 0"
    if call.sampling.temperature <= 0:
        return "context only: sampled at temperature 0"
    return "" if output.token_ids else "nothing was sampled"


def advantage_words(advantages: Sequence[float]) -> str:
    """The advantages of a rollout's calls, said once."""
    if not advantages:
        return ""
    if len(advantages) == 1:
        return signed(advantages[0])
    return f"{signed(min(advantages))} to {signed(max(advantages))}"
