"""`GET /runs/{run}/steps/{step}/groups/{group}`: the rollouts of a group, side by side without what all have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from offbook.base.numbers import distinct
from offbook.base.types import Call
from offbook.base.wire import TrajectoryRecord
from offbook.engine.token_file import TokenHead
from offbook.server.records.call_rows import WHOLE, read_calls
from offbook.server.records.overview import RolloutRow
from offbook.server.records.store import finished
from offbook.server.views.run_index import TrainUpdate

from .conversation import ShownMessage, shown, turns
from .page_urls import name_of
from .rendering import Crumb, SourceDep, UnknownPage, page, run_crumbs, step_crumb
from .rollout_page import explanations, stop_reason
from .source import DashboardSource
from .step_groups import GroupLine, RewardChip, group_lines
from .token_view import advantage_words, token_heads, why_none

router = APIRouter()

SIDES = 16
"""Most rollouts that are shown side by side. The table lists all."""


@dataclass(frozen=True)
class Side:
    """A rollout of the group. `messages` are those after what all rollouts have in common."""

    chip: RewardChip
    advantage: str  # "" without a token file
    calls: int
    tokens: int  # sampled
    stopped: str  # finish reason or exception
    explanations: tuple[str, ...]
    messages: tuple[ShownMessage, ...]


@dataclass(frozen=True)
class GroupView:
    """A group of rollouts. `common` are the messages at the beginning of all. `why`: why no token file contains it, or ""."""

    line: GroupLine
    sides: tuple[Side, ...]
    common: tuple[ShownMessage, ...]
    why: str

    @property
    def title(self) -> str:
        """Its scenario, or its id without one."""
        return self.line.scenario or self.line.group or ""

    @property
    def task(self) -> str:
        """The last user message, or prompt, that all rollouts have in common; empty without one."""
        return next((message.text for message in reversed(self.common) if message.role in ("user", "prompt")), "")


@router.get("/runs/{run}/steps/{step}/groups/{group}")
async def group_page(request: Request, run: str, step: str, group: str, source: SourceDep) -> HTMLResponse:
    """The page of a group. `step` is only part of the address."""
    del step
    run_id, name = name_of(run), name_of(group)
    rows = await source.group(run_id, name) if name is not None else []
    if not rows:
        raise UnknownPage("Unknown group", f"There is no group {name!r} in the run {run_id!r}.")
    ids = [row.id for row in rows]

    def read(connection: Connection) -> tuple[dict[str, TrajectoryRecord], dict[str, tuple[Call, ...]]]:
        return finished(connection, ids), read_calls(connection, ids, WHOLE)

    records, calls = await source.read(read)
    update = await source.update_of(run_id, ids[0])
    view = await asyncio.to_thread(_view, source, rows, records, calls, update)
    crumbs = run_crumbs(run_id, step_crumb(run_id, rows[0].step), Crumb(view.title))
    best_first = sorted(view.sides, key=lambda side: -_reward(side.chip.rollout))
    return page(request, "group.html", view.title, crumbs, {"view": view, "beside": best_first[:SIDES]})


def _reward(row: RolloutRow) -> float:
    return row.reward if row.reward is not None else float("-inf")


def _view(
    source: DashboardSource,
    rows: Sequence[RolloutRow],
    records: Mapping[str, TrajectoryRecord],
    calls: Mapping[str, tuple[Call, ...]],
    update: TrainUpdate | None,
) -> GroupView:
    [line] = group_lines(rows)
    heads = _heads(source, rows, update)
    texts = {row.id: _messages(calls[row.id]) for row in rows}
    common = _common([text for text in texts.values() if text])
    sides: list[Side] = []
    for chip in line.chips:
        row, own = chip.rollout, calls[chip.rollout.id]
        advantages = dict.fromkeys(call.advantage for head in heads for call in head.calls_of(row.id))
        sides.append(
            Side(
                chip,
                advantage_words(tuple(advantages)),
                calls=len(own),
                tokens=sum(len(output.token_ids) for call in own for output in call.outputs),
                stopped=row.exception or stop_reason(own),
                explanations=explanations(records.get(row.id)),
                messages=texts[row.id][len(common) :],
            )
        )
    trained = any(side.advantage for side in sides)
    why = "" if trained else _why(line, update, heads, running=source.engine is not None)
    return GroupView(line, tuple(sides), common, why)


def _heads(source: DashboardSource, rows: Sequence[RolloutRow], update: TrainUpdate | None) -> list[TokenHead]:
    """The header of the newest token file with the group, for each of its models."""
    newest: list[TokenHead] = []
    ids = {row.id for row in rows}
    for model in dict.fromkeys([*((update.model,) if update is not None else ()), *(row.model for row in rows)]):
        folder = source.model_folder(model)
        heads = token_heads(folder[0]) if folder is not None else ()
        head = next((head for _, head in heads if any(call.trajectory in ids for call in head.calls)), None)
        newest += [head] if head is not None else []
    return newest


def _messages(calls: Sequence[Call]) -> tuple[ShownMessage, ...]:
    messages: list[ShownMessage] = []
    for turn in turns(calls):
        messages += turn.context
        messages += [shown({"role": "assistant"} | output.message) for output in turn.outputs[:1]]
    return tuple(messages)


def _common(texts: Sequence[tuple[ShownMessage, ...]]) -> tuple[ShownMessage, ...]:
    """The first messages that all rollouts have in common; empty for a single rollout."""
    if len(texts) < 2:
        return ()
    return tuple(same[0] for same in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def _why(line: GroupLine, update: TrainUpdate | None, heads: Sequence[TokenHead], *, running: bool) -> str:
    rewards = [
        chip.rollout.reward for chip in line.chips if chip.rollout.reward is not None and not chip.rollout.failed
    ]
    if update is None or not update.imitates:
        if len(rewards) < 2:
            return f"{len(rewards)} of {len(line.chips)} rollouts have a reward. A group needs two to compare, so it trains nothing."
        if len(distinct(rewards)) == 1:
            return f"All {len(rewards)} scored rollouts have the reward {rewards[0]:g}: there is nothing to compare, so the group trains nothing."
    return why_none(update, heads[0] if heads else None, scored=True, failed=False, running=running)
