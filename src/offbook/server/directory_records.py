"""The records of a directory, read without a server: the finished rollouts, and the models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from offbook.base.wire import ModelRecords, RolloutTrace, TrajectoryQuery

from .models.checkpoints import scan_models
from .records.call_rows import trace_page
from .records.database import open_records
from .records.overview import model_logs
from .stored_models import checkpoint_states


class DirectoryRecords:
    """Reads a server's directory, on which a server may run. Raises ConfigError for a folder without records, StoreError."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder

    async def rollouts(self, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
        """The rollouts that match the query, on all pages, the last finished first."""
        records = open_records(self._folder, briefly=True)
        try:
            while True:
                page = await records.read(partial(trace_page, query=query))
                for rollout in page.rollouts:
                    yield rollout
                if page.next is None:
                    return
                query = query.model_copy(update={"after": page.next})
        finally:
            records.close()

    async def models(self) -> list[ModelRecords]:
        """All models of the directory, with their checkpoints and logs."""
        records = open_records(self._folder, briefly=True)
        try:
            return [
                ModelRecords(
                    name=facts.name,
                    checkpoints=tuple(checkpoint_states(folder)),
                    logs=tuple(await records.read(partial(model_logs, model=facts.name))),
                )
                for folder, facts in scan_models(self._folder)
            ]
        finally:
            records.close()
