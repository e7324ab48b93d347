"""Text, colours and numbers of a rollout's sampled tokens, and the token files that have them.

The numbers of a trained token come from the token file. Other tokens have only what the sampler recorded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from offbook.base.errors import EngineError
from offbook.base.types import Call, CallOutput, Json
from offbook.base.wire import TrajectoryRecord
from offbook.engine import token_file
from offbook.engine.token_file import CLIPPED, TRAINED, TokenFile, TokenHead, TrainedCall
from offbook.server.views.numbers import signed
from offbook.server.views.run_index import TrainUpdate

from .token_pieces import TokenPiece, TokenPieces

logger = logging.getLogger(__name__)

Colour = Literal["advantage", "ratio", "logprob", "entropy", "none"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
Floats = NDArray[np.float64]

# Lower edges of the three tints of each colour.
ADVANTAGE_EDGES = (0.1, 0.75, 1.5)  # of |advantage|
RATIO_EDGES = (0.03, 0.1, 0.2)  # of |ln ratio|
LOGPROB_EDGES = (-math.log(0.9), -math.log(0.5), -math.log(0.1))  # of -logprob
ENTROPY_EDGES = (0.2, 0.7, 1.5)  # in nats


@dataclass(frozen=True)
class Cell:
    """The text and CSS classes of a token."""

    text: str
    css: str


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens of one choice of a call."""

    call_id: str
    index: int
    cells: tuple[Cell, ...]
    columns: dict[str, Json]  # the numbers of each token, by name
    trained: TrainedCall | None  # its entry in the token file
    why: str  # why it has no entry; "" if it has one
    tokens: int


@dataclass(frozen=True)
class TokenView:
    """All sampled tokens of a rollout."""

    answers: dict[tuple[str, int], SampledTokens]  # by call id and choice
    colour: Colour
    advantages: tuple[float, ...]  # the distinct advantages of its trained calls
    files: bool  # whether a token file contains the rollout
    moved: bool  # whether the ratios between the step's updates are known

    @property
    def trained_tokens(self) -> int:
        """Number of tokens in trained choices."""
        return sum(answer.tokens for answer in self.answers.values() if answer.trained is not None)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens in all choices."""
        return sum(answer.tokens for answer in self.answers.values())


def token_view(
    calls: Sequence[Call],
    record: TrajectoryRecord | None,
    files: Mapping[str, TokenFile],
    pieces: Mapping[str, TokenPieces | None],
    requested: str | None,
) -> TokenView:
    """Build the view. `files` and `pieces` are by model. `requested` is a colour, or None for a default."""
    trained = {
        (call.call_id, call.index): (file, call)
        for file in files.values()
        for call in (file.head.calls_of(record.id) if record is not None else ())
    }
    advantages = tuple(dict.fromkeys(line.advantage for _, line in trained.values()))
    colour = requested if requested in COLOURS else _default_colour(trained, advantages)
    answers: dict[tuple[str, int], SampledTokens] = {}
    for call in calls:
        for output in call.outputs:
            key = (call.id, output.index)
            answers[key] = _answer(call, output, record, trained.get(key), pieces.get(call.model), colour)
    moved = any(file.last_logprobs is not None for file in files.values())
    return TokenView(answers, colour, advantages, bool(trained), moved)


def _default_colour(
    trained: Mapping[tuple[str, int], tuple[TokenFile, TrainedCall]], advantages: Sequence[float]
) -> Colour:
    """The advantage if it differs between calls, else the ratio if it tints any token, else the logprob."""
    if len(advantages) > 1:
        return "advantage"
    tinted = any(set(_tints(_learned(file, call), "ratio")) - {"", "ctx"} for file, call in trained.values())
    return "ratio" if tinted else "logprob"


def _answer(
    call: Call,
    output: CallOutput,
    record: TrajectoryRecord | None,
    line: tuple[TokenFile, TrainedCall] | None,
    pieces: TokenPieces | None,
    colour: Colour,
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
    shown: dict[str, Json] = {
        "ids": list(ids),
        **{name: _plain(values) for name, values in columns.items()},
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
        # `moved` is the ratio that is clipped. With one update it is 1 and not stored: show the ratio to the sampler.
        moved = columns["moved"]
        return _diverging(np.log(columns["ratio"] if moved is None else moved), RATIO_EDGES)
    advantages = np.where(np.array(columns["kept"]), float(columns["advantage"]), np.nan)
    return _diverging(advantages, ADVANTAGE_EDGES)


def _diverging(values: Floats, edges: tuple[float, float, float]) -> list[str]:
    """CSS classes: `p1` to `p3` above zero, `n1` to `n3` below, "" near it, `ctx` for NaN."""
    return [
        "ctx"
        if math.isnan(value)
        else ""
        if abs(value) < edges[0]
        else f"{'p' if value > 0 else 'n'}{_bin(abs(value), edges)}"
        for value in values.tolist()
    ]


def _rising(values: Floats, edges: tuple[float, float, float]) -> list[str]:
    return [
        "ctx" if math.isnan(value) else "" if value < edges[0] else f"s{_bin(value, edges)}"
        for value in values.tolist()
    ]


def _bin(value: float, edges: tuple[float, float, float]) -> int:
    return 1 + (value >= edges[1]) + (value >= edges[2])


def _marks(piece: TokenPiece) -> str:
    if piece.special:
        return "special"
    return "nl" if piece.text and not piece.text.strip("\n") else ""


def _plain(column: Json) -> Json:
    """A column as JSON. NaN becomes null; nine digits preserve float32 values exactly."""
    if not isinstance(column, np.ndarray):
        return column
    values = cast(NDArray[np.float64], column)
    return [None if not math.isfinite(value) else float(f"{value:.9g}") for value in values.tolist()]


def not_trained(call: Call, output: CallOutput, record: TrajectoryRecord | None) -> str:
    """Why a choice is not trained, according to its record; "" if the record does not exclude it."""
    if call.late:
        return "late: the call was recorded after the rollout ended"
    if call.beyond_text:
        return "not text alone: the learner computes neither images nor sounds nor files"
    if not call.status.usable or not output.status.usable:
        return f"{call.status if not call.status.usable else output.status}: never trained"
    if record is not None and record.weights.get(call.id, 1.0) == 0:
        return "left out: train_on= gives this call weight 0"
    if call.sampling.temperature <= 0:
        return "context only: sampled at temperature 0"
    return "" if output.token_ids else "nothing was sampled"


def advantage_words(advantages: Sequence[float]) -> str:
    """The advantage, or the range of advantages, of a rollout's calls; "" without any.

    >>> advantage_words([0.5]), advantage_words([0.5, -0.25])
    ('+0.50', '−0.25 to +0.50')
    """
    if not advantages:
        return ""
    if len(advantages) == 1:
        return signed(advantages[0])
    return f"{signed(min(advantages))} to {signed(max(advantages))}"


def token_heads(folder: Path) -> Iterator[tuple[Path, TokenHead]]:
    """The readable token files in a model's folder with their headers, newest first."""
    for path in token_file.files(folder / "tokens"):
        with suppress(FileNotFoundError):  # deleted in the meantime
            if (head := _head(path, path.stat().st_mtime_ns)) is not None:
                yield path, head


