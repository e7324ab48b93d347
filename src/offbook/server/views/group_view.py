"""Collects what the page and the exported file of a group show: its rollouts, what they share, and its token tree."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from sqlalchemy import Connection

from offbook.base.numbers import distinct
from offbook.base.types import Call
from offbook.base.wire import TrajectoryRecord
from offbook.engine.token_file import TokenHead
from offbook.server.records.call_reading import WHOLE, read_calls
from offbook.server.records.overview import RolloutRow
from offbook.server.records.store import finished

from .conversation import ShownMessage, shown, turns
from .dashboard_source import DashboardSource
from .group_tree import GroupTree, group_tree
from .numbers import DASH
from .page_urls import trajectory_url
from .rollout_view import explanations
from .run_index import TrainUpdate
from .token_files import why_none
from .token_view import advantage_words
from .tree_picture import SLIM, WIDE, Picture, TreeRollout, picture

SIDES = 16
"""Most rollouts that are shown side by side. The table lists all."""


@dataclass(frozen=True)
class Side:
    """A rollout of the group."""

    number: int
    row: RolloutRow
    advantage: str
    value: float | None  # its advantage; without a token file, its reward minus the group's mean
    calls: int
    tokens: int  # sampled
    shared: int  # tokens that other rollouts have too
    own: int  # tokens that no other rollout has
    stopped: str  # finish reason or exception
    explanations: tuple[str, ...]
    messages: tuple[ShownMessage, ...]  # after those that all rollouts have in common

    @property
    def label(self) -> str:
        """A short name, such as R1."""
        return f"R{self.number}"


@dataclass(frozen=True)
class ForkCount:
    """The labels of the rollouts that have forks of one cause, once per fork."""

    cause: str
    rollouts: tuple[str, ...]


@dataclass(frozen=True)
class GroupView:
    """A group of rollouts.

    `common` are the messages at the beginning of every rollout. `wide` and `slim` are drawings of the tree for large and
    small screens. `trained` says whether a token file contains the group; if not, `why` is the reason.
    """

    run: str | None
    step: int | None
    group: str
    scenario: str | None
    sides: tuple[Side, ...]
    common: tuple[ShownMessage, ...]
    tree: GroupTree | None
    wide: Picture | None
    slim: Picture | None
    forks: tuple[ForkCount, ...]
    update: TrainUpdate | None
    trained: bool
    why: str

    @property
    def rewards(self) -> list[float]:
        """The rewards of the scored rollouts."""
        return [side.row.reward for side in self.sides if side.row.reward is not None and not side.row.failed]

    @property
    def mean(self) -> float | None:
        """The mean of `rewards`; None without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def spread(self) -> float | None:
        """The population standard deviation of `rewards`; None without any."""
        mean = self.mean
        if mean is None:
            return None
        return (sum((reward - mean) ** 2 for reward in self.rewards) / len(self.rewards)) ** 0.5

    @property
    def task(self) -> str:
        """The last user message, or prompt, that all rollouts have in common; empty without one."""
        return next((message.text for message in reversed(self.common) if message.role in ("user", "prompt")), "")


async def group_view(source: DashboardSource, run: str | None, group: str) -> GroupView | None:
    """A group of a run; None if it has no rollouts."""
    rows = await source.group(run, group)
    if not rows:
        return None
    ids = [row.id for row in rows]

    def read(connection: Connection) -> tuple[dict[str, TrajectoryRecord], dict[str, tuple[Call, ...]]]:
        return finished(connection, ids), read_calls(connection, ids, WHOLE)

    records, calls = await source.read(read)
    update = await source.update_of(run, ids[0])
    return await asyncio.to_thread(_joined, source, run, group, rows, records, calls, update)


