"""The folders with the jobs of train requests, which the learner reads."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path

from ...engine.protocol import TrainJob, write_job
from ...wire import TrainRequest
from ..records.store import Store
from .jobs import build_job, check_ids, job_folder

KEPT_JOBS = 10
"""Job folders of failed requests that are kept, newest first."""


class JobFolders:
    """One folder per train request under `root`."""

    def __init__(self, root: Path, store: Store) -> None:
        self._root = root
        self._store = store

    def folder(self, request_id: str) -> Path:
        """The folder of a request, which may not exist."""
        return job_folder(self._root, request_id)

    async def prepare(self, request: TrainRequest) -> None:
        """Write the job of a request from its recorded calls.

        Raises what `build_job` raises, StoreError and OSError.
        """
        ids = check_ids(request)
        records, calls = await asyncio.gather(self._store.finished(ids), self._store.calls_of(ids))
        job = await asyncio.to_thread(build_job, request, records, calls)
        await asyncio.to_thread(_replace, self.folder(request.id), job)

    def remove(self, request_id: str) -> None:
        """Delete the folder of a request. Files that cannot be deleted stay. Blocks."""
        shutil.rmtree(self.folder(request_id), ignore_errors=True)

    def prune(self, waiting: Iterable[str] = ()) -> None:
        """Delete the oldest folders beyond KEPT_JOBS, except those of the requests `waiting` in the queue. Blocks."""
        if self._root.is_dir():
            needed = {self.folder(request_id) for request_id in waiting}
            unused = [folder for folder in self._root.iterdir() if folder not in needed]
            folders = sorted(unused, key=lambda folder: folder.stat().st_mtime, reverse=True)
            for folder in folders[KEPT_JOBS:]:
                shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, job: TrainJob) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    try:
        write_job(folder, job)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
