"""Finds the token file that contains a trajectory, and explains why none does."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from offbook.base.errors import EngineError
from offbook.engine import token_file
from offbook.engine.token_file import TokenFile, TokenHead

from .run_index import TrainUpdate

logger = logging.getLogger(__name__)

_HEADS, _FILES = 64, 2
"""Number of headers and of whole files in the cache."""


@dataclass(frozen=True)
class FileVersion:
    """A file and its time of modification, in nanoseconds: the key of the cache."""

    path: Path
    changed: int


class TokenFiles:
    """A cache of the token files in model folders. Can be used from several threads."""

    def __init__(self) -> None:
        self._heads: OrderedDict[FileVersion, TokenHead | None] = OrderedDict()
        self._files: OrderedDict[FileVersion, TokenFile] = OrderedDict()
        self._lock = Lock()

    def heads(self, folder: Path) -> Iterable[tuple[FileVersion, TokenHead]]:
        """The readable files in a model's folder with their headers, newest first."""
        for path in token_file.files(folder / "tokens"):
            known = self._known(path)
            head = self._head(known) if known is not None else None
            if known is not None and head is not None:
                yield known, head

    def of(self, folder: Path, trajectory: str, request: str | None = None) -> TokenFile | None:
        """The newest file of a model that contains a trajectory; with `request`, only that train request's file."""
        for known, head in self.heads(folder):
            if (request is None or head.request_id == request) and head.calls_of(trajectory):
                return self._file(known)
        return None

    def of_request(self, folder: Path, request: str) -> TokenHead | None:
        """The header of a train request's file; None if there is none."""
        return next((head for _, head in self.heads(folder) if head.request_id == request), None)

    def _known(self, path: Path) -> FileVersion | None:
        try:
            return FileVersion(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return None  # deleted in the meantime

    def _head(self, known: FileVersion) -> TokenHead | None:
        with self._lock:
            if known not in self._heads:
                self._heads[known] = _read_head(known.path)
                while len(self._heads) > _HEADS:
                    self._heads.popitem(last=False)
            return self._heads[known]

    def _file(self, known: FileVersion) -> TokenFile | None:
        with self._lock:
            if known not in self._files:
                try:
                    self._files[known] = token_file.read(known.path)
                except (OSError, EngineError) as error:
                    logger.warning("%s", error)
                    return None
                while len(self._files) > _FILES:
                    self._files.popitem(last=False)
            return self._files[known]


def _read_head(path: Path) -> TokenHead | None:
    try:
        return token_file.read_head(path)
    except (OSError, EngineError) as error:
        logger.warning("%s", error)
        return None


def why_none(update: TrainUpdate | None, head: TokenHead | None, *, scored: bool, failed: bool, running: bool) -> str:
    """Why no token file contains a rollout, as text for its page.

    `update` is its train request, `head` that request's file if it exists; `running` says whether an engine runs.
    """
    if failed:
        return "An exception ended this rollout, so it is unscored and trains nothing."
    if update is not None and update.evaluates:
        return "This rollout is held out: its loss is measured, and it trains nothing."
    if not scored and not (update is not None and update.supervised):
        return "This rollout has no reward, so it trains nothing."
    if update is None:
        return "No train request has this rollout: it belongs to an evaluation, or has not been trained yet."
    if update.state in ("queued", "running") and running:
        return "The step that trains this rollout is still running."
    if update.state != "done":
        return f"The train request of this rollout is {update.state}: {update.why or 'nothing was applied'}"
    if update.no_signal is not None and update.min_reward is not None:
        return f"Nothing was computed, so its tokens have no numbers: {update.why}."
    if update.no_signal == "equal_rewards":
        return "All rewards of each group of this step are equal. Nothing was computed, so its tokens have no numbers."
    if head is not None and update.min_reward is not None:
        return (
            f"This step imitates rollouts with a reward of at least {update.min_reward:g}. This one has a lower reward, all "
            "rollouts of its group have it, or none of its calls could be trained."
        )
    if head is not None:
        return (
            "This rollout trained nothing in its step: the rewards of its group are equal, too few of its rollouts are "
            "scored, or none of its calls could be trained."
        )
    return (
        "The learner's numbers have been deleted: a model keeps the token files of its newest keep_tokens= steps, and none "
        "with keep_tokens=0. This page shows what the sampler recorded."
    )
