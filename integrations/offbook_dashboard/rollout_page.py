"""`GET /trajectories/{id}`: a rollout, with the learner's numbers for its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from numpy.typing import NDArray

from offbook.base.types import Call
from offbook.base.wire import TrajectoryRecord
from offbook.engine.token_file import TokenFile
from offbook.engine.token_tree import common_prefix
from offbook.server.views.numbers import DASH
from offbook.server.views.run_index import TrainUpdate

from .conversation import CallTurn, turns
from .page_urls import group_url, name_of
from .rendering import RUNS, Crumb, SourceDep, UnknownPage, page, run_crumbs, step_crumb
from .source import DashboardSource
from .step_groups import GroupLine, group_lines
from .token_pieces import TokenPieces, folder_of_base, pieces_of
from .token_view import COLOURS, Colour, TokenView, advantage_words, token_file_of, token_heads, token_view, why_none

router = APIRouter()

_AROUND = 12
"""Tokens shown before and after a fork."""


@dataclass(frozen=True)
class ForkNote:
    """A fork: the place where a prompt differs from the tokens of an earlier call."""

    earlier: int  # number of the earlier call in the rollout
    position: int  # first token that differs
    before: str  # text before the fork, equal in both
    was: str  # text after the fork in the earlier call
    now: str  # text after the fork in the prompt


@dataclass(frozen=True)
class RolloutView:
    """A rollout with its turns, tokens, forks and group."""

    id: str
    record: TrajectoryRecord | None  # None if the rollout is not finished
    calls: tuple[Call, ...]
    turns: tuple[CallTurn, ...]
    tokens: TokenView
    forks: dict[int, ForkNote]  # by number of the call
    group: GroupLine | None
    why: str  # why no token file contains the rollout; "" if one does
    prompts: dict[int, str]  # by number of the call: the new text of its prompt, with the chat template's markup

    @property
    def name(self) -> str:
        """A short name, such as Rollout 1."""
        place = self.record.place if self.record is not None else None
        return f"Rollout {place.index + 1}" if place is not None and place.index is not None else "Rollout"

    @property
    def model(self) -> str:
        """The model it was finished for; for an unfinished rollout, that of its first call."""
        return self.record.model if self.record is not None else self.calls[0].model if self.calls else ""

    @property
    def steps(self) -> tuple[int, ...]:
        """The policy steps that sampled its calls."""
        return tuple(sorted({call.step for call in self.calls}))

    @property
    def stopped(self) -> str:
        """The type of its exception, or else the finish reason of its last answer."""
        exception = self.record.exception if self.record is not None else None
        return exception.type if exception is not None else stop_reason(self.calls)

    @property
    def tool_calls(self) -> int:
        """Number of sampled tool calls."""
        return sum(len(o.message.get("tool_calls") or ()) for call in self.calls for o in call.outputs)

    def metrics(self, *, parts: bool) -> dict[str, float]:
        """The parts of its reward by name, or its other metrics."""
        metrics = self.record.metrics if self.record is not None else {}
        return {
            name.removeprefix("part/"): value for name, value in metrics.items() if name.startswith("part/") == parts
        }

    @property
    def explanations(self) -> tuple[str, ...]:
        """The explanations that judges logged."""
        return explanations(self.record)


@router.get("/trajectories/{trajectory_id}")
async def rollout_page(
    request: Request,
    trajectory_id: str,
    source: SourceDep,
    colour: Annotated[Colour | None, Query()] = None,
) -> HTMLResponse:
    """The page of a rollout, finished or not. `colour`: see `Colour`."""
    name = name_of(trajectory_id) or ""
    trajectory = await source.trajectory(name)
    if trajectory is None:
        raise UnknownPage("Unknown rollout", f"There is no rollout {name!r} here.")
    record, calls = trajectory.trajectory, trajectory.all_calls()
    place = record.place if record is not None else None
    update = await source.update_of(place.run, name) if place is not None else None
    group = None
    if place is not None and place.group is not None:
        [group] = group_lines(await source.group(place.run, place.group))
    view = await asyncio.to_thread(_view, source, name, record, calls, group, update, colour)
    numbers = {call.id: number for number, call in enumerate(view.calls, 1)}
    answers = list(view.tokens.answers.values())
    context = {
        "view": view,
        "record": view.record,
        "tokens": view.tokens,
        "colours": COLOURS,
        "advantage": advantage_words(view.tokens.advantages),
        "answer_numbers": {(answer.call_id, answer.index): number for number, answer in enumerate(answers)},
        "token_data": [answer.columns | {"call": numbers[answer.call_id], "why": answer.why} for answer in answers],
    }
    return page(request, "rollout.html", view.name, _crumbs(view), context)


def _crumbs(view: RolloutView) -> tuple[Crumb, ...]:
    place = view.record.place if view.record is not None else None
    if place is None or place.run is None:
        return RUNS, Crumb(view.name)
    below = [step_crumb(place.run, place.step), Crumb(view.name)]
    if place.group is not None:
        below.insert(1, Crumb(place.scenario or "Group", group_url(place.run, place.step, place.group)))
    return run_crumbs(place.run, *below)


def _view(
    source: DashboardSource,
    trajectory_id: str,
    record: TrajectoryRecord | None,
    calls: tuple[Call, ...],
    group: GroupLine | None,
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
        if (file := token_file_of(folder[0], trajectory_id)) is not None:
            files[model] = file
        if update is not None and update.model == model:
            head = next((head for _, head in token_heads(folder[0]) if head.request_id == update.id), None)
    pieces = {
        model: pieces_of(folder_of_base(folder[1].base_model if folder is not None else model))
        for model, folder in folders.items()
    }
    why = ""
    if not files:
        scored = record is not None and record.reward is not None
        failed = record is not None and record.exception is not None
        why = why_none(update, head, scored=scored, failed=failed, running=source.engine is not None)
    forks, prompts = _forks(calls, pieces)
    tokens = token_view(calls, record, files, pieces, colour)
    return RolloutView(trajectory_id, record, calls, turns(calls), tokens, forks, group, why, prompts)


def stop_reason(calls: Sequence[Call]) -> str:
    """The finish reason of a rollout's last answer."""
    reasons = [output.finish_reason for call in calls for output in call.outputs]
    return (reasons[-1] or DASH) if reasons else "no call"


