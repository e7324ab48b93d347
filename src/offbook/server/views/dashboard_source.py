"""Reads what pages show from the records and the model folders, with or without a running engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection

from offbook.base.wire import TrajectoryWithCalls
from offbook.engine import checkpoint_files
from offbook.server.directory_lock import address_of_server
from offbook.server.models.checkpoints import ModelFacts, scan_models
from offbook.server.records import overview
from offbook.server.records.database import Readable
from offbook.server.records.notes import ended_at
from offbook.server.records.overview import RolloutRow, RunRow, StepRollouts
from offbook.server.records.store import recorded_trajectory

from .run_index import EvaluationIndex, ListedRun, LoggedEvaluation, TrainUpdate, UpdateIndex, under_trainings

if TYPE_CHECKING:
    from .token_view import TokenFiles

R = TypeVar("R")


@dataclass(frozen=True)
class EngineState:
    """The state of a running server. `training` is the id of the train request that is being applied."""

    version: str
    base_model: str
    engine: str
    sampler: str
    learner: str
    training: str | None


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


class DashboardSource:
    """Reads records and model folders. Its methods raise StoreError if the records cannot be read."""

    def __init__(self, records: Readable, folder: Path, engine: Callable[[], EngineState] | None = None) -> None:
        """`folder` is the server's directory. `engine` is None if no engine runs, as in `offbook ui`."""
        self.folder = folder
        self._records = records
        self._engine = engine
        self._updates = UpdateIndex()
        self._evaluations = EvaluationIndex()

    @cached_property
    def token_files(self) -> TokenFiles:
        """What steps keep of their tokens. Reading them needs numpy, which a list of runs does not."""
        from .token_view import TokenFiles

        return TokenFiles()

    @property
    def engine(self) -> EngineState | None:
        """The state of the running engine; None if none runs."""
        return self._engine() if self._engine is not None else None

    @property
    def other_server(self) -> str | None:
        """The address of a server that runs on the directory in another process; None with an engine here."""
        return address_of_server(self.folder) if self._engine is None else None

    @property
    def served(self) -> bool:
        """Whether a server runs on the directory, here or in another process."""
        return self._engine is not None or self.other_server is not None

    async def read(self, read: Callable[[Connection], R]) -> R:
        """Call `read` with a connection to the records, and return its result."""
        return await self._records.read(read)

    async def runs(self) -> list[RunRow]:
        """All runs, most recently active first."""
        return await self.read(overview.run_rows)

    async def listed(self) -> list[ListedRun]:
        """All runs, most recently active first. Evaluations are listed under the training that they belong to."""

        def read(connection: Connection) -> list[ListedRun]:
            self._updates.refresh(connection)
            return under_trainings(overview.run_rows(connection), self._updates)

        return await self.read(read)

    async def listed_at(self, run: str | None) -> ListedRun:
        """The training that a known run belongs to, or the run itself, with the evaluations under it."""
        return next(
            item for item in await self.listed() if run in (item.row.run, *(row.run for row in item.evaluations))
        )

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
                        each for each in self._updates.of_run(row.run) if not (each.evaluates and each.state == "done")
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

    async def update_of(self, run: str | None, trajectory_id: str) -> TrainUpdate | None:
        """The last train request with this trajectory of the run; None if there is none."""
        named = [update for update in await self._of_run(run) if trajectory_id in update.positions]
        return named[-1] if named else None

    async def _of_run(self, run: str | None) -> tuple[TrainUpdate, ...]:
        def read(connection: Connection) -> tuple[TrainUpdate, ...]:
            self._updates.refresh(connection)
            return self._updates.of_run(run)

        return await self.read(read)

    async def rollouts(self, run: str | None, step: int | None) -> list[RolloutRow]:
        """The rollouts of a step, of all splits, in order of finishing."""
        return await self.read(lambda connection: overview.rollouts_of_step(connection, run, step))

    async def group(self, run: str | None, group: str) -> list[RolloutRow]:
        """The rollouts of a group, sorted by their index in the group."""
        return await self.read(lambda connection: overview.rollouts_of_group(connection, run, group))

    async def trajectory(self, trajectory_id: str) -> TrajectoryWithCalls | None:
        """A trajectory, finished or not, with its calls and their tokens; None if it is unknown."""
        return await self.read(lambda connection: recorded_trajectory(connection, trajectory_id))

    def models(self) -> list[ModelFacts]:
        """All models of the directory."""
        return [facts for _, facts in scan_models(self.folder)]

    def model_folder(self, model: str) -> tuple[Path, ModelFacts] | None:
        """A model's folder and facts; None if there is no such model."""
        return next(((folder, facts) for folder, facts in scan_models(self.folder) if facts.name == model), None)

    def checkpoint_folder(self, model: str, step: int) -> Path | None:
        """The folder of a model's checkpoint; None if it does not exist."""
        model_folder = self.model_folder(model)
        path = checkpoint_files.path_of(model_folder[0] / "checkpoints", step) if model_folder is not None else None
        return path if path is not None and path.is_dir() else None
