"""A rollout as its page and its exported file show it: its record, its turns, its tokens and its siblings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engine.token_file import TokenFile
from ...engine.token_tree import common_prefix
from ...types import Call
from ...wire import TrajectoryRecord
from ..records.overview import RolloutRow
from .conversation import CallTurn, turns
from .numbers import DASH
from .source import DashboardSource
from .token_files import why_none
from .token_pieces import TokenPieces, folder_of_base, pieces_of
from .token_view import TokenView, token_view
from .updates import TrainUpdate

CAUSES = {
    "template": "only white space or hidden reasoning came back other than it was sampled",
    "tools": "a sampled tool call came back as other text with the same meaning, or not at all",
    "history_edited": "the answer came back in other words, or an earlier message changed",
    "retokenised": "the same text came back as other tokens",
    "truncated": "the answer was cut off, and came back as other text",
    "retried": "the same prompt, sampled again",
    "other_prompt": "a new conversation, or other tools",
    "": "the cause is known where a token file tells of the rollout",
}
_AROUND = 12
"""Tokens shown of each side of a fork."""


@dataclass(frozen=True)
class ForkNote:
    """A prompt that leaves an earlier call (its number in the rollout) at token `position`: what stood there, and what came
    instead."""

    earlier: int
    position: int
    cause: str
    before: str
    was: str
    now: str

    @property
    def words(self) -> str:
        return CAUSES.get(self.cause, self.cause)


@dataclass(frozen=True)
class RolloutView:
    """`record` is None for a rollout that is not finished; `why` says why no token file tells of it. `siblings`: of its
    group. `forks`: by number of the call."""

    id: str
    record: TrajectoryRecord | None
    calls: tuple[Call, ...]
    turns: tuple[CallTurn, ...]
    tokens: TokenView
    forks: dict[int, ForkNote]
    siblings: tuple[RolloutRow, ...]
    update: TrainUpdate | None
    why: str
    prompts: dict[int, str]  # by number of the call: what is new in its prompt, as the model saw it

    @property
    def name(self) -> str:
        place = self.record.place if self.record is not None else None
        return f"Rollout {place.index + 1}" if place is not None and place.index is not None else "Rollout"

    @property
    def model(self) -> str:
        return self.record.model if self.record is not None else self.calls[0].model if self.calls else ""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that sampled its calls."""
        return tuple(sorted({call.step for call in self.calls}))

    @property
    def stopped(self) -> str:
        """How it ended: by its last call's finish reason, or its exception."""
        if self.record is not None and self.record.exception is not None:
            return self.record.exception.type
        reasons = [output.finish_reason for call in self.calls for output in call.outputs]
        return (reasons[-1] or DASH) if reasons else "no call"

    @property
    def group_mean(self) -> float | None:
        """The mean reward of its group's scored rollouts."""
        rewards = [row.reward for row in self.siblings if row.reward is not None and not row.failed]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def tool_calls(self) -> int:
        return sum(len(o.message.get("tool_calls") or ()) for call in self.calls for o in call.outputs)

    @property
    def parts(self) -> dict[str, float]:
        """What its reward was built from."""
        metrics = self.record.metrics if self.record is not None else {}
        return {name.removeprefix("part/"): value for name, value in metrics.items() if name.startswith("part/")}

    @property
    def other_metrics(self) -> dict[str, float]:
        metrics = self.record.metrics if self.record is not None else {}
        return {name: value for name, value in metrics.items() if not name.startswith("part/")}

    @property
    def explanations(self) -> tuple[str, ...]:
        """What a judge said of it."""
        return explanations(self.record)


