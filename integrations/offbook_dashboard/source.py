"""Reads what pages show from the records and the model folders, with or without a running engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from offbook.engine import checkpoint_files
from offbook.server.models.checkpoints import ModelFacts, scan_models
from offbook.server.records import overview
from offbook.server.records.database import Readable
from offbook.server.records.overview import RolloutRow
from offbook.server.views.run_index import TrainUpdate
from offbook.server.views.run_source import RunSource


@dataclass(frozen=True)
class EngineState:
    """The state of a running server. `training` is the id of the train request that is being applied."""

    version: str
    base_model: str
    engine: str
    sampler: str
    learner: str
    training: str | None


class DashboardSource(RunSource):
    """Reads records and model folders. Its methods raise StoreError if the records cannot be read."""

    def __init__(self, records: Readable, folder: Path, engine: Callable[[], EngineState] | None = None) -> None:
        """`folder` is the server's directory. `engine` is None if no engine runs, as in `offbook ui`."""
        super().__init__(records, folder)
        self._engine = engine

    @property
    def engine(self) -> EngineState | None:
        """The state of the running engine; None if none runs."""
        return self._engine() if self._engine is not None else None

    @property
    def training(self) -> str | None:
        """The id of the train request that the running engine applies."""
        return self._engine().training if self._engine is not None else None

    @property
    def other_server(self) -> str | None:
        """The address of a server that runs on the directory in another process; None with an engine here."""
        return super().other_server if self._engine is None else None

    @property
    def served(self) -> bool:
        """Whether a server runs on the directory, here or in another process."""
        return self._engine is not None or super().served

    async def update_of(self, run: str | None, trajectory_id: str) -> TrainUpdate | None:
        """The last train request with this trajectory of the run; None if there is none."""

        def read(connection: Connection) -> tuple[TrainUpdate, ...]:
            self._updates.refresh(connection)
            return self._updates.of_run(run)

        named = [update for update in await self.read(read) if trajectory_id in update.positions]
        return named[-1] if named else None

    async def group(self, run: str | None, group: str) -> list[RolloutRow]:
        """The rollouts of a group, sorted by their index in the group."""
        return await self.read(lambda connection: overview.rollouts_of_group(connection, run, group))

    def model_folder(self, model: str) -> tuple[Path, ModelFacts] | None:
        """A model's folder and facts; None if there is no such model."""
        return next(((folder, facts) for folder, facts in scan_models(self.folder) if facts.name == model), None)

    def checkpoint_folder(self, model: str, step: int) -> Path | None:
        """The folder of a model's checkpoint; None if it does not exist."""
        model_folder = self.model_folder(model)
        path = checkpoint_files.path_of(model_folder[0] / "checkpoints", step) if model_folder is not None else None
        return path if path is not None and path.is_dir() else None
