"""What pages read: the records of runs and steps, and the checkpoints beside them, with or without a running engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection

from ...engine import checkpoint_files
from ...wire import TrajectoryWithCalls
from ..models.checkpoints import ModelFacts, scan_models
from ..records import overview
from ..records.call_reading import WHOLE, read_calls
from ..records.overview import RolloutRow, RunRow, StepRollouts
from ..records.read_only import Readable
from ..records.store import finished
from .token_files import TokenFiles
from .updates import EvaluationIndex, LoggedEvaluation, TrainUpdate, UpdateIndex

R = TypeVar("R")


@dataclass(frozen=True)
class EngineState:
    """What a running server says of itself. `training`: the id of the train request that is being applied."""

    version: str
    base_model: str
    engine: str
    sampler: str
    learner: str
    training: str | None


@dataclass(frozen=True)
class RunOverview:
    """A run with the first and last of its rollouts, and the train requests that learned from them, oldest first."""

    row: RunRow
    first: RolloutRow
    last: RolloutRow
    updates: tuple[TrainUpdate, ...]
    evaluations: tuple[LoggedEvaluation, ...]

    @property
    def run(self) -> str | None:
        return self.row.run

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that was trained on it or finished for it."""
        names = {update.model for update in self.updates} | {self.first.model, self.last.model}
        return tuple(sorted(names))


class DashboardSource:
    """`engine` is None where no engine runs, as in `understudy ui`. Raises StoreError where records cannot be read."""

    def __init__(self, records: Readable, folder: Path, engine: Callable[[], EngineState] | None = None) -> None:
        self.folder = folder
        self._records = records
        self._engine = engine
        self.token_files = TokenFiles()
        self._updates = UpdateIndex()
        self._evaluations = EvaluationIndex()

    @property
    def engine(self) -> EngineState | None:
        return self._engine() if self._engine is not None else None

    async def read(self, read: Callable[[Connection], R]) -> R:
        """What `read` makes of a connection to the records."""
        return await self._records.read(read)

    # ---- runs and steps

    async def runs(self) -> list[RunRow]:
        """Every run, the one that was active last first."""
        return await self.read(overview.run_rows)

    async def overviews(self, rows: list[RunRow]) -> list[RunOverview]:
        """These runs, with what was trained on them."""

        def read(connection: Connection) -> list[RunOverview]:
            self._updates.refresh(connection)
            self._evaluations.refresh(connection)
            ends = overview.rollouts_at(connection, {number for row in rows for number in (row.first, row.last)})
            return [
                RunOverview(
                    row,
                    ends[row.first],
                    ends[row.last],
                    self._updates.of_run(row.run),
                    self._evaluations.of_run(row.run),
                )
                for row in rows
            ]

        return await self.read(read)

    async def run(self, run: str | None) -> RunOverview | None:
        """One run; None where no rollout names it."""
        row = await self.read(lambda connection: overview.run_row(connection, run))
        return (await self.overviews([row]))[0] if row is not None else None

    async def steps(self, run: str | None) -> list[StepRollouts]:
        """The steps and splits of a run, the newest step first."""
        return await self.read(lambda connection: overview.step_rows(connection, run))

    async def updates_of_step(self, run: str | None, step: int | None) -> tuple[TrainUpdate, ...]:
        """The train requests that learned from rollouts of this policy step, oldest first."""
        return tuple(update for update in await self._of_run(run) if update.step == step)

    async def update_of(self, run: str | None, trajectory_id: str) -> TrainUpdate | None:
        """The last train request that names a trajectory of the run."""
        named = [update for update in await self._of_run(run) if trajectory_id in update.positions]
        return named[-1] if named else None

    async def _of_run(self, run: str | None) -> tuple[TrainUpdate, ...]:
        def read(connection: Connection) -> tuple[TrainUpdate, ...]:
            self._updates.refresh(connection)
            return self._updates.of_run(run)

        return await self.read(read)

    # ---- rollouts

    async def rollouts(self, run: str | None, step: int | None) -> list[RolloutRow]:
        """The rollouts of a step in order of finishing, all splits."""
        return await self.read(lambda connection: overview.rollouts_of_step(connection, run, step))

    async def group(self, run: str | None, group: str) -> list[RolloutRow]:
        """The rollouts of a group, by their index in it."""
        return await self.read(lambda connection: overview.rollouts_of_group(connection, run, group))

    async def trajectory(self, trajectory_id: str) -> TrajectoryWithCalls | None:
        """A trajectory with its calls and their tokens, finished or not; None where nothing is known of it."""

        def read(connection: Connection) -> TrajectoryWithCalls | None:
            record = finished(connection, [trajectory_id]).get(trajectory_id)
            calls = read_calls(connection, [trajectory_id], WHOLE)[trajectory_id]
            return TrajectoryWithCalls(trajectory=record, calls=calls) if record is not None or calls else None

        return await self.read(read)

    # ---- folders

    def models(self) -> list[ModelFacts]:
        """Every model of the directory."""
        return [facts for _, facts in scan_models(self.folder)]

    def model_folder(self, model: str) -> tuple[Path, ModelFacts] | None:
        """A model's folder and facts, read from the disk."""
        return next(((folder, facts) for folder, facts in scan_models(self.folder) if facts.name == model), None)

    def checkpoint_folder(self, model: str, step: int) -> Path | None:
        """Where checkpoint `step` of a model lies; None where it was deleted or never made."""
        found = self.model_folder(model)
        path = checkpoint_files.path_of(found[0] / "checkpoints", step) if found is not None else None
        return path if path is not None and path.is_dir() else None


async def _source_of(request: Request) -> DashboardSource:
    return request.app.state.dashboard


SourceDep = Annotated[DashboardSource, Depends(_source_of)]