def _joined(
    source: DashboardSource,
    run: str | None,
    group: str,
    rows: Sequence[RolloutRow],
    records: Mapping[str, TrajectoryRecord],
    calls: Mapping[str, tuple[Call, ...]],
    update: TrainUpdate | None,
) -> GroupView:
    numbers = {(row.index if row.index is not None else position) + 1: row for position, row in enumerate(rows)}
    tree = group_tree({number: calls[row.id] for number, row in numbers.items()})
    heads = _heads(source, rows, update)
    advantages = {row.id: [call.advantage for head in heads for call in head.calls_of(row.id)] for row in rows}
    texts = {row.id: _messages(calls[row.id]) for row in rows}
    common = _common([texts[row.id] for row in rows if texts[row.id]])
    scored = [row.reward for row in rows if row.reward is not None and not row.failed]
    mean = sum(scored) / len(scored) if scored else None
    sides = tuple(
        Side(
            number=number,
            row=row,
            advantage=advantage_words(tuple(dict.fromkeys(advantages[row.id]))),
            value=_value(row, advantages[row.id], mean),
            calls=len(calls[row.id]),
            tokens=sum(len(output.token_ids) for call in calls[row.id] for output in call.outputs),
            shared=tree.shared(number) if tree is not None else 0,
            own=tree.own(number) if tree is not None else 0,
            stopped=_stopped(row, calls[row.id]),
            explanations=explanations(records.get(row.id)),
            messages=texts[row.id][len(common) :],
        )
        for number, row in numbers.items()
    )
    tree_rollouts = {s.number: TreeRollout(s.label, trajectory_url(s.row.id), s.row.reward, s.value) for s in sides}
    trained = any(advantages.values())
    return GroupView(
        run=run,
        step=rows[0].step,
        group=group,
        scenario=rows[0].scenario,
        sides=sides,
        common=common,
        tree=tree,
        wide=picture(tree, tree_rollouts, WIDE) if tree is not None else None,
        slim=picture(tree, tree_rollouts, SLIM) if tree is not None else None,
        forks=_forks(heads, sides),
        update=update,
        trained=trained,
        why="" if trained else _why(source, rows, scored, update, heads),
    )


def _heads(source: DashboardSource, rows: Sequence[RolloutRow], update: TrainUpdate | None) -> list[TokenHead]:
    """The header of the newest token file with the group, for each of its models."""
    newest: list[TokenHead] = []
    ids = {row.id for row in rows}
    for model in dict.fromkeys([*((update.model,) if update is not None else ()), *(row.model for row in rows)]):
        folder = source.model_folder(model)
        heads = source.token_files.heads(folder[0]) if folder is not None else ()
        head = next((head for _, head in heads if any(call.trajectory in ids for call in head.calls)), None)
        newest += [head] if head is not None else []
    return newest


def _value(row: RolloutRow, advantages: Sequence[float], mean: float | None) -> float | None:
    if advantages:
        return advantages[0]
    return row.reward - mean if row.reward is not None and mean is not None and not row.failed else None


def _messages(calls: Sequence[Call]) -> tuple[ShownMessage, ...]:
    """The messages of a rollout: for each call, what is new in its prompt, then its first answer."""
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


def _stopped(row: RolloutRow, calls: Sequence[Call]) -> str:
    if row.exception is not None:
        return row.exception
    reasons = [output.finish_reason for call in calls for output in call.outputs]
    return (reasons[-1] or DASH) if reasons else "no call"


def _forks(heads: Sequence[TokenHead], sides: Sequence[Side]) -> tuple[ForkCount, ...]:
    """Forks inside rollouts by cause, as the learner recorded them."""
    labels = {side.row.id: side.label for side in sides}
    by_cause: dict[str, list[str]] = {}
    for head in heads:
        for fork in head.forks:
            if fork.trajectory in labels:
                by_cause.setdefault(fork.cause, []).append(labels[fork.trajectory])
    return tuple(ForkCount(cause, tuple(names)) for cause, names in sorted(by_cause.items()))


def _why(
    source: DashboardSource,
    rows: Sequence[RolloutRow],
    scored: Sequence[float],
    update: TrainUpdate | None,
    heads: Sequence[TokenHead],
) -> str:
    imitated = update is not None and update.imitates
    if not imitated and len(scored) >= 2 and len(distinct(scored)) == 1:
        return f"All {len(scored)} scored rollouts have the reward {scored[0]:g}: there is nothing to compare, so the group trains nothing."
    if not imitated and len(scored) < 2:
        return (
            f"{len(scored)} of {len(rows)} rollouts have a reward. A group needs two to compare, so it trains nothing."
        )
    head = heads[0] if heads else None
    return why_none(update, head, scored=True, failed=False, running=source.engine is not None)
