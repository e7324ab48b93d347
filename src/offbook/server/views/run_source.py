"""Reads runs with their steps, updates and evaluations from the records, with or without a running engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from offbook.base.wire import TrajectoryWithCalls
from offbook.server.directory_lock import address_of_server
from offbook.server.records import overview
from offbook.server.records.database import Readable
from offbook.server.records.notes import ended_at
from offbook.server.records.overview import RolloutRow, RunRow, StepRollouts
from offbook.server.records.store import recorded_trajectory

from .run_index import EvaluationIndex, LoggedEvaluation, TrainUpdate, UpdateIndex

R = TypeVar("R")


@dataclass(frozen=True)
class RunOverview:
    """A run with its first and last rollout, its train requests and its evaluations, the latter two oldest first.

    `updates` leaves out requests that measured a held-out loss: `evaluations` has the loss. `newest_reward`: the mean over the rollouts that are of the step and split of its last one."""

    row: RunRow
    first: RolloutRow
    last: RolloutRow
    updates: tuple[TrainUpdate, ...]
    evaluations: tuple[LoggedEvaluation, ...]
    newest_reward: float | None
    ended_at: float | None
    """When its trainer said that it is over."""

    @property
    def run(self) -> str | None:
        """The name of the run."""
        return self.row.run

    @property
    def models(self) -> tuple[str, ...]:
        """The models of its train requests and of its first and last rollout."""
        names = {update.model for update in self.updates} | {self.first.model, self.last.model}
        return tuple(sorted(names))

    @property
    def ended(self) -> bool:
        """Whether it is over: its trainer said so, and no rollout or update began after that. An evaluation is over when it is
        logged."""
        if self.is_evaluation:
            return bool(self.evaluations)
        began = max((self.last.started_at, *(update.created_at for update in self.updates)))
        return self.ended_at is not None and self.ended_at >= began

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each update's rollouts, oldest first. A supervised update has none."""
        return [update.reward for update in self.updates if update.state == "done" and update.reward is not None]

    @property
    def losses(self) -> list[float]:
        """The cross-entropy per token of each supervised update, in nats, oldest first."""
        losses = (update.cross_entropy for update in self.updates if update.supervised)
        return [loss for loss in losses if loss is not None]

    @property
    def loss(self) -> float | None:
        """The cross-entropy of its last update, if that is supervised."""
        done = [update for update in self.updates if update.state == "done"]
        return done[-1].cross_entropy if done and done[-1].supervised else None

    @property
    def reward(self) -> float | None:
        """The mean reward of its last update, or of an evaluation; before either has ended, of its newest rollouts."""
        logged = [value for entry in self.evaluations if (value := entry.value("reward")) is not None]
        measured = logged[-1:] if self.is_evaluation else self.rewards[-1:]
        return measured[0] if measured else self.newest_reward

    @property
    def is_evaluation(self) -> bool:
        """Whether it only evaluates."""
        return not self.updates and not self.row.trains


class RunSource:
    """Reads the records of a directory. Its methods raise StoreError if they cannot be read."""

    def __init__(self, records: Readable, folder: Path) -> None:
        """`folder` is the server's directory."""
        self.folder = folder
        self._records = records
        self._updates = UpdateIndex()
        self._evaluations = EvaluationIndex()

    @property
    def training(self) -> str | None:
        """The id of the train request that is being applied, if that is known before the records have it."""
        return None

    @property
    def other_server(self) -> str | None:
        """The address of a server that runs on the directory in another process."""
        return address_of_server(self.folder)

    @property
    def served(self) -> bool:
        """Whether a server runs on the directory."""
        return self.other_server is not None

    async def read(self, read: Callable[[Connection], R]) -> R:
        """Call `read` with a connection to the records, and return its result."""
        return await self._records.read(read)

    async def runs(self) -> list[RunRow]:
        """All runs, most recently active first."""
        return await self.read(overview.run_rows)

    async def overviews(self, rows: Sequence[RunRow]) -> list[RunOverview]:
        """These runs with their train requests and evaluations."""

        def read(connection: Connection) -> list[RunOverview]:
            self._updates.refresh(connection)
            self._evaluations.refresh(connection)
            ends = overview.rollouts_at(connection, {number for row in rows for number in (row.first, row.last)})
            return [
                RunOverview(
                    row,
                    ends[row.first],
                    ends[row.last],
                    tuple(
                        update
                        for update in self._updates.of_run(row.run)
                        if not (update.evaluates and update.state == "done")
                    ),
                    self._evaluations.of_run(row.run),
                    overview.newest_reward(connection, row),
                    ended_at(connection, row.run),
                )
                for row in rows
            ]

        return await self.read(read)

    async def run(self, run: str | None) -> RunOverview | None:
        """One run; None if it has no rollouts."""
        row = await self.read(lambda connection: overview.run_row(connection, run))
        return (await self.overviews([row]))[0] if row is not None else None

    async def steps(self, run: str | None) -> list[StepRollouts]:
        """The steps and splits of a run, newest step first."""
        return await self.read(lambda connection: overview.step_rows(connection, run))

    async def rollouts(self, run: str | None, step: int | None) -> list[RolloutRow]:
        """The rollouts of a step, of all splits, in order of finishing."""
        return await self.read(lambda connection: overview.rollouts_of_step(connection, run, step))

    async def trajectory(self, trajectory_id: str) -> TrajectoryWithCalls | None:
        """A trajectory, finished or not, with its calls and their tokens; None if it is unknown."""
        return await self.read(lambda connection: recorded_trajectory(connection, trajectory_id))