def _forks(calls: Sequence[Call], pieces: dict[str, TokenPieces | None]) -> tuple[dict[int, ForkNote], dict[int, str]]:
    """The forks and the new text of each prompt, by number of the call."""
    sequences = [
        (number, call.model, np.array([*call.prompt_ids, *output.token_ids], np.int32))
        for number, call in enumerate(calls, 1)
        for output in call.outputs
    ]
    notes: dict[int, ForkNote] = {}
    prompts: dict[int, str] = {}
    for number, call in enumerate(calls, 1):
        prompt = np.asarray(call.prompt_ids, np.int32)
        token_pieces = pieces.get(call.model)
        earlier = [(n, ids) for n, model, ids in sequences if n < number and model == call.model]
        shared = 0
        if earlier:
            best, ids = max(earlier, key=lambda item: common_prefix(item[1], prompt))
            shared = common_prefix(ids, prompt)
            if shared < len(ids):
                notes[number] = _note(best, ids, prompt, shared, token_pieces)
        if token_pieces is not None and len(prompt):
            prompts[number] = token_pieces.text(prompt[shared:].tolist())
    return notes, prompts


def _note(
    earlier: int,
    ids: NDArray[np.int32],
    prompt: NDArray[np.int32],
    position: int,
    pieces: TokenPieces | None,
) -> ForkNote:
    def text(part: NDArray[np.int32]) -> str:
        return pieces.text(part.tolist()) if pieces is not None else " ".join(map(str, part.tolist()))

    end = position + _AROUND
    return ForkNote(
        earlier,
        position,
        text(ids[max(0, position - _AROUND) : position]),
        text(ids[position:end]),
        text(prompt[position:end]),
    )


def explanations(record: TrajectoryRecord | None) -> tuple[str, ...]:
    """The explanations of judges in a rollout's logs."""
    logs = record.logs if record is not None else ()
    return tuple(line.partition("explanation: ")[2] for line in logs if "explanation: " in line[:60])
