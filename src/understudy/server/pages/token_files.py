"""Which token file tells of a trajectory, and why none does."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from ...engine import token_file
from ...engine.token_file import TokenFile, TokenHead
from ...errors import EngineError
from .updates import TrainUpdate

log = logging.getLogger(__name__)

_HEADS, _FILES = 64, 2
"""How many headers and whole files are remembered."""


@dataclass(frozen=True)
class Known:
    """A file as it was when it was read."""

    path: Path
    changed: int


class TokenFiles:
    """Reads the token files below models' folders. Used from several threads."""

    def __init__(self) -> None:
        self._heads: OrderedDict[Known, TokenHead | None] = OrderedDict()
        self._files: OrderedDict[Known, TokenFile] = OrderedDict()
        self._lock = Lock()

    def heads(self, folder: Path) -> Iterable[tuple[Known, TokenHead]]:
        """The readable files of a model's folder, that which was written last first."""
        for path in token_file.files(folder / "tokens"):
            known = self._known(path)
            head = self._head(known) if known is not None else None
            if known is not None and head is not None:
                yield known, head

    def of(self, folder: Path, trajectory: str, request: str | None = None) -> TokenFile | None:
        """The newest file of a model that tells of a trajectory, that of a train request where one is named."""
        for known, head in self.heads(folder):
            if (request is None or head.request_id == request) and head.calls_of(trajectory):
                return self._file(known)
        return None

    def of_request(self, folder: Path, request: str) -> TokenHead | None:
        """The header of a train request's file."""
        return next((head for _, head in self.heads(folder) if head.request_id == request), None)

    def _known(self, path: Path) -> Known | None:
        try:
            return Known(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return None  # swept meanwhile

    def _head(self, known: Known) -> TokenHead | None:
        with self._lock:
            if known not in self._heads:
                self._heads[known] = _read_head(known.path)
                while len(self._heads) > _HEADS:
                    self._heads.popitem(last=False)
            return self._heads[known]

    def _file(self, known: Known) -> TokenFile | None:
        with self._lock:
            if known not in self._files:
                try:
                    self._files[known] = token_file.read(known.path)
                except (OSError, EngineError) as error:
                    log.warning("%s", error)
                    return None
                while len(self._files) > _FILES:
                    self._files.popitem(last=False)
            return self._files[known]


def _read_head(path: Path) -> TokenHead | None:
    try:
        return token_file.read_head(path)
    except (OSError, EngineError) as error:
        log.warning("%s", error)
        return None


def why_none(update: TrainUpdate | None, head: TokenHead | None, *, scored: bool, failed: bool, running: bool) -> str:
    """Why no token file tells of a rollout, in a sentence for its page."""
    if failed:
        return "An exception ended this rollout, so it is unscored and trains nothing."
    if not scored:
        return "This rollout has no reward, so it trains nothing."
    if update is None:
        return "No train request names this rollout: an evaluation, or it has not been trained yet."
    if update.state in ("queued", "running") and running:
        return "The step that trains this rollout is still under way."
    if update.state != "done":
        return f"The train request of this rollout is {update.state}: {update.why or 'nothing was applied'}"
    if update.no_signal == "equal_rewards":
        return (
            "The rewards of each group of this step are equal: nothing was computed, so nothing is known of its tokens."
        )
    if head is not None:
        return (
            "This rollout trained nothing in its step: the rewards of its group are equal, too few of them are scored, or "
            "none of its calls could be trained."
        )
    return (
        "The learner's numbers are no longer kept: token files exist for the newest keep_tokens= steps of a model, and for "
        "none with keep_tokens=0. What the sampler recorded is shown."
    )
