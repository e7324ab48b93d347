"""What a run pays other LLMs, on disk from the answer on until the server has logged it. The next run of the model logs
what a kill left."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from offbook.base.errors import OffbookError, StoreError
from offbook.base.json_files import read_text
from offbook.base.server_options import default_dir
from offbook.base.temporary_folders import locked
from offbook.base.types import TrajectoryGroup, new_id
from offbook.base.wire import LogRequest
from offbook.client.model import TrainableModel
from offbook.llms.ledger import SpendingFile, SpendingTotals

logger = logging.getLogger("offbook")
PLACE = "place.json"
"""The file in a run's folder that says with which rollouts its costs are logged: a LogRequest without metrics."""
COSTS = "*.jsonl"


class UnloggedCosts(SpendingFile):
    """The costs of one run that are not logged yet: files in `OFFBOOK_DIR/spending/MODEL/RUN`, which this process locks.

    A file is renamed before its costs are logged, and its name is the log's id: logging it again changes nothing.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "new.jsonl")
        self._folder = folder
        self._lock: int | None = None
        self._writing = threading.Lock()
        self._place = LogRequest(split="train")
        self._logs = 0

    def add(self, purpose: str, totals: SpendingTotals) -> None:
        """Append totals. Raises StoreError."""
        with self._writing:
            if not self._folder.exists():
                self._make_folder()
            super().add(purpose, totals)

    def belong_to(self, groups: Sequence[TrajectoryGroup], step: int) -> None:
        """Name the rollouts that the next costs are for, and the model's step. Raises StoreError."""
        first = next((trajectory.id for group in groups for trajectory in group), None)
        ids = (first,) if first is not None else ()  # the server reads the run from it
        self._place = LogRequest(split="train", step=step, trajectory_ids=ids)
        if self._folder.exists():
            self._write_place(self._folder)

    async def log(self, model: TrainableModel) -> None:
        """Log what was paid since the last log. Call it when the rollouts are stored and before they are trained."""
        with self._writing:
            if (self._folder / "new.jsonl").exists():
                self._logs += 1
                (self._folder / "new.jsonl").rename(self._folder / f"{self._logs}.jsonl")
        await _log_files(self._folder, model, self._place)

    def close(self) -> None:
        """Remove the folder if everything is logged, and release it."""
        _remove_empty(self._folder)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _make_folder(self) -> None:
        hidden = self._folder.with_name(f".{self._folder.name}")  # no other run looks into it before it is locked
        try:
            hidden.mkdir(parents=True)
            self._lock = locked(hidden)
            self._write_place(hidden)
            hidden.rename(self._folder)
        except OSError as error:
            raise StoreError(
                f"{self._folder} cannot be written ({error.strerror or error}), so what other LLMs cost cannot be kept: set "
                "OFFBOOK_DIR to a folder that can"
            ) from error

    def _write_place(self, folder: Path) -> None:
        try:
            (folder / PLACE).write_text(self._place.model_dump_json(), "utf-8")
        except OSError as error:
            raise StoreError(f"{folder / PLACE} cannot be written: {error.strerror or error}") from error


@asynccontextmanager
async def unlogged_costs(model: TrainableModel) -> AsyncGenerator[UnloggedCosts]:
    """The costs of a run: logged at the end of the block, also when it ends with an error or Ctrl-C. Before the block, those
    of killed runs with the model are logged. Raises ServerError, StoreError."""
    parent = default_dir() / "spending" / model.name
    await _log_killed(parent, model)
    costs = UnloggedCosts(parent / new_id("run"))
    try:
        yield costs
        await costs.log(model)
    except BaseException as error:
        try:
            await costs.log(model)
        except OffbookError as failure:
            error.add_note(
                f"What other LLMs cost could not be logged, the next run tries again: {type(failure).__name__}: {failure}"
            )
        raise
    finally:
        costs.close()


async def _log_killed(parent: Path, model: TrainableModel) -> None:
    """Log what runs paid whose process has ended. A run that still goes on holds its lock."""
    for folder in sorted(parent.glob("[!.]*")):
        lock: int | None = None
        with suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
            lock = locked(folder)
        if lock is None:  # in use, gone, or the system has no locks
            continue
        try:
            await _log_files(folder, model, _place_of(folder))
            _remove_empty(folder)
        finally:
            os.close(lock)


async def _log_files(folder: Path, model: TrainableModel, place: LogRequest) -> None:
    """Log each file of costs and remove it."""
    for file in sorted(folder.glob(COSTS)):
        metrics: dict[str, float] = {}
        for purpose, totals in SpendingFile(file).totals().items():
            metrics |= totals.metrics(purpose)
        entry = place.model_copy(update={"id": f"{folder.name}-{file.stem}", "metrics": metrics})
        await (await model.api()).log(model.name, entry)
        file.unlink()


def _place_of(folder: Path) -> LogRequest:
    """Without a readable place, the costs are logged with the model alone."""
    try:
        return LogRequest.model_validate_json(read_text(folder / PLACE))
    except (OSError, ValueError) as error:
        logger.warning(
            "%s cannot be read, so what other LLMs cost is logged with the model alone, without its run and step: %s",
            folder / PLACE,
            error,
        )
        return LogRequest(split="train")


def _remove_empty(folder: Path) -> None:
    if not any(folder.glob(COSTS)):
        with suppress(FileNotFoundError):
            (folder / PLACE).unlink(missing_ok=True)
            folder.rmdir()