async def rollout_view(source: DashboardSource, trajectory_id: str, colour: str | None = None) -> RolloutView | None:
    """A rollout, finished or not; None where nothing is known of it."""
    found = await source.trajectory(trajectory_id)
    if found is None:
        return None
    record, place = found.trajectory, found.trajectory.place if found.trajectory is not None else None
    siblings: list[RolloutRow] = []
    update = None
    if place is not None:
        update = await source.update_of(place.run, trajectory_id)
        if place.group is not None:
            siblings = await source.group(place.run, place.group)
    return await asyncio.to_thread(_joined, source, trajectory_id, record, found.calls, tuple(siblings), update, colour)


def _joined(
    source: DashboardSource,
    trajectory_id: str,
    record: TrajectoryRecord | None,
    calls: tuple[Call, ...],
    siblings: tuple[RolloutRow, ...],
    update: TrainUpdate | None,
    colour: str | None,
) -> RolloutView:
    models = dict.fromkeys([*((record.model,) if record is not None else ()), *(call.model for call in calls)])
    folders = {model: source.model_folder(model) for model in models}
    files: dict[str, TokenFile] = {}
    head = None
    for model, folder in folders.items():
        if folder is None:
            continue
        if (file := source.token_files.of(folder[0], trajectory_id)) is not None:
            files[model] = file
        if update is not None and update.model == model:
            head = source.token_files.of_request(folder[0], update.id)
    pieces = {
        model: pieces_of(folder_of_base(folder[1].base_model if folder is not None else model))
        for model, folder in folders.items()
    }
    why = (
        ""
        if files
        else why_none(
            update,
            head,
            scored=record is not None and record.reward is not None,
            failed=record is not None and record.exception is not None,
            running=source.engine is not None,
        )
    )
    forks, prompts = _forks(calls, files, pieces)
    tokens = token_view(calls, record, files, pieces, colour)
    return RolloutView(trajectory_id, record, calls, turns(calls), tokens, forks, siblings, update, why, prompts)


def _forks(
    calls: Sequence[Call], files: dict[str, TokenFile], pieces: dict[str, TokenPieces | None]
) -> tuple[dict[int, ForkNote], dict[int, str]]:
    """Where prompts leave earlier calls, and what is new in each prompt."""
    causes = {fork.later[0]: fork.cause for file in files.values() for fork in file.head.forks}
    sequences = [
        (number, call.model, _ids(call, output.token_ids))
        for number, call in enumerate(calls, 1)
        for output in call.outputs
    ]
    notes: dict[int, ForkNote] = {}
    prompts: dict[int, str] = {}
    for number, call in enumerate(calls, 1):
        prompt = np.asarray(call.prompt_ids, np.int32)
        known = pieces.get(call.model)
        earlier = [(n, ids) for n, model, ids in sequences if n < number and model == call.model]
        shared = 0
        if earlier:
            best, ids = max(earlier, key=lambda item: common_prefix(item[1], prompt))
            shared = common_prefix(ids, prompt)
            if shared < len(ids):
                notes[number] = _note(best, ids, prompt, shared, causes.get(call.id, ""), known)
        if known is not None and len(prompt):
            prompts[number] = known.text(prompt[shared:].tolist())
    return notes, prompts


def _note(
    earlier: int, ids: NDArray[np.int32], prompt: NDArray[np.int32], at: int, cause: str, known: TokenPieces | None
) -> ForkNote:
    def text(part: NDArray[np.int32]) -> str:
        return known.text(part.tolist()) if known is not None else " ".join(map(str, part.tolist()))

    end = at + _AROUND
    return ForkNote(earlier, at, cause, text(ids[max(0, at - _AROUND) : at]), text(ids[at:end]), text(prompt[at:end]))


def _ids(call: Call, completion: Sequence[int]) -> NDArray[np.int32]:
    return np.array([*call.prompt_ids, *completion], np.int32)


def explanations(record: TrajectoryRecord | None) -> tuple[str, ...]:
    """The explanations of judges among a rollout's logs."""
    logs = record.logs if record is not None else ()
    return tuple(line.partition("explanation: ")[2] for line in logs if "explanation: " in line[:60])