def token_file_of(folder: Path, trajectory: str) -> TokenFile | None:
    """The newest token file of a model that contains a trajectory."""
    for path, head in token_heads(folder):
        if head.calls_of(trajectory):
            with suppress(FileNotFoundError):
                return _file(path, path.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=64)
def _head(path: Path, changed: int) -> TokenHead | None:
    del changed  # only a key of the cache
    try:
        return token_file.read_head(path)
    except (OSError, EngineError) as error:
        logger.warning("%s", error)
        return None


@lru_cache(maxsize=2)
def _file(path: Path, changed: int) -> TokenFile | None:
    del changed  # as in `_head`
    try:
        return token_file.read(path)
    except (OSError, EngineError) as error:
        logger.warning("%s", error)
        return None


def why_none(update: TrainUpdate | None, head: TokenHead | None, *, scored: bool, failed: bool, running: bool) -> str:
    """Why no token file contains a rollout, as text for its page.

    `update` is its train request, `head` that request's file if it exists; `running` says whether an engine runs.
    """
    if failed:
        return "An exception ended this rollout, so it is unscored and trains nothing."
    if update is not None and update.evaluates:
        return "This rollout is held out: its loss is measured, and it trains nothing."
    if not scored and not (update is not None and update.supervised):
        return "This rollout has no reward, so it trains nothing."
    if update is None:
        return "No train request has this rollout: it belongs to an evaluation, or has not been trained yet."
    if update.state in ("queued", "running") and running:
        return "The step that trains this rollout is still running."
    if update.state != "done":
        return f"The train request of this rollout is {update.state}: {update.why or 'nothing was applied'}"
    if update.no_signal is not None and update.min_reward is not None:
        return f"Nothing was computed, so its tokens have no numbers: {update.why}."
    if update.no_signal == "equal_rewards":
        return "All rewards of each group of this step are equal. Nothing was computed, so its tokens have no numbers."
    if head is not None and update.min_reward is not None:
        return (
            f"This step imitates rollouts with a reward of at least {update.min_reward:g}. This one has a lower reward, all "
            "rollouts of its group have it, or none of its calls could be trained."
        )
    if head is not None:
        return (
            "This rollout trained nothing in its step: the rewards of its group are equal, too few of its rollouts are "
            "scored, or none of its calls could be trained."
        )
    return (
        "The learner's numbers have been deleted: a model keeps the token files of its newest keep_tokens= steps, and none "
        "with keep_tokens=0. This page shows what the sampler recorded."
    )
